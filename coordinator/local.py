"""The node on the coordinator's own machine: a child process that is started, watched and ended with us."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import structlog

from coordinator.registry import Registry

log = structlog.get_logger("coordinator.local")

BACK_OFF = (0.5, 30.0)
"""First and longest wait before it is started again, in seconds; a run of a minute resets it."""
DENIED, OTHER_CLUSTER = 4, 6
"""Exit codes of a node that no new start would change, the first where it had joined: it was removed, or it is in
another cluster."""
GRACE = 10.0
"""Longest wait for its end before it is killed, in seconds."""


class LocalNode:
    """Runs `python -m node.run` for this machine. `token` makes a join token when the node has no identity yet."""

    def __init__(self, state: Path, address: str, arguments: tuple[str, ...], token: Callable[[], str]) -> None:
        self._state = state
        self._address = address
        self._arguments = arguments
        self._token = token
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self.given_up = asyncio.Event()
        """It ended for a reason that no new start changes."""

    async def start(self) -> None:
        """Start it and keep it running."""
        await self._spawn()
        self._watch = asyncio.create_task(self._keep())

    async def _spawn(self) -> None:
        read, write = os.pipe()
        try:
            os.write(write, self._token().encode())
        finally:
            os.close(write)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", "node.run", "--state", str(self._state), "--url", self._address,
                "--token-fd", str(read), "--lifeline", *self._arguments,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, pass_fds=(read,),
                start_new_session=True,  # Ctrl-C is for us: we end it when our requests are done
            )  # fmt: skip
        finally:
            os.close(read)

    async def _keep(self) -> None:
        wait, loop = BACK_OFF[0], asyncio.get_running_loop()
        while self._process is not None:
            began = loop.time()
            code = await self._process.wait()
            if code == OTHER_CLUSTER or (code == DENIED and self._joined()):
                log.error("local node out", code=code, what="the next `cluster up` lets it join anew" if code == DENIED
                          else "`cluster leave` takes it out of the other cluster")  # fmt: skip
                self.given_up.set()
                return
            wait = BACK_OFF[0] if loop.time() - began > 60 else min(wait * 2, BACK_OFF[1])
            log.warning("local node ended", code=code, again_in=wait)
            await asyncio.sleep(wait)
            await self._spawn()

    def _joined(self) -> bool:
        return (self._state / "node" / "identity" / "identity.json").exists()

    async def linked(self, registry: Registry, seconds: float) -> None:
        """Wait until a node is ready, or for at most `seconds`; a node that fails has said why in its log."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await registry.some_ready.wait()

    async def close(self) -> None:
        """End it: politely, then for good."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(GRACE):
                await process.wait()
        except TimeoutError:
            log.warning("local node killed", pid=process.pid)
            process.kill()
            await process.wait()
