"""This node's part in the pool's Ray cluster: `ray start --block` as a child of the agent, while there is a use for it.

Ray starts and ends video's actors on a chosen node, and nothing else: chat never depends on it, and a node without an
environment, a package or a head to follow starts nothing. Its memory is the lease's business, so Ray's own monitor is
off. What is not needed is off, too: no dashboard, no metrics, no log monitor, a store of 80 MB.

While memory is lent the Ray that started the job stays, even where its head is gone or another is to be followed: the
actor in it holds the worker. So a coordinator can move to another machine under a running job.

Every process of Ray demands a token (from a file that only we read), and TLS where the coordinator gave us a
certificate. Its ports begin at `worker.ray_ports`:

    +0 node manager   +1 objects   +2 agent (gRPC)   +3 agent (HTTP)   +4 environments   +5 metrics   +10 to +59 workers

The child leaves when its life line does, whichever way we end, and takes Ray's processes with it.
"""

import asyncio
import importlib.metadata
import importlib.util
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import structlog

from machine import ray_process
from machine.private import private_folder, write_private
from machine.ray_process import BACK_OFF, HEALTHY, STARTED
from node.settings import WorkerSettings
from wire.frames import RayHead

START_SECONDS = 120.0
PORTS = 60
RESOURCE = "video_lease_gib"
ROOT = str(Path(__file__).parents[2])
"""Where the actor is imported from."""
TOLD = {
    "RAY_kill_child_processes_on_worker_exit": "false", "RAY_raylet_start_wait_time_s": "90",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
}  # fmt: skip
"""What Ray is told on a node beside what it is told everywhere. A worker has a life line; were it killed before the
actor that attends it, it would look as if it had crashed. And a job does not end because the head is away for more than
Ray's minute: our agent ends Ray here when the coordinator says so, or has another head."""
NAME = re.compile(r"RAY_[A-Za-z0-9_]{1,80}")

log = structlog.get_logger("node.ray")


def unusable(head: RayHead) -> str:
    """Say why this node cannot follow a head; empty when it can."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed on this node: install macpool with its extra `video`"
    ours = importlib.metadata.version("ray")
    if head.version and head.version != ours:
        return f"Ray {ours} is installed on this node, the pool's head runs {head.version}: they have to be the same"
    return ""


def command(head: RayHead, ports: int, folder: Path, gib: int) -> list[str]:
    """Give what is started: an interpreter of ours that becomes `ray start`."""
    first = head.base_port or ports
    numbers = {
        "node-manager-port": first, "object-manager-port": first + 1, "dashboard-agent-grpc-port": first + 2,
        "dashboard-agent-listen-port": first + 3, "runtime-env-agent-port": first + 4, "metrics-export-port": first + 5,
        "min-worker-port": first + 10, "max-worker-port": first + PORTS - 1, "num-cpus": 1, "num-gpus": 0,
        "object-store-memory": ray_process.STORE,
    }  # fmt: skip
    host = [f"--node-ip-address={head.host}"] if head.host else []
    return ray_process.command(
        f"--address={head.address}", *host, *ray_process.numbered(numbers), f"--temp-dir={folder}",
        f'--resources={{"{RESOURCE}": {gib}}}',
    )  # fmt: skip


def environment(head: RayHead, inherited: Mapping[str, str], files: Path, node: str) -> dict[str, str]:
    """Give the environment of this node's Ray; `files` holds token and certificates, `node` will be its id."""
    found = ray_process.environment(inherited, files, token=bool(head.token), tls=bool(head.certificate)) | TOLD
    found |= {name: value for name, value in head.environment if NAME.fullmatch(name)}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, inherited.get("PYTHONPATH")]))
    found["RAY_OVERRIDE_NODE_ID_FOR_TESTING"] = node
    return found


class Raylet:
    """Keeps this node's Ray alive while it is wanted. `changed` is called when `node` or `cause` is another."""

    def __init__(self, settings: WorkerSettings, files: Path, log_file: Path, gib: int) -> None:
        self._settings = settings
        self._files = files
        self._log_file = log_file
        self._gib = gib
        self._head = RayHead("")
        self._offered = self._lent = False
        self._task: asyncio.Task[None] | None = None
        self._again = asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        self.node = ""
        """The id of this node in the Ray cluster; empty while it is in none."""
        self.cause = ""
        """Why there is none, where one is wanted."""
        self.changed: Callable[[], None] = lambda: None

    @property
    def pid(self) -> int | None:
        """The number of the process that we started; None while there is none."""
        return self._process.pid if self._process is not None else None

    def follow(self, head: RayHead) -> None:
        """Take part in this head's cluster from now on, or in none."""
        if head != self._head:
            self._head = head
            self._change()

    def offer(self, *, wanted: bool) -> None:
        """Say whether this node offers video."""
        if wanted != self._offered:
            self._offered = wanted
            self._change()

    def lend(self, *, on: bool) -> None:
        """Say whether a job is made on this node now."""
        if on != self._lent:
            self._lent = on
            self._change()

    async def stop(self) -> None:
        """End Ray here."""
        self._head = RayHead("")
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @property
    def _wanted(self) -> bool:
        return self._offered and bool(self._head.address)

    def _change(self) -> None:
        self._again.set()
        if self._wanted and (self._task is None or self._task.done()):
            self._task = asyncio.get_running_loop().create_task(self._keep())

    async def _keep(self) -> None:
        """Run it for as long as it is wanted."""
        wait, loop = BACK_OFF[0], asyncio.get_running_loop()
        while self._wanted:
            self._again.clear()
            head, began = self._head, loop.time()
            try:
                cause = unusable(head) or await self._live(head)
            except OSError as error:
                cause = f"Ray could not be started: {error}"
            self._say("", "" if not self._wanted else cause)
            if head != self._head or not self._wanted:
                continue
            wait = BACK_OFF[0] if loop.time() - began > HEALTHY else wait
            log.warning("ray ended", cause=cause, again_in=wait)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._again.wait(), wait)
            wait = min(2 * wait, BACK_OFF[1])

    async def _live(self, head: RayHead) -> str:
        """Run one Ray from start to end; say why it ended."""
        node = secrets.token_hex(28)
        process = self._process = await self._start(head, node)
        again = asyncio.create_task(self._again.wait())
        ended = asyncio.create_task(process.wait())
        try:
            said = await ray_process.until_started(process, START_SECONDS)
            self._written(said)
            if STARTED not in said:
                return f"Ray did not start: {ray_process.last_words(said)}"
            self._say(node, "")
            reading = asyncio.create_task(ray_process.discard(process))
            try:
                while not ended.done() and (self._lent or (self._wanted and head == self._head)):
                    await asyncio.wait({again, ended}, return_when=asyncio.FIRST_COMPLETED)
                    again = self._renewed(again)
            finally:
                reading.cancel()
            return "Ray has ended, its log says more" if ended.done() else ""
        finally:
            again.cancel()
            await ray_process.end(process, ended)
            self._process = None

    def _renewed(self, again: asyncio.Task[Literal[True]]) -> asyncio.Task[Literal[True]]:
        """Give what waits for the next change."""
        if not again.done():
            return again
        self._again.clear()
        return asyncio.create_task(self._again.wait())

    async def _start(self, head: RayHead, node: str) -> asyncio.subprocess.Process:
        folder = self._folder()
        for session in folder.glob("session_*"):
            if not session.is_symlink():
                shutil.rmtree(session, ignore_errors=True)
        self._write(head)
        variables = environment(head, os.environ, self._files, node)
        return await ray_process.start(
            command(head, self._settings.ray_ports, folder, self._gib), variables, self._files
        )  # fmt: skip

    def _folder(self) -> Path:
        """Give Ray's own folder: the one that was set, else one below /tmp that belongs to this node's state."""
        wanted = self._settings.ray_folder
        return private_folder(Path(wanted).expanduser()) if wanted else ray_process.short_folder(self._files)

    def _write(self, head: RayHead) -> None:
        """Lay token and certificates where only we read them."""
        private_folder(self._files)
        files = {
            "token": head.token.encode(), "authority.pem": head.authority, "certificate.pem": head.certificate,
            "key.pem": head.key,
        }  # fmt: skip
        for name, content in files.items():
            if content:
                write_private(self._files / name, content)
            else:
                (self._files / name).unlink(missing_ok=True)

    def _written(self, said: bytes) -> None:
        """Keep what it said until it was up; what it says later is in the logs of its session."""
        private_folder(self._log_file.parent)
        write_private(self._log_file, said)

    def _say(self, node: str, cause: str) -> None:
        if (node, cause) != (self.node, self.cause):
            self.node, self.cause = node, cause
            log.info("ray", node=node, cause=cause)
            self.changed()
