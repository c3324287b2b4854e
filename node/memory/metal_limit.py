"""Store the Metal limit that the device of this machine reported, in STATE/node/metal.json (0600), for later starts.

A stored limit is valid for one chip, its RAM, one version of macOS and one value of `iogpu.wired_limit_mb`. Without a
valid file, the node uses the limit that a person set, or an estimate, until the engine reports.
"""

from pathlib import Path

import msgspec
import structlog

from host.private_files import create_private_folder, write_private
from node.memory.cap import MetalDevice
from wire.report import Hardware

FILE = "metal.json"

log = structlog.get_logger("node.memory.metal_limit")


class _StoredLimit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Content of the file: the key of the limit, and the limit. Sizes in bytes."""

    chip: str
    memory: int
    system: str
    wired: int | None
    limit: int


def read_metal_device(folder: Path, hardware: Hardware, wired: int | None) -> MetalDevice | None:
    """Return the Metal limit stored in `folder`; None if there is none that is readable and valid for this machine.

    A limit for another chip, RAM, version of macOS or value of `iogpu.wired_limit_mb` is not valid. `wired` is the
    current value of `iogpu.wired_limit_mb` in bytes; None if no person has set it.
    """
    try:
        stored = msgspec.json.decode((folder / FILE).read_bytes(), type=_StoredLimit)
    except (OSError, msgspec.MsgspecError):
        return None
    device = MetalDevice(stored.limit, wired)
    return device if stored.limit > 0 and stored == _build_stored_limit(hardware, device) else None


def write_device(folder: Path, hardware: Hardware, device: MetalDevice) -> None:
    """Store the Metal limit of this machine in `folder`. A write error is logged: the next start uses an estimate."""
    try:
        write_private(create_private_folder(folder) / FILE, msgspec.json.encode(_build_stored_limit(hardware, device)))
    except OSError as error:
        log.warning("metal limit not stored", error=str(error))


def _build_stored_limit(hardware: Hardware, device: MetalDevice) -> _StoredLimit:
    return _StoredLimit(hardware.chip, hardware.memory, hardware.system, device.wired, device.limit)
