"""Where the cap and the ceiling of a node come from, and which term binds.

    static  = RAM − reserve(tier), or memory.cap     in a container the RAM is the container's limit
    cap     = min(static, metal)                     explicit and above Metal: refused, unless memory.above_metal
    dynamic = own phys + reclaimable + min(worker footprint, lease)        each byte counted once
    ceiling = max(1, min(cap, dynamic) − leases)

Rules that nobody may break: neither cap nor ceiling is ever 0 (in the ancestors of this formula 0 meant "no guard",
and arithmetic reached it); what cannot be measured is never taken as plenty; the term that binds is named together
with what a person can do about it. All of it is read anew at each check. What a person set and this machine cannot
give is an error at start; where the machine's limits fall later, the lower limit counts, with a lasting warning.
Reserves and reclaimable shares are those of the projects that the formula comes from: 12, 8 and 6 GiB, 4 GiB below
24 GiB.
"""

import re
from bisect import bisect_left
from dataclasses import dataclass, replace

from wire.frames import Limits
from wire.settings import SettingsError
from wire.units import GIB, MIB, parse_size, show_size
from wire.verdict import UNREADABLE, default_margin


@dataclass(frozen=True, slots=True)
class Tier:
    """What a tier leaves to the system: a reserve in bytes, and the share of active pages counted as reclaimable."""

    reserve: int
    active_share: float


CUSTOM = "custom"
"""The tier of a cap that a person set: there is no reserve then."""
TIERS = {
    "safe": Tier(12 * GIB, 0.2),
    "balanced": Tier(8 * GIB, 0.5),
    "aggressive": Tier(6 * GIB, 0.8),
    CUSTOM: Tier(0, 0.5),
}
SMALL_MACHINE = 24 * GIB
SMALL_RESERVE = 4 * GIB
METAL_SHARES = (
    (8 * GIB, 2 / 3),
    (16 * GIB, 0.74),
    (32 * GIB, 0.78),
    (48 * GIB, 0.78),
    (64 * GIB, 0.81),
    (128 * GIB, 0.84),
    (512 * GIB, 0.75),
)
"""Metal's limit by RAM as Macs report it where no limit is set, as a share of the RAM; sizes between are interpolated.

16 GiB: https://github.com/AlexsJones/llmfit/pull/754, 128: https://github.com/antirez/ds4/pull/893, 32 to 64: the
device line of llama.cpp in public logs of macOS 26 and 27, 8 and 512 (macOS 15):
https://github.com/ollama/ollama/pull/17367. The entry `metal-share` of the macOS checklist compares them."""
METAL_SHARES_SINCE = 26
METAL_SHARE_BEFORE, METAL_SHARE_BEFORE_SMALL, METAL_SMALL = 0.75, 2 / 3, 36 * GIB
"""Before macOS 26 the share is smaller, and smaller still up to 36 GiB of RAM: 10.7 GiB of 16, 21.3 of 32, 384 of 512
(https://github.com/ollama/ollama/pull/17367, https://github.com/exo-explore/exo/pull/1672)."""
WIRED_SHARE_MOST = 0.95
"""A wired limit above this share ended in a crash loop on a 512 GiB machine."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What this machine sets a cap, in bytes: RAM (0: unreadable), Metal's limit (None: no Metal, as on Linux), the
    limit of the container that we are in (None: none), and `iogpu.wired_limit_mb` where a person set it (else None).

    Without the device's own figure (`with_device`), `metal` is the limit that a person set, or else a guess."""

    total: int
    metal: int | None = None
    container: int | None = None
    wired: int | None = None

    @property
    def ram(self) -> int:
        """The RAM that is ours to divide."""
        return self.total if self.container is None else min(self.total, self.container)


@dataclass(frozen=True, slots=True)
class Device:
    """Metal's limit as the engine's device reported it, in bytes, and `Bounds.wired` at that time."""

    limit: int
    wired: int | None = None


@dataclass(frozen=True, slots=True)
class Cap:
    """Most bytes the node may reach, the term that decided it, the remedy, and a lasting warning or nothing."""

    bytes: int
    bound_by: str
    remedy: str
    warning: str = ""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The cap of this moment in bytes, with the term that binds and its remedy."""

    bytes: int
    bound_by: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Margin:
    """Bytes kept for spikes that no reading sees, and a lasting warning or nothing."""

    bytes: int
    warning: str = ""
    automatic: bool = False


def reserve(tier: str, total: int) -> int:
    """Give what an automatic cap leaves to the system of a machine with `total` bytes of RAM."""
    return SMALL_RESERVE if total < SMALL_MACHINE else TIERS[tier].reserve


def default_metal(total: int, system: str = "") -> int:
    """Return a guess in bytes of Metal's limit for `total` bytes of RAM where no limit is set.

    `system` is the name of the system, as "macOS 15.5"; one that is not known counts as the newest macOS.
    """
    found = re.match(r"macOS (\d+)", system)
    if found is not None and int(found[1]) < METAL_SHARES_SINCE:
        return int(total * (METAL_SHARE_BEFORE_SMALL if total <= METAL_SMALL else METAL_SHARE_BEFORE))
    sizes = [size for size, _ in METAL_SHARES]
    place = bisect_left(sizes, total)
    if place in (0, len(sizes)):
        return int(total * METAL_SHARES[min(place, len(sizes) - 1)][1])
    (below, low), (above, high) = METAL_SHARES[place - 1 : place + 1]
    return int(total * (low + (high - low) * (total - below) / (above - below)))


def with_device(bounds: Bounds, device: Device | None) -> Bounds:
    """Return the bounds with the device's figure in the place of a guess; unchanged where there is no figure.

    The device's figure follows `iogpu.wired_limit_mb`, but MLX reads it once for each process. So a limit that a person
    sets or removes later counts where it is lower, and a higher one from the engine's next start on.
    """
    if device is None or bounds.metal is None:
        return bounds
    default = bounds.wired is None and device.wired is None
    return replace(bounds, metal=device.limit if default else min(device.limit, bounds.metal))


def safe_wired_limit(tier: str, total: int) -> int:
    """Give the highest wired limit, in bytes, that leaves the system its reserve on a machine with `total` bytes."""
    return max(0, min(total - reserve(tier, total), int(total * WIRED_SHARE_MOST)))


def resolve_cap(
    setting: str | int, tier: str, bounds: Bounds, *, above_metal: bool = False, starting: bool = True
) -> Cap:
    """Give the cap for a setting under these bounds.

    Raises SettingsError for an explicit cap of 0 or above the RAM, for RAM that cannot be read where it is needed and,
    only at the start, for one above the Metal limit without `above_metal`: later, that limit counts.
    """
    relative = setting == "auto" or str(setting).strip().endswith("%")
    if not bounds.total and relative:
        raise SettingsError(f"setting memory.cap: the RAM of this machine cannot be read, so {setting} says nothing: "
                            'set a size, as "24GiB"')  # fmt: skip
    if setting == "auto":
        return _automatic_cap(tier, bounds)
    size = _explicit(setting, bounds, starting=starting)
    metal_first = bounds.metal is not None and not above_metal and bounds.metal < (bounds.container or 0)
    if bounds.container is not None and size > bounds.container and not metal_first:
        return Cap(max(1, bounds.container), "container", _CONTAINER, (
            f"memory.cap is {show_size(size)}, the container's limit {show_size(bounds.container)}: the lower counts"
        ))  # fmt: skip
    return _under_metal(setting, size, bounds, above_metal=above_metal, starting=starting)


_RAISE_CAP = "raise memory.cap"
_CONTAINER = "raise the memory limit of the container that the node runs in"


def _under_metal(setting: str | int, size: int, bounds: Bounds, *, above_metal: bool, starting: bool) -> Cap:
    metal = bounds.metal
    if metal is None or size <= metal:
        warning = "" if bounds.total else "the RAM cannot be read, so memory.cap is taken as it is"
        return Cap(size, "setting", _RAISE_CAP, warning)
    if above_metal:
        warning = f"the cap of {show_size(size)} is above the Metal limit of {show_size(metal)} (memory.above_metal)"
        return Cap(size, "setting", _RAISE_CAP, warning)
    raising = _sysctl(size, bounds.total)
    if starting:
        raise SettingsError(
            f"setting memory.cap: {setting} is {show_size(size)}, above the Metal limit of {show_size(metal)}; lower "
            f"it, raise the limit ({raising}), or set memory.above_metal = true and bear the risk"
        )
    warning = f"memory.cap is {show_size(size)}, above the Metal limit of {show_size(metal)}: the lower counts"
    return Cap(max(1, metal), "metal", _raise_metal(raising), warning)


def _automatic_cap(tier: str, bounds: Bounds) -> Cap:
    static, metal = max(1, bounds.ram - reserve(tier, bounds.ram)), bounds.metal
    if metal is not None and metal < static:
        return Cap(max(1, metal), "metal", _raise_metal(_sysctl(static, bounds.total)))
    if bounds.ram < bounds.total:
        return Cap(static, "container", _CONTAINER)
    return Cap(static, "static", "choose a memory.tier with a smaller reserve, or set memory.cap")


def _explicit(setting: str | int, bounds: Bounds, *, starting: bool) -> int:
    try:
        size = parse_size(setting, whole=bounds.ram)
    except ValueError as error:
        raise SettingsError(f"setting memory.cap: {error}") from None
    if size == 0:
        raise SettingsError('setting memory.cap: a cap is never 0; memory.guard = "off" switches the guard off by name')
    if size > bounds.total > 0 and starting:
        raise SettingsError(f"setting memory.cap: {show_size(size)} is more than the RAM of {show_size(bounds.total)}")
    return min(size, bounds.total or size)


def _raise_metal(command: str) -> str:
    """Return the remedy; MLX reads the limit once for each process, so the engine has to start after the command."""
    return f"raise Metal's limit: {command}, then restart the node"


def _sysctl(wanted: int, total: int) -> str:
    return f"sudo sysctl iogpu.wired_limit_mb={min(wanted, int(total * WIRED_SHARE_MOST)) // MIB}"


def resolve_margin(setting: str | int, cap: int) -> Margin:
    """Give the margin for a cap in bytes; an explicit one is taken as it is. SettingsError when it is no size."""
    if setting == "auto":
        return Margin(default_margin(cap), automatic=True)
    try:
        size = parse_size(setting)
    except ValueError as error:
        raise SettingsError(f"setting memory.margin: {error}") from None
    if size == 0:
        return Margin(0, "memory.margin is 0: a spike that no reading sees can end the process")
    if size >= cap:
        return Margin(size, f"memory.margin leaves nothing of the cap of {show_size(cap)}: no request will ever fit")
    return Margin(size)


def dynamic(phys: int | None, reclaimable: int | None, *, worker: int = 0, lease: int = 0) -> int | None:
    """Give what the process could reach now: its own bytes, what the system can free, and a leased worker's bytes.

    The worker's footprint counts up to its lease, because the lease is taken off the ceiling. None when unreadable.
    """
    if phys is None or reclaimable is None:
        return None
    return phys + reclaimable + min(worker, lease)


def ceiling(cap: Cap, reach: int | None, leases: int = 0) -> Ceiling:
    """Give the ceiling under a cap, `reach` bytes of `dynamic`, and leases held; 1 byte when `reach` is unreadable.

    The binding term is the one that takes most off the cap, and the cap's own when nothing does.
    """
    if reach is None:
        return Ceiling(1, UNREADABLE, "the memory of this machine cannot be read: see the node's log")
    size = max(1, min(cap.bytes, reach) - leases)
    lost = max(0, cap.bytes - reach)
    if leases > 0 and leases >= lost:
        return Ceiling(size, "leases", "wait for the video job that holds the lease, or cancel it")
    if lost:
        return Ceiling(size, "dynamic", f"close other programs on this machine: they hold {show_size(lost)} of the cap")
    return Ceiling(size, cap.bound_by, cap.remedy)


def limits(cap: Cap, margin: Margin, now: Ceiling, *, guard: bool, leases: int = 0) -> Limits:
    """Put the limits in force into the frame that the engine judges by."""
    return Limits(
        cap.bytes, now.bytes, margin.bytes, now.bound_by, guard, leases, margin_auto=margin.automatic
    )  # fmt: skip
