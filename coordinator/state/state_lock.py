"""Lock that gives one process exclusive use of a state folder."""

import fcntl
import os
from pathlib import Path

from coordinator.state.store_errors import StateLockedError


class StateLock:
    """Exclusive lock of a state folder, held until `release` or the end of the process.

    The constructor raises `StateLockedError` if another process holds the lock, and `OSError` if the lock file cannot
    be opened or locked.
    """

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, 32, 0).decode(errors="replace").strip()
            os.close(self._file)
            raise StateLockedError(
                f"the state folder {folder} is in use by process {holder or 'unknown'}: "
                "use the running coordinator, or stop it first"
            ) from None
        except OSError:  # such as a network disk without locks
            os.close(self._file)
            raise
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Release the lock."""
        os.close(self._file)
