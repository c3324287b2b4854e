"""The node on the coordinator's own machine: a child process that is started, watched and ended with us."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import structlog

from coordinator.cluster.registry import Registry
from host.left_marker import has_left

log = structlog.get_logger("coordinator.cluster.local_node")

BACK_OFF = (0.5, 30.0)
"""First and longest wait before it is started again, in seconds; a run of a minute resets it."""
USAGE, DENIED, OTHER_CLUSTER = 2, 4, 6
"""Exit codes of a node that no new start would change: wrong settings; removed, where it had joined; a node of another
cluster."""
GRACE = 10.0
"""Longest wait for its end before it is killed, in seconds."""


class OtherClusterError(Exception):
    """This Mac is a node of another cluster than the one that it coordinates."""


def check_node(state: Path, cluster: str) -> None:
    """Check that the node of this state folder, if there is one, is of this cluster (empty: of none yet).

    OtherClusterError with the ways out.
    """
    try:
        kept = json.loads((state / "node" / "identity" / "identity.json").read_text())
        its, addresses = str(kept["cluster"]), list(kept.get("addresses") or ())
    except (OSError, ValueError, KeyError, TypeError):
        return  # no node, or one that says itself what is wrong with it
    if its != cluster:
        place = f" at {addresses[0]}" if addresses else ""
        raise OtherClusterError(
            f"this Mac is a node of another cluster{place}: `cluster join` starts that node; `cluster leave` takes the "
            "Mac out of it, then run this again; to coordinate a cluster of its own beside it: --no-local-node, or "
            "another folder with --state"
        )


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
            if code == 0 and has_left(self._state / "node"):
                log.info("local node left", what="`cluster up --local-node` lets it join again")
                self.given_up.set()
                return
            if code == USAGE:
                log.error("local node out", code=code, what="its settings are wrong: `cluster config check`")
                self.given_up.set()
                return
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

    async def ready(self, registry: Registry, seconds: float) -> bool:
        """Wait until this node answers requests, for at most `seconds`; return whether it does. A node that fails has
        said why in its log."""
        answers = asyncio.create_task(registry.wait_for_answers(self._id))
        ended = asyncio.create_task(self.given_up.wait())
        done, _ = await asyncio.wait({answers, ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in (answers, ended):
            task.cancel()
        if answers in done:
            answers.result()
        return answers in done

    def _id(self) -> str:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads((self._state / "node" / "identity" / "identity.json").read_text())["node"])
        return ""

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
