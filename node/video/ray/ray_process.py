"""`ray start --head --block` as a child process, confined to loopback.

The child is an interpreter of ours that becomes Ray's command line and exits when its standard input ends. Its output
is kept until Ray is up; afterwards Ray writes logs into its own folder.
"""

import asyncio
import hashlib
import os
import signal
import stat
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from host.private_files import private_folder

BACK_OFF = (1.0, 60.0)
"""First and longest wait before Ray is started again, in seconds."""
HEALTHY = 120.0
"""A run of so many seconds makes the next wait the first one again."""
GRACE = 5.0
STORE = 80_000_000
"""Bytes of Ray's store of objects, in which we put nothing; it wants one."""
MOST_SAID = 2**20
STARTED = b"Ray runtime started"
LAST_LINES = 3
CHILD = ("-P", "-m", "node.video.ray.ray_child", "start", "--block")
"""What an interpreter is told so that it becomes Ray with a life line."""
QUIET = ("--disable-usage-stats", "--include-log-monitor=false", "--include-dashboard=false", "--no-monitor")
HOST = "127.0.0.1"
"""The address of every socket of Ray: no other machine reaches it."""
KEPT = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""What Ray's processes inherit."""
SLIM = {
    "RAY_USAGE_STATS_ENABLED": "0", "RAY_enable_metrics_collection": "0", "RAY_memory_monitor_refresh_ms": "0",
    "RAY_prestart_worker_first_driver": "0", "RAY_enable_core_worker_task_event_to_gcs": "0", "RAY_event_stats": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1", "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_kill_child_processes_on_worker_exit": "false", "RAY_raylet_start_wait_time_s": "90",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "PYTHONUNBUFFERED": "1",
}  # fmt: skip
"""Settings of every process of Ray. Its actor ends a worker of ours: if Ray ended it first, its end would look like a
crash. Without a "cluster" Ray takes loopback for the address of the machine, on Linux as on macOS."""


def command(*words: str) -> list[str]:
    """Give what is started, by Ray's own words for it."""
    return [sys.executable, *CHILD, *words, *QUIET]


def numbered(numbers: Mapping[str, int]) -> list[str]:
    """Give numbers as Ray's command line takes them."""
    return [f"--{name}={number}" for name, number in numbers.items()]


def environment(inherited: Mapping[str, str], files: Path) -> dict[str, str]:
    """Return the environment of the processes of Ray: named variables only, and the path of the token in `files`."""
    found = {name: inherited[name] for name in KEPT if name in inherited} | SLIM
    return found | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(files / "token")}


async def start(words: Sequence[str], variables: Mapping[str, str], folder: Path) -> asyncio.subprocess.Process:
    """Start it, in a session of its own, with a life line. OSError when that is not possible."""
    return await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        start_new_session=True, cwd=folder, env=variables,
    )  # fmt: skip


async def until_started(process: asyncio.subprocess.Process, seconds: float) -> bytes:
    """Give what it says until it is up (STARTED is in it), has ended, or took too long."""
    said, out = bytearray(), _out(process)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while STARTED not in said and len(said) < MOST_SAID:
                piece = await out.read(4096)
                if not piece:
                    break
                said += piece
    return bytes(said)


async def discard(process: asyncio.subprocess.Process) -> None:
    """Read on, so that it never has to wait for us."""
    while await _out(process).read(4096):
        pass


def _out(process: asyncio.subprocess.Process) -> asyncio.StreamReader:
    assert process.stdout is not None  # noqa: S101  it was asked for
    return process.stdout


def last_words(said: bytes) -> str:
    """Give the end of what it said, for a person."""
    lines = [line.strip() for line in said.decode(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-LAST_LINES:])[:500] or "it said nothing"


async def end(process: asyncio.subprocess.Process, ended: "asyncio.Task[int]") -> None:
    """End the process that we started, and all that it left in its group; nobody else reads what it says by now. Where
    its words had to wait, the loop would not hear of its end: they are read to the last."""
    reading = asyncio.create_task(discard(process))
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await asyncio.wait({ended}, timeout=GRACE)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await ended
    await reading


def short_folder(files: Path) -> Path:
    """Give Ray's own folder below /tmp: the paths of its sockets must fit into 103 bytes. OSError where it is somebody
    else's."""
    name = f"mp-{os.getuid()}-{hashlib.sha256(str(files).encode()).hexdigest()[:8]}"
    folder = Path("/tmp" if sys.platform == "darwin" else tempfile.gettempdir()) / name  # noqa: S108  ours alone, below
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to somebody else")
    return private_folder(folder)
