"""Memory profiles of models on this machine, and the folder that stores them.

A profile belongs to a model, a machine, and the versions of the software (`MemoryProfileKey`). A file that is
unreadable or has another key is ignored with a log event, and replaced by the next measurement.
"""

import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx
import msgspec
import structlog

from wire.report import Hardware, KvParameters, TransientModel

log = structlog.get_logger("engine.profile")

METHOD_VERSION = 2
"""Version of the measurement. Since version 2, the residual includes joins and decode steps."""


class MemoryProfileKey(msgspec.Struct, frozen=True):
    """Key of a profile. Each model, machine and library version has its own profile, because forwards take different
    memory."""

    fingerprint: str
    """Fingerprint of the model."""
    chip: str
    """Name of the machine's chip."""
    memory: int
    """RAM in bytes."""
    device: str
    """Device of MLX: `metal` or `cpu`."""
    mlx: str
    """Installed version of mlx."""
    mlx_lm: str
    """Installed version of mlx-lm."""
    macpool: str
    """Installed version of this program."""
    method: int = METHOD_VERSION
    """Version of the measurement."""

    @property
    def file(self) -> str:
        """Name of the file that stores the profile."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32] + ".json"


class MemoryProfile(msgspec.Struct, frozen=True):
    """Measured memory of a model on this machine, as stored on disk."""

    key: MemoryProfileKey
    """Key of the profile."""
    transient: TransientModel
    """Fitted coefficients of transient bytes."""
    kv: KvParameters
    """Parameters of the KV memory of a row."""
    residual: int
    """Largest number of bytes by which a chunk, a join or a decode step exceeded the sum of its KV and its estimate."""
    highest: int
    """Highest measured transient bytes of a prefill or decode step (`TransientEstimator.highest`)."""
    chunk: int
    """Tokens of the largest measured chunk."""
    reach: int
    """Tokens of the longest measured row."""
    rows: int
    """Largest number of rows that were measured in one join and decode step."""
    seconds: float
    """Duration of the measurement, in seconds."""
    share: float = 1.0
    """Tokens of the longest row that passed a check against a memory reading, as a share of the tokens tried first, 0
    to 1. With `failed`, the share of the last attempt, which did not pass. Without a check: 1."""
    failed: str = ""
    """Diagnosis if no attempted row length passed the check against a memory reading; empty if one passed, or without a
    check. The diagnosis is stored because later loads of the same process repeat it without another measurement."""
    refused_bytes: int = 0
    """Bytes of the first forward that the gate refused to the probe of a load, including its row; 0 if it refused none.
    A later load measures again if the gate then passes twice these bytes. A sweep always has 0."""


def build_key(fingerprint: str, hardware: Hardware) -> MemoryProfileKey:
    """Return the key of the model with this fingerprint on a machine, with the installed versions of the libraries."""
    device = "metal" if mx.metal.is_available() else "cpu"
    return MemoryProfileKey(
        fingerprint,
        hardware.chip,
        hardware.memory,
        device,
        _read_version("mlx"),
        _read_version("mlx-lm"),
        _read_version("macpool"),
    )


def _read_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


class MemoryProfileStore:
    """Store of profiles, with one file per profile in `folder`. If `folder` is None, nothing is stored or found."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def read(self, key: MemoryProfileKey) -> MemoryProfile | None:
        """Return the profile with this key. Return None if its file is missing, unreadable or implausible, or has
        another key."""
        if self._folder is None:
            return None
        path = self._folder / key.file
        try:
            found = msgspec.json.decode(path.read_bytes(), type=MemoryProfile)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            log.warning("profile unreadable", file=path.name, error=str(error)[:200])
            return None
        if found.key != key or not _is_sane(found):
            log.warning("profile of another model", file=path.name)
            return None
        return found

    def has(self, key: MemoryProfileKey) -> bool:
        """Return whether a file for this key exists, without a check of its content."""
        return self._folder is not None and (self._folder / key.file).exists()

    def write(self, profile: MemoryProfile) -> None:
        """Store a profile. A write error is logged, and the next load of the model then measures again."""
        if self._folder is None:
            return
        path = self._folder / profile.key.file
        part = path.with_suffix(f".{os.getpid()}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(profile))
            part.replace(path)
        except OSError as error:
            log.warning("profile not stored", file=path.name, error=str(error)[:200])


def _is_sane(profile: MemoryProfile) -> bool:
    """Return whether all numbers are within measurable bounds."""
    numbers = (*msgspec.structs.astuple(profile.transient), profile.residual, profile.highest, profile.refused_bytes)
    return all(0 <= number < 2**60 for number in numbers) and 0 < profile.share <= 1
