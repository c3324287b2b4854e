"""Communication between the agent and the attendant of a worker: files in the lease's folder, and two locks.

    lease.json      written by the agent: the granted lease and its job. Without it no attendant may begin
    claim.json      written once by the attendant: the worker that is ready for its job
    go              written by the agent: the worker is watched now and may begin. Until then it takes no memory
    events.jsonl    written by the attendant: events of the worker
    guard           locked by the agent for as long as it watches this lease
    attended        locked by the attendant for as long as it lives

The kernel releases a lock when its process ends, in every case. Each side therefore detects the end of its peer without
a socket, whose path may be 103 bytes long on macOS. Neither side writes for a lease that it no longer holds.
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
T = TypeVar("T", bound=Struct)
MAX_LINE_BYTES = 64 * 1024
"""Maximum bytes of one event. A longer line is discarded."""


class LeaseGrant(Struct, frozen=True, kw_only=True):
    """A granted lease, as input of its attendant."""

    lease: str
    generation: int
    size: int
    """Bytes of the lease."""
    python: str
    """Interpreter that runs the worker."""
    environment: dict[str, str]
    """Environment variables of the worker."""
    job: dict[str, object]
    """Job that the worker reads as one line."""


class WorkerClaim(Struct, frozen=True, kw_only=True):
    """The worker that an attendant has started."""

    attendant: int
    """Process id of the attendant."""
    worker: int
    """Process id of the worker."""
    born: str
    """Start time of the worker, which distinguishes it from a later process with the same id."""


def lock(path: Path, *, wait: bool = False, shared: bool = False) -> int | None:
    """Lock a file and return the descriptor that holds the lock; None when another process holds it.

    With `wait` the call blocks until the lock is free.
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


def locked(path: Path) -> bool:
    """Return whether another process holds the lock."""
    descriptor = lock(path, shared=True)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def write_new(path: Path, content: bytes) -> None:
    """Create a file of mode 0600 atomically. Raises FileExistsError when it exists."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.link(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read_grant(folder: Path) -> LeaseGrant | None:
    """Read the granted lease; None when there is none, or no longer."""
    return _read(folder / GRANT, LeaseGrant)


def read_claim(folder: Path) -> WorkerClaim | None:
    """Read the claim of the lease; None when no attendant has claimed it."""
    return _read(folder / CLAIM, WorkerClaim)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


class FileTail:
    """Reader of a growing file, line by line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._rest = b""

    def lines(self) -> list[bytes]:
        """Return the complete lines since the last call, without lines over `MAX_LINE_BYTES`."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read(16 * MAX_LINE_BYTES)
        except OSError:
            return []
        self._at += len(data)
        *complete, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            self._rest = b""
        return [line for line in complete if len(line) <= MAX_LINE_BYTES]
