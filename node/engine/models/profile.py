"""Profiles of models on this machine, and the folder that holds them.

A profile belongs to the fingerprint of a model, the machine and the versions of the libraries. A file that cannot be
read or has another key is ignored with a log event, and replaced by the next measurement.
"""

import hashlib
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import mlx.core as mx
import msgspec
import structlog

from wire.report import Hardware, Kv, Transient

log = structlog.get_logger("engine.profile")

METHOD = 2
"""What is measured: 2 since the residual counts joins and decode steps."""


class Key(msgspec.Struct, frozen=True):
    """Of what a profile is: another model, machine or version takes other bytes."""

    fingerprint: str
    chip: str
    memory: int
    device: str
    mlx: str
    mlx_lm: str
    macpool: str
    method: int = METHOD

    @property
    def file(self) -> str:
        """The name of its file."""
        return hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32] + ".json"


class Profile(msgspec.Struct, frozen=True):
    """What was measured. `residual`: the most by which a forward went above what it wrote and its estimate, in bytes;
    `chunk`, `reach` and `rows`: how far was measured, in tokens of a chunk, tokens of a row, and rows that joined and
    decoded together; `share`: how much of the longest row that follows from the fit
    passed when it was held against a reading."""

    key: Key
    transient: Transient
    kv: Kv
    residual: int
    highest: int
    chunk: int
    reach: int
    rows: int
    seconds: float
    share: float = 1.0
    failed: str = ""
    """What to change, where no attempt to hold the longest row against a reading passed; kept so that the next load
    says it again instead of measuring for another 10 s."""


def key_of(fingerprint: str, hardware: Hardware) -> Key:
    """Give the key of a model on this machine, as it is installed now."""
    device = "metal" if mx.metal.is_available() else "cpu"
    return Key(
        fingerprint, hardware.chip, hardware.memory, device, _version("mlx"), _version("mlx-lm"), _version("macpool")
    )  # fmt: skip


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


class Profiles:
    """The profiles on disk; without a folder there are none."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def read(self, key: Key) -> Profile | None:
        """Give the profile of this key, if it was measured before and can be read."""
        if self._folder is None:
            return None
        path = self._folder / key.file
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Profile)
        except FileNotFoundError:
            return None
        except (OSError, msgspec.DecodeError, msgspec.ValidationError) as error:
            log.warning("profile unreadable", file=path.name, error=str(error)[:200])
            return None
        if found.key != key or not _sane(found):
            log.warning("profile foreign", file=path.name)
            return None
        return found

    def has(self, key: Key) -> bool:
        """Return whether a profile of this key is kept."""
        return self._folder is not None and (self._folder / key.file).exists()

    def write(self, profile: Profile) -> None:
        """Keep a profile; a disk that is full costs the next load a probe, nothing else."""
        if self._folder is None:
            return
        path = self._folder / profile.key.file
        part = path.with_suffix(f".{os.getpid()}")
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            part.write_bytes(msgspec.json.encode(profile))
            part.replace(path)
        except OSError as error:
            log.warning("profile not kept", file=path.name, error=str(error)[:200])


def _sane(profile: Profile) -> bool:
    """Say whether all numbers are such as can be measured."""
    numbers = (*msgspec.structs.astuple(profile.transient), profile.residual, profile.highest)
    return all(0 <= number < 2**60 for number in numbers) and 0 < profile.share <= 1
