"""What the agent and the attendant of a worker tell each other: files in the lease's own folder, and two locks.

    lease.json      the agent: what is granted to whom, and the job. Without it nobody may begin
    claim.json      the attendant, once and for ever: the worker that waits for its job
    go              the agent: the worker is watched now, let it begin. Until then it takes no memory
    events.jsonl    the attendant: what the worker says
    guard           locked by the agent for as long as it watches over this lease
    attended        locked by the attendant for as long as it lives

A lock goes with the process that holds it, however that ends: so each side learns of the other's end from the kernel,
needs no socket (whose path may be 103 bytes long on macOS), and writes nothing for a lease that is its own no more.
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
LONGEST_LINE = 64 * 1024
"""Bytes of one event; a longer line is no event."""


class Grant(Struct, frozen=True, kw_only=True):
    """What an attendant is to start: the interpreter, its environment, and the line that the worker reads. `size` are
    the lease's bytes."""

    lease: str
    generation: int
    size: int
    python: str
    environment: dict[str, str]
    job: dict[str, object]


class Claim(Struct, frozen=True, kw_only=True):
    """The worker that an attendant has started, with what tells it from a later process of the same number."""

    attendant: int
    worker: int
    born: str


def lock(path: Path, *, wait: bool = False, shared: bool = False) -> int | None:
    """Lock a file of ours, and give the descriptor that holds the lock; None when somebody else does. With `wait` it
    returns only once the lock is free."""
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
    """Whether somebody holds the lock."""
    descriptor = lock(path, shared=True)
    if descriptor is None:
        return True
    os.close(descriptor)
    return False


def write_new(path: Path, content: bytes) -> None:
    """Make a file of mode 0600 that nobody has made before; FileExistsError otherwise. It appears whole."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.link(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def read_grant(folder: Path) -> Grant | None:
    """Read what is granted; None when nothing is, or no longer."""
    return _read(folder / GRANT, Grant)


def read_claim(folder: Path) -> Claim | None:
    """Read who claims the lease; None when nobody does yet."""
    return _read(folder / CLAIM, Claim)


def _read(path: Path, kind: type[T]) -> T | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None


class Tail:
    """Reads a file that grows, line by line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._rest = b""

    def lines(self) -> list[bytes]:
        """Give the whole lines that came since the last time; one that is too long is left out."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read(16 * LONGEST_LINE)
        except OSError:
            return []
        self._at += len(data)
        *whole, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            self._rest = b""
        return [line for line in whole if len(line) <= LONGEST_LINE]
