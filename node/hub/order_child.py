"""Run a child process that performs one order about model files, on the side of the agent.

The agent writes the order to the child's standard input, which stays open, so that the child ends when the agent ends.
If the child fails, the agent logs the end of its standard error, without secrets.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog

import node
from host.redaction import hide_secrets
from host.subprocesses import describe_exit
from node.hub.child_messages import ChildEnd, ChildMessage, ChildProgress, build_end
from wire.frames.model_files import ModelOrderCode

MAX_LINE_BYTES = 1024 * 1024
MAX_ERROR_BYTES = 4096
NICENESS = 10
"""Minimum niceness of a child, because requests on the same machine have priority.

A higher niceness of the agent is kept.
"""
TERMINATE_TIMEOUT_SECONDS = 5.0
"""Seconds from SIGTERM to SIGKILL."""
EXIT_TIMEOUT_SECONDS = 5.0
"""Maximum seconds from the last message of a child to its exit, after which the child is killed."""

log = structlog.get_logger("node.hub.order_child")


class OrderChild:
    """Child process of one order.

    `module` is the Python module that the child runs, `order` the message on its standard input. `on_progress` is
    called with each progress message of the child.
    """

    def __init__(self, module: str, order: msgspec.Struct, on_progress: Callable[[ChildProgress], None]) -> None:
        self._module = module
        self._order = order
        self._on_progress = on_progress
        self._process: asyncio.subprocess.Process | None = None
        self._cancelled = False
        self._killed = False
        """Whether the child was killed because it did not end after its last message."""
        self._killer: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the running child, which leads a process group; None before its start and after its end."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def run(self) -> ChildEnd:
        """Run the child and return the end of its order.

        If the child reports no end, the end is `cancelled` after `cancel`, `interrupted` if a signal ended the child,
        and `failed` otherwise. The end is also `failed` if the child cannot be started. There is no time limit. If this
        call is cancelled, the child is killed.
        """
        try:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                self._module,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
                start_new_session=True,
                cwd=Path(node.__file__).parents[1],
            )
        except OSError as error:
            return build_end(ModelOrderCode.FAILED, f"a process cannot be started: {error.strerror}")
        with suppress(OSError):  # it may have ended
            os.setpriority(os.PRIO_PROCESS, process.pid, max(NICENESS, os.nice(0)))
        assert process.stdin is not None  # noqa: S101  a pipe
        assert process.stdout is not None  # noqa: S101  a pipe
        assert process.stderr is not None  # noqa: S101  a pipe
        if self._cancelled:
            self._send_sigterm()
        errors = asyncio.ensure_future(_read_tail(process.stderr))
        try:
            with suppress(ConnectionError):
                process.stdin.write(msgspec.json.encode(self._order) + b"\n")
                await process.stdin.drain()
            end = await self._read_messages(process.stdout)
            await self._wait_exit(process)
            return end or self._build_failure(process.returncode, await errors)
        finally:
            errors.cancel()
            if process.returncode is None:
                process.kill()
            process.stdin.close()
            if self._killer is not None:
                self._killer.cancel()

    def cancel(self) -> None:
        """Send SIGTERM to the child, and SIGKILL after `TERMINATE_TIMEOUT_SECONDS`. `run` then returns `cancelled`.

        If the child has not started yet, send SIGTERM at its start. If the child reports another end, `run` returns
        that end.
        """
        self._cancelled = True
        if self._process is not None and self._killer is None:
            self._send_sigterm()

    def kill(self) -> None:
        """Kill the child at once. `run` returns `interrupted`, unless the child was cancelled or has reported its end.

        Do nothing before the start of the child.
        """
        self._signal(signal.SIGKILL)

    def _send_sigterm(self) -> None:
        self._signal(signal.SIGTERM)
        loop = asyncio.get_running_loop()
        self._killer = loop.call_later(TERMINATE_TIMEOUT_SECONDS, self._signal, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def _read_messages(self, output: asyncio.StreamReader) -> ChildEnd | None:
        """Pass on the progress of the child. Return the end of its order; None if the child ends without one."""
        try:
            while line := await output.readline():
                message = msgspec.json.decode(line, type=ChildMessage)
                if isinstance(message, ChildEnd):
                    return message
                self._on_progress(message)
        except (msgspec.DecodeError, ValueError):  # readline raises ValueError for a line above the limit
            log.warning("message of a model order invalid", module=self._module)
        return None

    async def _wait_exit(self, process: asyncio.subprocess.Process) -> None:
        """Wait for the exit of the child, whose messages have ended; kill the child after `EXIT_TIMEOUT_SECONDS`."""
        try:
            await asyncio.wait_for(process.wait(), EXIT_TIMEOUT_SECONDS)
        except TimeoutError:
            self._killed = True
            self._signal(signal.SIGKILL)
            await process.wait()

    def _build_failure(self, code: int | None, errors: bytes) -> ChildEnd:
        if self._cancelled:
            return build_end(ModelOrderCode.CANCELLED)
        text = hide_secrets(errors.decode("utf-8", "replace"))
        log.warning("model order failed", module=self._module, code=code, errors=text)
        interrupted = code is not None and code < 0 and not self._killed
        return build_end(
            ModelOrderCode.INTERRUPTED if interrupted else ModelOrderCode.FAILED,
            f"the process of the order {describe_exit(code)}: see the node's log",
        )


async def _read_tail(stream: asyncio.StreamReader) -> bytes:
    """Return the last `MAX_ERROR_BYTES` of a stream, which is read to its end."""
    tail = b""
    while block := await stream.read(MAX_ERROR_BYTES):
        tail = (tail + block)[-MAX_ERROR_BYTES:]
    return tail
