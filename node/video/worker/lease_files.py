"""Files and locks in a lease's folder, through which the agent and the parent process of a worker communicate.

    lease.json      written by the agent: the granted lease and its job. Without this file no worker may be started
    claim.json      written once by the parent: the worker that it has started
    go              written by the agent: the worker is watched and may begin. Before that, it loads nothing
    events.jsonl    written by the parent: events of the worker
    guard           locked by the agent for as long as it watches this lease
    attended        locked by the parent for as long as its process lives

The kernel releases a lock when its process ends for any reason. Each side therefore detects the end of its peer without
a socket, whose path is limited to 103 bytes on macOS. Neither side writes files of a lease that has ended for it.
"""

import fcntl
import os
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

GRANT, CLAIM, GO, EVENTS = "lease.json", "claim.json", "go", "events.jsonl"
GUARD, ATTENDED = "guard", "attended"
OUT, SCRATCH, LOG = "out", "scratch", "worker.log"
"""Folders of the worker's artifacts and of its temporary files, and the file with its stderr."""
T = TypeVar("T", bound=Struct)
MAX_LINE_BYTES = 64 * 1024
"""Maximum bytes of one event, which is a line of a file. `FileTail` discards longer lines, but may return their end."""


class LeaseGrant(Struct, frozen=True, kw_only=True):
    """Granted lease, as the agent writes it to `lease.json` for the worker's parent process."""

    lease: str
    """Id of the lease."""
    generation: int
    """Generation of the lease (`LeaseRequest.generation`)."""
    size: int
    """Bytes of the lease."""
    python: str
    """Path of the interpreter that runs the worker."""
    environment: dict[str, str]
    """Environment variables of the worker."""
    job: dict[str, object]
    """Job, without the size of the lease. The parent process adds `size` and writes both to the worker's stdin."""


class WorkerClaim(Struct, frozen=True, kw_only=True):
    """Claim of a lease in `claim.json`: the worker, and the parent process that has started it."""

    attendant: int
    """Process id of the worker's parent process."""
    worker: int
    """Process id of the worker."""
    born: str
    """Start time of the worker, which distinguishes it from a later process with the same id; empty if unreadable."""


def lock_file(path: Path, *, wait: bool = False, shared: bool = False) -> int | None:
    """Lock a file and return the descriptor that holds the lock. The caller closes the descriptor to release the lock.

    Return None if another descriptor holds the lock; with `wait`, block until the lock is free instead. Create the file
    if it is missing. With `shared`, other shared locks are possible at the same time. Raise `OSError` if the file
    cannot be opened.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(descriptor)
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def is_locked(path: Path) -> bool:
    """Return whether any process holds the exclusive lock of a file, also through another descriptor of this process.

    Create the file if it is missing. Raise `OSError` if the file cannot be opened.
    """
    descriptor = lock_file(path, shared=True)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def write_new(path: Path, content: bytes) -> None:
    """Create a file with this content and mode 0600, atomically.

    Raise `FileExistsError` if the file exists, `OSError` if it cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.link(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_grant(folder: Path) -> LeaseGrant | None:
    """Read the grant in the folder of a lease; None if it is missing or invalid, as after the end of the lease."""
    return _read_struct(folder / GRANT, LeaseGrant)


def read_claim(folder: Path) -> WorkerClaim | None:
    """Read the claim in the folder of a lease; None if no worker has started or the claim is invalid."""
    return _read_struct(folder / CLAIM, WorkerClaim)


def _read_struct(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


class FileTail:
    """Reader of a growing file, line by line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def read_lines(self) -> list[bytes]:
        """Return the complete lines since the last call; none if the file cannot be read.

        A call reads at most `16 * MAX_LINE_BYTES` bytes. Lines over `MAX_LINE_BYTES` are discarded, but the end of such
        a line may be returned as a line.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read(16 * MAX_LINE_BYTES)
        except OSError:
            return []
        self._offset += len(data)
        *complete, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest = b""
        return [line for line in complete if len(line) <= MAX_LINE_BYTES]
