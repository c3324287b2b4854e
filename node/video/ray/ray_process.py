"""Start and end Ray, `ray start --head --block`, as a child process that is confined to loopback.

The child is this Python interpreter, which runs Ray's command line and exits when its standard input ends. The output
of the child is kept until Ray is up. After that, Ray writes logs to its own folder.
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

from host.private_files import create_private_folder

RESTART_DELAYS_SECONDS = (1.0, 60.0)
"""First and maximum wait before Ray or its driver is started again, in seconds."""
HEALTHY_AFTER_SECONDS = 120.0
"""Duration of a run in seconds after which the next wait is again the first of `RESTART_DELAYS_SECONDS`."""
EXIT_GRACE_SECONDS = 5.0
"""Seconds that Ray has to exit after SIGTERM. After that, its process group is killed."""
OBJECT_STORE_BYTES = 80_000_000
"""Bytes of Ray's object store, which is required but stays empty."""
MAX_OUTPUT_BYTES = 2**20
"""Bytes of output after which the start counts as failed."""
STARTED = b"Ray runtime started"
"""Text of Ray's output once Ray is up."""
LAST_LINES = 3
"""Maximum lines of Ray's output in a message for a person."""
CHILD = ("-P", "-m", "node.video.ray.ray_child", "start", "--block")
"""Interpreter arguments that start Ray through `ray_child`."""
QUIET = ("--disable-usage-stats", "--include-log-monitor=false", "--include-dashboard=false", "--no-monitor")
"""Options that disable the parts of Ray that are not needed."""
HOST = "127.0.0.1"
"""Address of all sockets of Ray, which no other machine can reach."""
KEPT = ("PATH", "HOME", "USER", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH")
"""Environment variables that Ray's processes inherit."""
SLIM = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_core_worker_task_event_to_gcs": "0",
    "RAY_event_stats": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
    "RAY_kill_child_processes_on_worker_exit": "false",
    "RAY_raylet_start_wait_time_s": "90",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "PYTHONUNBUFFERED": "1",
}
"""Environment variables of every process of Ray.

Ray must not end worker processes: the actor ends its worker, and an end by Ray would look like a crash. Without a
"cluster", Ray uses loopback as the address of the machine, on Linux as on macOS.
"""

SESSIONS = "r"
"""Name of Ray's folder within a private folder. Ray gives all users access to its folder with its logs and sockets.

The name is short because of the limit of socket paths.
"""


def build_command(*words: str) -> list[str]:
    """Return the command line that starts Ray with these arguments."""
    return [sys.executable, *CHILD, *words, *QUIET]


def format_options(numbers: Mapping[str, int]) -> list[str]:
    """Return numbers as options of Ray's command line, `--NAME=NUMBER`."""
    return [f"--{name}={number}" for name, number in numbers.items()]


def build_environment(inherited: Mapping[str, str], files: Path) -> dict[str, str]:
    """Return the environment variables of Ray's processes: `KEPT` of `inherited`, `SLIM`, and the token in `files`."""
    variables = {name: inherited[name] for name in KEPT if name in inherited} | SLIM
    return variables | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(files / "token")}


async def start_ray(words: Sequence[str], variables: Mapping[str, str], folder: Path) -> asyncio.subprocess.Process:
    """Start Ray in its own session and return the process. Raise `OSError` if the process cannot be started.

    `words` is the command line, `variables` the environment, `folder` the working folder.
    """
    return await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
        cwd=folder,
        env=variables,
    )


async def read_until_started(process: asyncio.subprocess.Process, seconds: float) -> bytes:
    """Return the output of Ray until Ray is up, has ended, has written `MAX_OUTPUT_BYTES`, or `seconds` have passed.

    The output contains `STARTED` only if Ray is up.
    """
    output, out = bytearray(), _get_stdout(process)
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while STARTED not in output and len(output) < MAX_OUTPUT_BYTES:
                piece = await out.read(4096)
                if not piece:
                    break
                output += piece
    return bytes(output)


async def discard_output(process: asyncio.subprocess.Process) -> None:
    """Read and discard the output until its end, because a full pipe would block the process."""
    while await _get_stdout(process).read(4096):
        pass


def _get_stdout(process: asyncio.subprocess.Process) -> asyncio.StreamReader:
    assert process.stdout is not None  # noqa: S101  it was asked for
    return process.stdout


def summarize_output(output: bytes) -> str:
    """Return the last `LAST_LINES` lines of Ray's output as one line for a person, at most 500 characters."""
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    return " / ".join(lines[-LAST_LINES:])[:500] or "it printed nothing"


async def end_ray(process: asyncio.subprocess.Process, ended: "asyncio.Task[int]") -> None:
    """End Ray by SIGTERM, and kill the rest of its process group once Ray has ended or `EXIT_GRACE_SECONDS` are over.

    `ended` is the task that waits for the end of `process`. The output is read to its end, because the loop does not
    notice the end of a process while output is buffered.
    """
    reading = asyncio.create_task(discard_output(process))
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        await asyncio.wait({ended}, timeout=EXIT_GRACE_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await ended
    await reading


def create_short_folder(files: Path) -> Path:
    """Create and return a folder with a short path for Ray, because the paths of its sockets must fit into 103 bytes.

    The folder is below /tmp on macOS, and below the temporary folder of this process on Linux. Its name is derived from
    the path `files`. Raise `OSError` if the folder belongs to another user or is a file.
    """
    name = f"mp-{os.getuid()}-{hashlib.sha256(str(files).encode()).hexdigest()[:8]}"
    folder = Path("/tmp" if sys.platform == "darwin" else tempfile.gettempdir()) / name  # noqa: S108  ours alone, below
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if status.st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: delete it as that user or as an administrator")
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{folder} is no folder: delete it")
    return create_private_folder(folder)
