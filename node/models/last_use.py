"""Store the time of the last use of each model on this machine, for the removal of unused models.

The times are stored in a file in the folder of the memory profiles (`node.engine.models.profile`).
"""

import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import structlog

FILE = "last-use.json"
"""Name of the file with the times, a JSON object of Unix seconds by name of the model."""
STORE_INTERVAL_SECONDS = 3600.0
"""Minimum seconds between two stored times of a model, because a write blocks the inference thread."""
MAX_MODELS = 1024
"""Maximum models with a stored last use; above it, the oldest entry is dropped."""

log = structlog.get_logger("node.models.last_use")


class LastUse:
    """Store of the times of last use, by name of the model.

    The times are stored in a file of `folder`; None stores them in memory only. `wall()` returns Unix seconds.
    """

    def __init__(self, folder: Path | None, wall: Callable[[], float] = time.time) -> None:
        self._file = None if folder is None else folder / FILE
        self._wall = wall
        self._stored = _read_times(self._file)

    def find(self, name: str) -> float:
        """Return the stored Unix time of the last use of a model; 0 without one.

        The model may have been used up to `STORE_INTERVAL_SECONDS` later than that.
        """
        return self._stored.get(name, 0.0)

    def record(self, name: str, idle_seconds: float) -> float:
        """Record that a model was used `idle_seconds` ago. Return the Unix time of its last use.

        The time is stored if it is at least `STORE_INTERVAL_SECONDS` after the stored one. A write error is logged.
        """
        used = max(0.0, self._wall() - idle_seconds)
        if used - self._stored.get(name, 0.0) >= STORE_INTERVAL_SECONDS:
            self._stored.pop(name, None)
            self._stored[name] = used
            while len(self._stored) > MAX_MODELS:
                del self._stored[next(iter(self._stored))]
            self._write()
        return max(used, self._stored.get(name, 0.0))

    def _write(self) -> None:
        if self._file is None:
            return
        part = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(self._stored))
            part.replace(self._file)
        except OSError as error:
            log.warning("last use not stored", error=str(error)[:200])


def _read_times(file: Path | None) -> dict[str, float]:
    if file is None:
        return {}
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, float])
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        log.warning("last use unreadable", error=str(error)[:200])
        return {}
