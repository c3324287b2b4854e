"""Log file of the standard error of the engine process. After a crash its last lines name the cause."""

import os
from contextlib import suppress
from pathlib import Path

from wire.units import MIB

MAX_LOG_BYTES = 8 * MIB
"""Bytes above which a log is rotated; one older log is kept."""
TAIL_BYTES = 2048
"""Bytes at the end of the log from which the cause of a crash is quoted."""
TAIL_LINES = 3
"""Maximum lines of the log that the cause of a crash quotes."""


class EngineLog:
    """Log file of the engine's standard error, mode 0600, because a traceback may quote a prompt.

    Above `MAX_LOG_BYTES` the log is rotated: the file with the suffix `.1` has the older lines.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self) -> int:
        """Rotate a long log, open the log to append, and return its file descriptor. Raise `OSError` if that fails."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self.measure_size() > MAX_LOG_BYTES:
            self._path.replace(self._older)
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def bound(self) -> None:
        """Rotate a long log while the engine writes: copy its end to the older log, and empty the file.

        Output that the engine writes at this moment may be lost. Errors are ignored.
        """
        if self.measure_size() <= MAX_LOG_BYTES:
            return
        with suppress(OSError), self._path.open("r+b") as file:
            beside = os.open(self._older, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(beside, "wb") as older:
                file.seek(-MAX_LOG_BYTES, os.SEEK_END)
                older.write(file.read(MAX_LOG_BYTES))
            file.truncate(0)

    @property
    def _older(self) -> Path:
        return self._path.with_suffix(self._path.suffix + ".1")

    def measure_size(self) -> int:
        """Return the length of the log in bytes; 0 without a file."""
        with suppress(OSError):
            return self._path.stat().st_size
        return 0

    def read_tail(self, start: int) -> str:
        """Return the last `TAIL_LINES` lines after byte `start`, joined by ` | `, without lines of level info.

        Only the last `TAIL_BYTES` are read. If the log is shorter than `start` after a rotation, all of it counts.
        Return an empty text if there are none or the log cannot be read.
        """
        try:
            with self._path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(start if start <= end else 0, end - TAIL_BYTES))
                lines = file.read(TAIL_BYTES).decode(errors="replace").split("\n")
        except OSError:
            return ""
        messages = [line.strip() for line in lines if line.strip() and "[info" not in line]
        return " | ".join(messages[-TAIL_LINES:])
