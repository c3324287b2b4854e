"""The head of the pool's Ray cluster: `ray start --head --block` as a child of the coordinator, while it is wanted.

In Ray's own words: the head keeps the cluster's tables (GCS) and has a raylet that runs nothing; the broker is its only
driver. Slim: no dashboard, no metrics, no log monitor, 80 MB of store. Everything of Ray demands a token that is read
from a file of ours (0600); between machines it speaks TLS unless that is switched off. Its tables are on disk, so that
a head that died comes back under its running jobs; where Ray cannot do that they are lost with it, and the nodes, which
own the memory and watch the workers, go on all the same.

Ports, from `video.ray_port` on (all of them listen on every interface, which is Ray's way):

    +0 tables   +1 node manager   +2 objects   +3 agent (gRPC)   +4 agent (HTTP)   +5 environments   +6 metrics
    +20 to +50 workers and the broker
"""

import asyncio
import importlib.metadata
import importlib.util
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from coordinator.video.ray_tls import LOOPBACK, RayAuthority
from coordinator.video.settings import VideoSettings
from machine import ray_process
from machine.announce import addresses
from machine.private import private_folder, write_private
from machine.ray_process import BACK_OFF, HEALTHY, STARTED

log = structlog.get_logger("coordinator.ray")

START_SECONDS = 90.0
PORTS = 51
LOOK_SECONDS = 10.0
"""Between two looks at this machine's address."""
USED = "used"
"""A file beside the tables that a head came up with."""
CURRENT = "ray_current_cluster"
"""Ray's note of a head in this folder. With it, and a node of ours on this machine that waits for its head to come
back, Ray would take the head for running and refuse to start it."""
SESSIONS = 2
"""Sessions whose logs stay; the newest may be gone on with."""
HEALTH = {
    "RAY_health_check_initial_delay_ms": "2000", "RAY_health_check_period_ms": "2000",
    "RAY_health_check_timeout_ms": "3000", "RAY_health_check_failure_threshold": "4",
}  # fmt: skip
"""A node that is away for some 20 seconds is out of Ray's cluster."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What others need to take part: `host` and `port` of the head, the token, the version of Ray."""

    host: str
    port: int
    token: str
    version: str

    @property
    def address(self) -> str:
        """host:port, as Ray takes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def missing() -> str:
    """Say why Ray cannot be used here; empty when it can."""
    if importlib.util.find_spec("ray") is None:
        return "Ray is not installed beside the coordinator: install macpool with its extra `video`"
    return ""


def names(host: str) -> tuple[str, ...]:
    """Give the addresses that a certificate for `host` has to name: Ray takes a loopback address for the machine's
    own."""
    return (host, *addresses()) if host in LOOPBACK else (host,)


def environment(files: Path, inherited: Mapping[str, str], *, tls: bool) -> dict[str, str]:
    """Give the environment of every process of Ray here; `files` holds token and certificates."""
    return ray_process.environment(inherited, files, token=True, tls=tls) | HEALTH | {"TMPDIR": str(files)}


def command(host: str, port: int, folder: Path) -> list[str]:
    """Give what is started: an interpreter that holds our life line and becomes `ray start`."""
    numbers = {
        "port": port, "node-manager-port": port + 1, "object-manager-port": port + 2,
        "dashboard-agent-grpc-port": port + 3, "dashboard-agent-listen-port": port + 4,
        "runtime-env-agent-port": port + 5, "metrics-export-port": port + 6, "min-worker-port": port + 20,
        "max-worker-port": port + PORTS - 1, "num-cpus": 0, "num-gpus": 0, "object-store-memory": ray_process.STORE,
    }  # fmt: skip
    return ray_process.command(
        "--head", f"--node-ip-address={host}", *ray_process.numbered(numbers), f"--temp-dir={folder}",
        "--include-dashboard=false", "--no-monitor",
    )  # fmt: skip


class Head:
    """Keeps the head alive between `start` and `stop`. `host` gives the address at which nodes reach this machine;
    `changed` is called when `facts` or `cause` is another."""

    def __init__(
        self, state: Path, settings: VideoSettings, host: Callable[[], str], changed: Callable[[], None]
    ) -> None:
        self.files = state / "ray"
        self.facts: Facts | None = None
        """Of the newest head that was up; it may be starting again at the same place."""
        self.cause = ""
        """Why there is none."""
        self._settings = settings
        self._authority_folder = state / "authority"
        self._authority: RayAuthority | None = None
        self._host = host
        self._changed = changed
        self._log_file = state / "logs" / "ray.log"
        self._task: asyncio.Task[None] | None = None
        self._storage = settings.ray_storage == "rocksdb"

    @property
    def authority(self) -> RayAuthority | None:
        """Who makes certificates for Ray; None without TLS."""
        if self._authority is None and self._settings.ray_tls:
            self._authority = RayAuthority(self._authority_folder)
        return self._authority

    def start(self) -> None:
        """Begin to keep it alive."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        """End it."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._say(None, "")

    async def _keep(self) -> None:
        wait, loop = BACK_OFF[0], asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                cause = missing() or await self._live()
            except OSError as error:
                cause = f"Ray could not be started: {error}"
            wait = BACK_OFF[0] if loop.time() - began > HEALTHY else wait
            log.warning("ray head ended", cause=cause, again_in=wait)
            self._say(self.facts, cause)
            await asyncio.sleep(wait)
            wait = min(2 * wait, BACK_OFF[1])

    async def _live(self) -> str:
        """Run one head from start to end; say why it ended."""
        host = self._host()
        called = names(host)
        token, port = self._write(host), self._settings.ray_port or self._any_port(host)
        facts = Facts(host, port, token, importlib.metadata.version("ray"))
        folder = ray_process.short_folder(self.files)
        _prune(folder)
        (folder / CURRENT).unlink(missing_ok=True)
        process = await self._spawn(command(host, port, folder))
        ended = asyncio.create_task(process.wait())
        try:
            said = await ray_process.until_started(process, START_SECONDS)
            write_private(self._log_file, said)
            if STARTED not in said:
                self._without_tables()
                return f"Ray did not start: {ray_process.last_words(said)}"
            if self._storage:
                (self.files / "tables" / USED).touch()
            log.info("ray head", address=facts.address, pid=process.pid, storage=self._storage)
            self._say(facts, "")
            reading = asyncio.create_task(ray_process.discard(process))
            try:
                await self._while_called(called, ended)
            finally:
                reading.cancel()
            return "Ray's head has ended" if ended.done() else "this machine has another address now"
        finally:
            await ray_process.end(process, ended)

    def _any_port(self, host: str) -> int:
        """Give ports that are free; the same as before if they are, so that nodes find the head where it was."""
        file = self.files / "port"
        known = int(file.read_text()) if file.exists() else 0
        if not known or not _all_free(host, known):
            known = free_ports(host)
            write_private(file, str(known).encode())
        return known

    def _without_tables(self) -> None:
        """Start with no tables of before the next time; and where that was so, with none on disk at all."""
        tables = self.files / "tables"
        if (tables / USED).exists():
            shutil.rmtree(tables, ignore_errors=True)
        else:
            self._storage = False

    async def _spawn(self, words: list[str]) -> asyncio.subprocess.Process:
        variables = environment(self.files, os.environ, tls=self._settings.ray_tls)
        if self._storage:
            tables = private_folder(self.files / "tables")
            variables |= {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(tables)}
        return await ray_process.start(words, variables, self.files)

    def _write(self, host: str) -> str:
        """Lay token and certificates where only we read them; give the token, which stays the same."""
        private_folder(self.files)
        file = self.files / "token"
        if not file.exists():
            write_private(file, secrets.token_hex(32).encode())
        authority = self.authority
        if authority is not None:
            papers = authority.papers(names(host))
            write_private(self.files / "authority.pem", papers.authority)
            write_private(self.files / "certificate.pem", papers.certificate)
            write_private(self.files / "key.pem", papers.key)
        return file.read_text().strip()

    async def _while_called(self, called: tuple[str, ...], ended: asyncio.Task[int]) -> None:
        while not ended.done() and names(self._host()) == called:
            await asyncio.wait({ended}, timeout=LOOK_SECONDS)

    def _say(self, facts: Facts | None, cause: str) -> None:
        if (facts, cause) != (self.facts, self.cause):
            self.facts, self.cause = facts, cause
            self._changed()


def _prune(folder: Path) -> None:
    sessions = [session for session in folder.glob("session_*") if not session.is_symlink()]
    for session in sorted(sessions, key=lambda found: found.stat().st_mtime)[:-SESSIONS]:
        shutil.rmtree(session, ignore_errors=True)


def free_ports(host: str) -> int:
    """Find the first of PORTS ports that nobody listens on now."""
    for _ in range(100):
        first = 20_000 + secrets.randbelow(30_000)
        if _all_free(host, first):
            return first
    raise OSError("no free ports for Ray: set video.ray_port")


def _all_free(host: str, first: int) -> bool:
    return all(_free(host, first + offset) for offset in (*range(7), *range(20, PORTS, 5)))


def _free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError:
            return False
    return True
