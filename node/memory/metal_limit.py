"""Store Metal's limit, as the device of this machine reported it, in STATE/node/metal.json (0600) for later starts.

A limit belongs to a chip, its RAM, a version of macOS and a value of `iogpu.wired_limit_mb`. A file that differs from
this machine in one of them, or cannot be read, is ignored: an estimate is used until the engine's report.
"""

from pathlib import Path

import msgspec
import structlog

from host.private_files import private_folder, write_private
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


def read_device(folder: Path, hardware: Hardware, wired: int | None) -> MetalDevice | None:
    """Return the stored limit of this machine; None without one.

    `wired` is the present value of `iogpu.wired_limit_mb` in bytes, None when it is not set.
    """
    try:
        kept = msgspec.json.decode((folder / FILE).read_bytes(), type=_StoredLimit)
    except (OSError, msgspec.MsgspecError):
        return None
    device = MetalDevice(kept.limit, wired)
    return device if kept.limit > 0 and kept == _belongs(hardware, device) else None


def write_device(folder: Path, hardware: Hardware, device: MetalDevice) -> None:
    """Store a limit for later starts. A full disk stops no node: the next start uses an estimate again."""
    try:
        write_private(private_folder(folder) / FILE, msgspec.json.encode(_belongs(hardware, device)))
    except OSError as error:
        log.warning("metal limit not stored", error=str(error))


def _belongs(hardware: Hardware, device: MetalDevice) -> _StoredLimit:
    return _StoredLimit(hardware.chip, hardware.memory, hardware.system, device.wired, device.limit)
