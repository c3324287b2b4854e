"""Run this Mac's Ray, `ray start --head --block`, and its driver as children of the agent while they are needed.

Ray only starts and ends the actors of video jobs on this Mac. Its cluster has one machine, and all of its sockets are
on loopback. The coordinator runs no Ray (docs/decisions/0027). Ray does not start on a Mac without an environment, a
package, or the permission of an administrator.

The lease of a job limits its memory. Ray's own memory monitor is therefore off, as are its dashboard, metrics and log
monitor. Its object store has 80 MB. Every process of Ray demands a token from a file of mode 0600.
Its ports begin at `worker.ray_ports`:

    +0 node manager   +1 objects   +2 agent (gRPC)   +3 agent (HTTP)   +4 environments   +5 metrics   +6 tables
    +10 to +59 workers

The children exit when the agent ends, for any reason.
"""

import asyncio
import contextlib
import importlib.util
import os
import secrets
import shutil
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import structlog

from host.private_files import create_private_folder, resolve_home, write_private
from node.settings import WorkerSettings
from node.video.ray import ray_process
from node.video.ray.driver_link import (
    ActorCreated,
    ActorNotCreated,
    ConnectDriver,
    CreateActor,
    DriverConnected,
    DriverLinkError,
    FromDriver,
    KillActor,
    MessageReader,
    encode_message,
)
from node.video.ray.ray_process import HEALTHY_AFTER_SECONDS, HOST, RESTART_DELAYS_SECONDS, STARTED
from wire.units import GIB

START_TIMEOUT_SECONDS = 120.0
"""Maximum seconds until Ray is up. After that, Ray is ended, and restarted after a delay."""
PORTS = 60
"""Number of ports from `worker.ray_ports` on that belong to Ray."""
RESOURCE = "video_lease_gib"
"""Name of Ray's resource for leases, in GiB, as in `driver`."""
ROOT = str(Path(__file__).parents[3])
"""Folder from which Ray's workers import the actor."""
CURRENT = "ray_current_cluster"
"""File in Ray's folder that names its cluster. With the file of an earlier cluster, Ray refuses to start."""
EXIT_GRACE_SECONDS = 2.0
"""Seconds that a driver has to exit after its socket was closed. After that, the driver is killed."""

log = structlog.get_logger("node.ray")


def describe_missing() -> str:
    """Return the reason why Ray cannot run on this Mac; empty if it can."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed on this node: install macpool with its extra `video`"
    return ""


def build_command(ports: int, folder: Path, gib: int) -> list[str]:
    """Return the command line that runs `ray start --head`. `ports` is the first of `PORTS` ports, `folder` the folder
    of Ray's sessions, `gib` the amount of Ray's resource for leases in GiB."""
    numbers = {
        "node-manager-port": ports,
        "object-manager-port": ports + 1,
        "dashboard-agent-grpc-port": ports + 2,
        "dashboard-agent-listen-port": ports + 3,
        "runtime-env-agent-port": ports + 4,
        "metrics-export-port": ports + 5,
        "port": ports + 6,
        "min-worker-port": ports + 10,
        "max-worker-port": ports + PORTS - 1,
        "num-cpus": 1,
        "num-gpus": 0,
        "object-store-memory": ray_process.OBJECT_STORE_BYTES,
    }
    return ray_process.build_command(
        "--head",
        f"--node-ip-address={HOST}",
        *ray_process.format_options(numbers),
        f"--temp-dir={folder}",
        f'--resources={{"{RESOURCE}": {gib}}}',
    )


def build_environment(inherited: Mapping[str, str], files: Path, node: str) -> dict[str, str]:
    """Return the environment of this Mac's Ray. `files` is the folder of the token, `node` the id of its only node."""
    variables = ray_process.build_environment(inherited, files)
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, inherited.get("PYTHONPATH")]))
    variables["RAY_OVERRIDE_NODE_ID_FOR_TESTING"] = node
    return variables


class LocalRay:
    """Manager of this Mac's Ray and its driver, which run only while they are needed.

    `files` is the folder of Ray's authentication token. `log_file` gets Ray's output until Ray is up. `gib` is the
    amount of Ray's resource for leases, in GiB. `changed()` is called when `node`, `cause` or `allowed` changes,
    `failed(lease, reason)` when the actor of a lease could not be started.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        files: Path,
        log_file: Path,
        gib: int,
        *,
        changed: Callable[[], None],
        failed: Callable[[str, str], None],
    ) -> None:
        self._settings = settings
        self._files = files
        self._log_file = log_file
        self._gib = gib
        self._allowed = self._offered = self._lent = False
        self._task: asyncio.Task[None] | None = None
        self._state_changed = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self._driver = DriverProcess(files, self._report_actor_failure)
        self.node = ""
        """Id of this Mac's node in Ray; empty while Ray is not up."""
        self.cause = ""
        """Reason why Ray has ended or could not be started although it is needed; else empty."""
        self._changed = changed
        self._failed = failed

    @property
    def allowed(self) -> bool:
        """Whether the coordinator allows this Mac to make videos; False after `stop`."""
        return self._allowed

    @property
    def pid(self) -> int | None:
        """Process id of Ray's launcher; None while Ray does not run."""
        return self._process.pid if self._process is not None else None

    @property
    def active(self) -> bool:
        """Whether the task that runs and restarts Ray is active."""
        return self._task is not None and not self._task.done()

    def set_allowed(self, *, on: bool) -> None:
        """Set whether the coordinator allows this Mac to make videos. A change may start or end Ray."""
        if on != self._allowed:
            self._allowed = on
            self._signal_change()
            self._changed()

    def set_offered(self, *, wanted: bool) -> None:
        """Set whether this Mac can make videos now. A change may start or end Ray."""
        if wanted != self._offered:
            self._offered = wanted
            self._signal_change()

    def set_has_lease(self, *, on: bool) -> None:
        """Set whether this Mac has a granted lease. With a lease, Ray continues even if it is not needed otherwise."""
        if on != self._lent:
            self._lent = on
            self._signal_change()

    def start_actor(self, lease: str, generation: int, folder: str, size: int) -> None:
        """Start the actor of a lease of `size` bytes, now or as soon as Ray is up."""
        self._driver.create_actor(
            CreateActor(lease, generation, folder, size / GIB, self._settings.start_timeout_seconds)
        )

    def end_actor(self, lease: str) -> None:
        """Order the driver to end the actor of a lease, if there is one. Do not wait for the end."""
        self._driver.kill_actor(lease)

    async def stop(self) -> None:
        """End Ray and its driver, wait for their end, and prevent further starts until `set_allowed`."""
        self._allowed = False
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def _wanted(self) -> bool:
        return self._offered and self._allowed

    def _signal_change(self) -> None:
        self._state_changed.set()
        if self._wanted and not self.active:
            self._task = asyncio.get_running_loop().create_task(self._run_while_needed())

    def _report_actor_failure(self, lease: str, why: str) -> None:
        log.warning("actor not started", lease=lease, why=why)
        self._failed(lease, why)

    async def _run_while_needed(self) -> None:
        """Run Ray for as long as it is needed. Start it again after a failure, with delays that grow."""
        wait, loop = RESTART_DELAYS_SECONDS[0], asyncio.get_running_loop()
        while self._wanted:
            self._state_changed.clear()
            began = loop.time()
            try:
                cause = describe_missing() or await self._run_once()
            except OSError as error:
                cause = f"Ray could not be started: {error}"
            self._set_state("", cause if self._wanted else "")
            if not self._wanted:
                continue
            wait = RESTART_DELAYS_SECONDS[0] if loop.time() - began > HEALTHY_AFTER_SECONDS else wait
            log.warning("ray ended", cause=cause, retry_in=wait)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._state_changed.wait(), wait)
            wait = min(2 * wait, RESTART_DELAYS_SECONDS[1])

    async def _run_once(self) -> str:
        """Run Ray once, from start to end. Return why it ended; empty if it was not needed any more."""
        node = secrets.token_hex(28)
        variables = build_environment(os.environ, self._files, node)
        process = self._process = await self._start_ray(variables)
        again = asyncio.create_task(self._state_changed.wait())
        ended = asyncio.create_task(process.wait())
        try:
            output = await ray_process.read_until_started(process, START_TIMEOUT_SECONDS)
            self._store_output(output)
            if STARTED not in output:
                return f"Ray did not start: {ray_process.summarize_output(output)}"
            reading = asyncio.create_task(ray_process.discard_output(process))
            self._driver.start(f"{HOST}:{self._settings.ray_ports + 6}", variables)
            self._set_state(node, "")
            try:
                while not ended.done() and (self._lent or self._wanted):
                    await asyncio.wait({again, ended}, return_when=asyncio.FIRST_COMPLETED)
                    again = self._renew_wait(again)
            finally:
                reading.cancel()
                await self._driver.stop()
            return "Ray has ended: see its log" if ended.done() else ""
        finally:
            again.cancel()
            await ray_process.end_ray(process, ended)
            self._process = None

    def _renew_wait(self, again: asyncio.Task[Literal[True]]) -> asyncio.Task[Literal[True]]:
        """Return the task that waits for the next change."""
        if not again.done():
            return again
        self._state_changed.clear()
        return asyncio.create_task(self._state_changed.wait())

    async def _start_ray(self, variables: Mapping[str, str]) -> asyncio.subprocess.Process:
        folder = create_private_folder(self._create_private_folder() / ray_process.SESSIONS)
        for session in folder.glob("session_*"):
            if not session.is_symlink():
                shutil.rmtree(session, ignore_errors=True)
        (folder / CURRENT).unlink(missing_ok=True)
        create_private_folder(self._files)
        write_private(self._files / "token", secrets.token_hex(32).encode())
        words = build_command(self._settings.ray_ports, folder, self._gib)
        return await ray_process.start_ray(words, variables, self._files)

    def _create_private_folder(self) -> Path:
        """Return the private folder around Ray's own: that of the settings, else `create_short_folder`."""
        wanted = self._settings.ray_folder
        if not wanted:
            return ray_process.create_short_folder(self._files)
        return create_private_folder(resolve_home(wanted))

    def _store_output(self, output: bytes) -> None:
        """Write the output of Ray's start to the log file. Later output is in the logs of Ray's session."""
        create_private_folder(self._log_file.parent)
        write_private(self._log_file, output)

    def _set_state(self, node: str, cause: str) -> None:
        if (node, cause) != (self.node, self.cause):
            self.node, self.cause = node, cause
            log.info("ray", node=node, cause=cause)
            self._changed()


class DriverProcess:
    """Manager of the driver's process, which runs between `start` and `stop` and is restarted after each end.

    A `CreateActor` without an answer is sent again to the next driver. `failed(lease, reason)` is called when the actor
    of a lease could not be started. The driver runs in an empty folder below `files`.
    """

    def __init__(self, files: Path, failed: Callable[[str, str], None]) -> None:
        self._files = files
        self._failed = failed
        self._writer: asyncio.StreamWriter | None = None
        self._pending: dict[str, CreateActor] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self, address: str, variables: Mapping[str, str]) -> None:
        """Run a driver for the Ray at `address` (host:port), and restart it after each end, until `stop`."""
        self._task = asyncio.get_running_loop().create_task(self._run_repeatedly(address, variables))

    async def stop(self) -> None:
        """End the driver, after `EXIT_GRACE_SECONDS` by SIGKILL, and wait for its end. `pending` does not change."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def pending(self) -> frozenset[str]:
        """Ids of the leases whose actor was requested and has neither started nor failed."""
        return frozenset(self._pending)

    def create_actor(self, wanted: CreateActor) -> None:
        """Start the actor of a lease, now or as soon as a driver is connected."""
        self._pending[wanted.lease] = wanted
        if self._writer is not None:
            self._writer.write(encode_message(wanted))

    def kill_actor(self, lease: str) -> None:
        """Order the driver to end the actor of a lease. Send nothing without a driver: an actor ends with its lease."""
        self._pending.pop(lease, None)
        if self._writer is not None:
            self._writer.write(encode_message(KillActor(lease)))

    async def _run_repeatedly(self, address: str, variables: Mapping[str, str]) -> None:
        wait, loop = RESTART_DELAYS_SECONDS[0], asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                code = await self._run_once(address, variables)
            except (OSError, DriverLinkError) as error:
                code = str(error)
            wait = RESTART_DELAYS_SECONDS[0] if loop.time() - began > HEALTHY_AFTER_SECONDS else wait
            log.warning("driver ended", code=code, retry_in=wait)
            await asyncio.sleep(wait)
            wait = min(2 * wait, RESTART_DELAYS_SECONDS[1])

    async def _run_once(self, address: str, variables: Mapping[str, str]) -> int:
        """Run one driver from start to end. Return its exit code; 0 if it had not exited in time and was killed."""
        own_end, child_end = socket.socketpair()
        with child_end:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "node.video.ray.driver",
                str(child_end.fileno()),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                pass_fds=(child_end.fileno(),),
                cwd=create_private_folder(self._files / "empty"),
                start_new_session=True,
                env=variables,
            )
        reader, writer = await asyncio.open_connection(sock=own_end)
        try:
            writer.write(encode_message(ConnectDriver(address)))
            messages = MessageReader(FromDriver)
            while data := await reader.read(65536):
                for message in messages.feed(data):
                    self.handle_message(message, writer)
            async with asyncio.timeout(EXIT_GRACE_SECONDS):
                return await process.wait()
        except TimeoutError:
            return 0
        finally:
            self._writer = None
            writer.close()
            await _end_driver(process)

    def handle_message(self, message: FromDriver, writer: asyncio.StreamWriter) -> None:
        """Handle a message of the driver: send it the pending requests once it connects, report a failed actor."""
        match message:
            case DriverConnected():
                log.info("driver connected")
                self._writer = writer
                for wanted in self._pending.values():
                    writer.write(encode_message(wanted))
            case ActorCreated(lease):
                self._pending.pop(lease, None)
            case ActorNotCreated(lease, why):
                if self._pending.pop(lease, None) is not None:
                    self._failed(lease, why)


async def _end_driver(process: asyncio.subprocess.Process) -> None:
    """Wait for a driver whose socket is closed, and kill it after `EXIT_GRACE_SECONDS`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(EXIT_GRACE_SECONDS):
            await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
