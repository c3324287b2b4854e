"""Lock that allows one node per state folder, and errors of the start of a node."""

import fcntl
import os
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from host.private_files import create_private_folder
from node.daemon_threads import start_call

LOCK_TIMEOUT_SECONDS = 1.0
"""Maximum seconds to wait for the lock.

`cluster leave` and the commands that read the running settings hold the lock for an instant.
"""
ACCESS_TIMEOUT_SECONDS = 15.0
"""Maximum seconds for the first access to a disk. A disk that sleeps needs some seconds to start."""
_POLL_SECONDS = 0.05

T = TypeVar("T")


class NodeStartError(Exception):
    """Raised if a node cannot start. The text names the reason, and the next step if one is known."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        """Exit code of the program."""


@contextmanager
def name_unusable_files() -> Generator[None]:
    """Convert an `OSError` of the block to a `NodeStartError` that names the file.

    If a permission is missing, the error also names the next step.
    """
    try:
        yield
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        step = ": run the node as the owner of that folder, or use another one with --state"
        message = f"{place}{error.strerror or error}{step if isinstance(error, PermissionError) else ''}"
        raise NodeStartError(1, message) from None


def await_disk(access: Callable[[], T], place: Path | str) -> T:
    """Return the result of `access`, a call that reads the disk of `place`, or raise its exception.

    Raise `NodeStartError` if the disk does not answer within `ACCESS_TIMEOUT_SECONDS`, as on a lost network mount.
    """
    try:
        return start_call(access, "disk").result(ACCESS_TIMEOUT_SECONDS)
    except TimeoutError:
        raise NodeStartError(1, f"{place} does not answer: check its disk, or its network mount") from None


class NodeLock:
    """Context manager that locks the folder of a node (STATE/node).

    The file `lock` in the folder contains the process id, to which `cluster leave` sends SIGUSR1. By default SIGUSR1
    ends a process. The caller must therefore block the signal in all threads until the node has a handler for it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> None:
        """Create the folder if it is missing, take the lock, and write the process id.

        Raise `NodeStartError` if another node holds the lock for `LOCK_TIMEOUT_SECONDS`, `OSError` if the folder cannot
        be used.
        """
        file = create_private_folder(self._folder) / "lock"
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        clock, deadline = threading.Event(), time.monotonic() + LOCK_TIMEOUT_SECONDS
        while not self._try_lock():
            if time.monotonic() >= deadline:
                os.close(self._descriptor)
                raise NodeStartError(1, f"a node is already running in {self._folder}")
            clock.wait(_POLL_SECONDS)
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def _try_lock(self) -> bool:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def __exit__(self, *_: object) -> None:
        """Release the lock."""
        os.close(self._descriptor)
