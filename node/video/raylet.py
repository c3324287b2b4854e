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
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import secrets
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Literal

import structlog

from machine.private import private_folder, write_private
from node.settings import WorkerSettings
from wire.frames import RayHead

BACK_OFF = (1.0, 60.0)
"""First and longest wait before Ray is started again, in seconds."""
HEALTHY = 120.0
START_SECONDS = 120.0
GRACE = 5.0
STORE = 80_000_000
PORTS = 60
MOST_SAID = 2**20
STARTED = b"Ray runtime started"
RESOURCE = "video_lease_gib"
ROOT = str(Path(__file__).parents[2])
"""Where the actor is imported from."""
KEPT = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
SLIM = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0", "RAY_memory_monitor_refresh_ms": "0",
    "RAY_prestart_worker_first_driver": "0", "RAY_enable_core_worker_task_event_to_gcs": "0", "RAY_event_stats": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL": "minor", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
    "RAY_kill_child_processes_on_worker_exit": "true", "RAY_gcs_rpc_server_reconnect_timeout_s": "7200",
    "RAY_raylet_start_wait_time_s": "90", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
"""What every process of Ray on a node is told."""
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
        "object-store-memory": STORE,
    }  # fmt: skip
    words = [f"--{name}={number}" for name, number in numbers.items()]
    host = [f"--node-ip-address={head.host}"] if head.host else []
    return [
        sys.executable, "-P", "-m", "node.video.raylet_child", "start", "--block", f"--address={head.address}", *host,
        *words, f"--temp-dir={folder}", f'--resources={{"{RESOURCE}": {gib}}}', "--disable-usage-stats",
        "--include-log-monitor=false",
    ]  # fmt: skip


def environment(head: RayHead, inherited: Mapping[str, str], files: Path, node: str) -> dict[str, str]:
    """Give the environment of this node's Ray; `files` holds token and certificates, `node` will be its id."""
    found = {name: inherited[name] for name in KEPT if name in inherited} | SLIM
    found |= {name: value for name, value in head.environment if NAME.fullmatch(name)}
    found["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, inherited.get("PYTHONPATH")]))
    found["RAY_OVERRIDE_NODE_ID_FOR_TESTING"] = node
    if head.token:
        found |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(files / "token")}
    if head.certificate:
        found |= {
            "RAY_USE_TLS": "1", "RAY_TLS_CA_CERT": str(files / "authority.pem"),
            "RAY_TLS_SERVER_CERT": str(files / "certificate.pem"), "RAY_TLS_SERVER_KEY": str(files / "key.pem"),
        }  # fmt: skip
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
        self._reading: asyncio.Task[None] | None = None
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
            up = await self._up(process)
            if up:
                self._say(node, "")
                while not ended.done() and (self._lent or (self._wanted and head == self._head)):
                    await asyncio.wait({again, ended}, return_when=asyncio.FIRST_COMPLETED)
                    again = self._renewed(again)
                return "Ray has ended, its log says more" if ended.done() else ""
            return f"Ray did not start: {self._last_words()}"
        finally:
            again.cancel()
            await _end(process, ended)
            self._process = None

    def _renewed(self, again: asyncio.Task[Literal[True]]) -> asyncio.Task[Literal[True]]:
        """Give what waits for the next change."""
        if not again.done():
            return again
        self._again.clear()
        return asyncio.create_task(self._again.wait())

    async def _start(self, head: RayHead, node: str) -> asyncio.subprocess.Process:
        folder = short_folder(self._settings.ray_folder, self._files)
        for session in folder.glob("session_*"):
            if not session.is_symlink():
                shutil.rmtree(session, ignore_errors=True)
        self._write(head)
        return await asyncio.create_subprocess_exec(
            *command(head, self._settings.ray_ports, folder, self._gib), stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True, cwd=self._files,
            env=environment(head, os.environ, self._files, node),
        )  # fmt: skip

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

    async def _up(self, process: asyncio.subprocess.Process) -> bool:
        """Read what it says until it is up, and write it down; what it says later is in the logs of its session."""
        assert process.stdout is not None  # noqa: S101  it was asked for
        said = bytearray()
        with suppress(TimeoutError):
            async with asyncio.timeout(START_SECONDS):
                while STARTED not in said and len(said) < MOST_SAID:
                    piece = await process.stdout.read(4096)
                    if not piece:
                        break
                    said += piece
        private_folder(self._log_file.parent)
        write_private(self._log_file, bytes(said))
        self._reading = asyncio.create_task(_discard(process.stdout))
        return STARTED in said

    def _last_words(self) -> str:
        with suppress(OSError):
            lines = [line.strip() for line in self._log_file.read_text(errors="replace").splitlines() if line.strip()]
            return lines[-1][:300] if lines else "it said nothing"
        return "it said nothing"

    def _say(self, node: str, cause: str) -> None:
        if (node, cause) != (self.node, self.cause):
            self.node, self.cause = node, cause
            log.info("ray", node=node, cause=cause)
            self.changed()


async def _discard(stream: asyncio.StreamReader) -> None:
    while await stream.read(4096):
        pass


async def _end(process: asyncio.subprocess.Process, ended: asyncio.Task[int]) -> None:
    """End the process that we started, and all that it left in its group."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await asyncio.wait({ended}, timeout=GRACE)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await ended


def short_folder(wanted: str, files: Path) -> Path:
    """Give Ray's own folder, whose sockets' paths must fit into 103 bytes: the one that was set, else one below /tmp
    that belongs to this node's state. OSError where somebody else has it."""
    if wanted:
        return private_folder(Path(wanted).expanduser())
    name = f"mp-{os.getuid()}-{hashlib.sha256(str(files).encode()).hexdigest()[:8]}"
    folder = Path("/tmp" if sys.platform == "darwin" else tempfile.gettempdir()) / name  # noqa: S108  ours alone, below
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    return private_folder(folder)
