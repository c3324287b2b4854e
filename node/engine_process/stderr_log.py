"""The file that holds what the engine process wrote to stderr: its last words when it dies."""

import os
from contextlib import suppress
from pathlib import Path

from wire.units import MIB

LONGEST = 8 * MIB
"""A log of this size is put aside when a child starts; one older log is kept."""
TAIL = 2048
"""Bytes that the cause of a death may quote."""
TAIL_LINES = 3


class EngineLog:
    """One engine's log. Only its owner can read it: an engine may quote a prompt in a traceback."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self) -> int:
        """Open to append and give the descriptor; puts a long log aside first. OSError when it cannot be."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self.size() > LONGEST:
            self._path.replace(self._older)
        return os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def bound(self) -> None:
        """Put a log that has become too long aside while its engine writes on: it appends, so it goes on at the
        beginning. What it writes in this very moment may be lost."""
        if self.size() <= LONGEST:
            return
        with suppress(OSError), self._path.open("r+b") as file:
            beside = os.open(self._older, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(beside, "wb") as older:
                file.seek(-LONGEST, os.SEEK_END)
                older.write(file.read(LONGEST))
            file.truncate(0)

    @property
    def _older(self) -> Path:
        return self._path.with_suffix(self._path.suffix + ".1")

    def size(self) -> int:
        """Give its length in bytes; 0 while there is none."""
        with suppress(OSError):
            return self._path.stat().st_size
        return 0

    def tail(self, start: int) -> str:
        """Give the last lines written since the log was `start` bytes long, without those that only inform."""
        try:
            with self._path.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(start if start <= end else 0, end - TAIL))
                lines = file.read(TAIL).decode(errors="replace").split("\n")
        except OSError:
            return ""
        told = [line.strip() for line in lines if line.strip() and "[info" not in line]
        return " | ".join(told[-TAIL_LINES:])
