"""Expected seconds of a load, from earlier loads on this machine.

A load reads the weights, compiles kernels in its warm-up, and measures a profile if none is stored. Each part is
measured and stored with the profiles, because the router places requests by these seconds. The weights of a small model
may be read in less time than its kernels compile (`ASSUMED_WARMUP_SECONDS`). The seconds of a model exclude the
profile, because it is measured only once.
"""

import os
from pathlib import Path

import msgspec
import structlog

from node.engine.memory.gated_forward import MIN_LOAD_BYTES_PER_SECOND
from node.engine.scheduling.rules.chunk_policy import update_mean
from wire.units import MIB

ASSUMED_WARMUP_SECONDS = 2.0
"""Expected seconds of a warm-up before the first is measured. With g++, each kernel compiles in 0.4 to 1.6 s."""
FILE = "load-times.json"
"""Name of the file with the measured parts of loads."""
MIN_BYTES = 256 * MIB
"""Minimum bytes of weights from which the speed of the disk is measured."""
MAX_MODELS = 256
"""Maximum number of models whose load durations are stored. The model loaded longest ago is removed first."""
MAX_SECONDS = 3600.0
"""Maximum seconds that are stored for a model or a part of a load. A file with a longer value is not used."""

log = structlog.get_logger("engine.load_times")


class MeasuredLoad(msgspec.Struct):
    """Running means of the parts of loads on this machine, and the last duration by model. A mean is 0 before its first
    measurement."""

    speed: float = 0.0
    """Mean speed of reading weights, in bytes per second."""
    warm: float = 0.0
    """Mean seconds of a warm-up."""
    probe: float = 0.0
    """Mean seconds of measuring a profile."""
    models: dict[str, float] = msgspec.field(default_factory=dict[str, float])
    """Seconds of the last load of a model without its profile, by fingerprint, the newest last."""

    def record(self, fingerprint: str, weights: int, read: float, warm: float, probe: float) -> None:
        """Record the parts of a load of `weights` bytes, in seconds: reading, warm-up and measuring the profile. Loads
        of less than `MIN_BYTES` do not change `speed`; a `probe` of 0 was not measured."""
        if weights >= MIN_BYTES:
            self.speed = update_mean(self.speed, weights / max(read, 1e-3))
        self.warm = update_mean(self.warm, min(warm, MAX_SECONDS))
        if probe:
            self.probe = update_mean(self.probe, min(probe, MAX_SECONDS))
        self.models.pop(fingerprint, None)
        self.models[fingerprint] = min(read + warm, MAX_SECONDS)
        while len(self.models) > MAX_MODELS:
            del self.models[next(iter(self.models))]


class LoadTimes:
    """Measured parts of loads, stored in the file `FILE` of `folder`; None: in memory only."""

    def __init__(self, folder: Path | None) -> None:
        self._file = None if folder is None else folder / FILE
        self._measured = _read_measured(self._file)

    @property
    def measured(self) -> MeasuredLoad:
        """Measured parts of all loads so far, including loads of earlier processes."""
        return self._measured

    def estimate_seconds(self, fingerprint: str, weights: int, probe: float) -> float:
        """Return the expected duration in seconds of a load of the model with this fingerprint. `weights` is in bytes.

        `probe` is the assumed seconds of measuring the model's memory profile, used until such a measurement was timed;
        0 if the model already has a profile.
        """
        measured = self._measured
        seconds = measured.models.get(fingerprint)
        if seconds is None:
            seconds = weights / (measured.speed or MIN_LOAD_BYTES_PER_SECOND) + (
                measured.warm or ASSUMED_WARMUP_SECONDS
            )
        return seconds + ((measured.probe or probe) if probe else 0.0)

    def record(self, fingerprint: str, weights: int, read: float, warm: float, probe: float) -> None:
        """Record the seconds of the parts of a load, and write the new means to the file: `read` for the weights,
        `warm` for the warm-up, `probe` for measuring the profile.

        `weights` is in bytes. `probe` is 0 if the model already had a profile. A write error is logged.
        """
        self._measured.record(fingerprint, weights, read, warm, probe)
        self._write()

    def _write(self) -> None:
        if self._file is None:
            return
        part = self._file.with_suffix(f".{os.getpid()}")
        try:
            self._file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(self._measured))
            part.replace(self._file)
        except OSError as error:
            log.warning("load times not stored", error=str(error)[:200])


def _read_measured(file: Path | None) -> MeasuredLoad:
    """Read the stored values. Return empty values if the file is missing or unreadable, or has impossible numbers."""
    if file is None:
        return MeasuredLoad()
    try:
        measured = msgspec.json.decode(file.read_bytes(), type=MeasuredLoad)
    except FileNotFoundError:
        return MeasuredLoad()
    except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
        log.warning("load times unreadable", error=str(error)[:200])
        return MeasuredLoad()
    seconds = (measured.warm, measured.probe, *measured.models.values())
    if not (0 <= measured.speed < 2**60 and all(0 <= value <= MAX_SECONDS for value in seconds)):
        log.warning("load times unreadable", error="numbers that cannot be measured")
        return MeasuredLoad()
    return measured
