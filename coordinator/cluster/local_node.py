"""Supervision of the node on the coordinator's own machine, which is a child process."""

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
from coordinator.state.store_errors import StoreError
from host.node_marks import has_left

log = structlog.get_logger("coordinator.cluster.local_node")

RESTART_DELAYS_SECONDS = (0.5, 30.0)
"""Delay before a restart after a run longer than 60 s, and maximum delay, in seconds.

Each shorter run, including the first, and each failed start doubles the delay.
"""
EXIT_USAGE, EXIT_DENIED, EXIT_OTHER_CLUSTER = 2, 4, 6
"""Exit codes after which a restart is useless.

In order: invalid settings, refused by the coordinator, node of another cluster. After `EXIT_DENIED` without an
identity, the node is restarted with a new join token.
"""
TERMINATE_GRACE_SECONDS = 10.0
"""Seconds between SIGTERM and SIGKILL to the local node's process."""


class LocalNodeElsewhereError(Exception):
    """Raised if this Mac would coordinate one cluster although its node belongs to another cluster."""


def check_node_cluster(state: Path, cluster: str) -> None:
    """Check that the node of a state folder, if any, belongs to `cluster` (empty: no cluster yet).

    Raise `LocalNodeElsewhereError`, with the possible next steps, if the node belongs to another cluster. An unreadable
    identity passes, because the node itself reports that fault.
    """
    try:
        identity = json.loads((state / "node" / "identity" / "identity.json").read_text())
        joined_cluster, addresses = str(identity["cluster"]), list(identity.get("addresses") or ())
    except (OSError, ValueError, KeyError, TypeError):
        return  # no node, or a broken identity that the node reports
    if joined_cluster != cluster:
        place = f" at {addresses[0]}" if addresses else ""
        raise LocalNodeElsewhereError(
            f"this Mac is a node of another cluster{place}: `cluster join` starts that node; `cluster leave` takes the "
            "Mac out of it, then run this again; to run a separate coordinator on this Mac: --no-local-node, or "
            "another folder with --state"
        )


class LocalNode:
    """Supervisor of the node on the coordinator's machine (`python -m node.run`).

    `state` is the state folder. `address` is HOST:PORT of the cluster port. `arguments` are further options of
    `node.run`. `token` creates a join token at each start, which the node uses only without an identity.
    """

    def __init__(self, state: Path, address: str, arguments: tuple[str, ...], token: Callable[[], str]) -> None:
        self._state = state
        self._address = address
        self._arguments = arguments
        self._token = token
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self.given_up = asyncio.Event()
        """Set when the node has ended for a reason that a restart does not resolve."""

    async def start(self) -> None:
        """Start the node, and restart it after each exit until `given_up` is set.

        Raise `OSError` if the process cannot be started, and `StoreError` if the join token cannot be stored.
        """
        await self._start_process()
        self._watch = asyncio.create_task(self._restart_on_exit())

    async def _start_process(self) -> None:
        token = self._token().encode()
        read, write = os.pipe()
        try:
            os.write(write, token)
        finally:
            os.close(write)
        try:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "node.run",
                "--state",
                str(self._state),
                "--url",
                self._address,
                "--token-fd",
                str(read),
                "--lifeline",
                *self._arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(read,),
                start_new_session=True,  # Ctrl-C reaches only the coordinator, which stops the node last
            )
        finally:
            os.close(read)

    async def _restart_on_exit(self) -> None:
        wait, loop = RESTART_DELAYS_SECONDS[0], asyncio.get_running_loop()
        while self._process is not None:
            began = loop.time()
            code = await self._process.wait()
            duration = loop.time() - began
            if code == 0 and has_left(self._state / "node"):
                log.info("local node left", what="`cluster up --local-node` lets it join again")
                self.given_up.set()
                return
            if code == EXIT_USAGE:
                log.error("local node not restarted", code=code, what="its settings are wrong: `cluster config check`")
                self.given_up.set()
                return
            if code == EXIT_OTHER_CLUSTER or (code == EXIT_DENIED and self._has_identity()):
                log.error(
                    "local node not restarted",
                    code=code,
                    what="the next `cluster up` joins it again"
                    if code == EXIT_DENIED
                    else "`cluster leave` takes it out of the other cluster",
                )
                self.given_up.set()
                return
            wait = compute_restart_delay(wait, duration)
            log.warning("local node ended", code=code, retry_in=wait)
            await asyncio.sleep(wait)
            wait = await self._start_with_retries(wait)

    async def _start_with_retries(self, wait: float) -> float:
        """Start the process, and repeat a failed start after growing delays, the first twice `wait`.

        Return the last delay in seconds.
        """
        while True:
            try:
                await self._start_process()
            except (OSError, StoreError) as error:
                wait = compute_restart_delay(wait)
                log.warning("local node not started", error=str(error), retry_in=wait)
                await asyncio.sleep(wait)
            else:
                return wait

    def _has_identity(self) -> bool:
        return (self._state / "node" / "identity" / "identity.json").exists()

    async def wait_until_ready(self, registry: Registry, stop: asyncio.Event, timeout_seconds: float) -> bool:
        """Wait at most `timeout_seconds` until this node can answer requests. Return whether it can.

        Return False at once when `given_up` is set, or when `stop` is set because the coordinator stops. If `given_up`
        is set, the log has the reason.
        """
        answers = asyncio.create_task(registry.wait_until_node_answers(self._read_node_id))
        ends = {asyncio.create_task(self.given_up.wait()), asyncio.create_task(stop.wait())}
        done, _ = await asyncio.wait({answers, *ends}, timeout=timeout_seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in (answers, *ends):
            task.cancel()
        if answers in done:
            answers.result()
        return answers in done

    def _read_node_id(self) -> str:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            return str(json.loads((self._state / "node" / "identity" / "identity.json").read_text())["node"])
        return ""

    async def close(self) -> None:
        """Stop the node with SIGTERM, and with SIGKILL after `TERMINATE_GRACE_SECONDS`. Do not restart it."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(TERMINATE_GRACE_SECONDS):
                await process.wait()
        except TimeoutError:
            log.warning("local node killed", pid=process.pid)
            process.kill()
            await process.wait()


def compute_restart_delay(last: float, duration: float = 0.0) -> float:
    """Return the delay before a restart after a run of `duration` seconds.

    `last` is the delay before that run. A failed start is a run of 0 s. All times are in seconds.
    """
    return RESTART_DELAYS_SECONDS[0] if duration > 60 else min(last * 2, RESTART_DELAYS_SECONDS[1])
