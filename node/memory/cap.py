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

from dataclasses import dataclass

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
METAL_SHARE = 0.75
METAL_SHARE_SMALL, METAL_SMALL = 2 / 3, 36 * GIB
"""Metal's own wired limit as a share of the RAM, where nobody set one; machines up to the size at the end have less.
Unverified on macOS: the entry `metal-share` of the checklist shows it."""
WIRED_SHARE_MOST = 0.95
"""A wired limit above this share ended in a crash loop on a 512 GiB machine."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What this machine sets a cap, in bytes: RAM (0: unreadable), Metal's wired limit (None: no Metal, as on Linux),
    and the limit of the container that we are in (None: none)."""

    total: int
    metal: int | None = None
    container: int | None = None

    @property
    def ram(self) -> int:
        """The RAM that is ours to divide."""
        return self.total if self.container is None else min(self.total, self.container)


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


def default_metal(total: int) -> int:
    """Give Metal's wired limit in bytes for a machine where nobody set one."""
    return int(total * (METAL_SHARE_SMALL if total <= METAL_SMALL else METAL_SHARE))


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
    warning = f"memory.cap is {show_size(size)}, and the Metal limit fell to {show_size(metal)}: the lower counts"
    return Cap(max(1, metal), "metal", f"raise Metal's limit: {raising}", warning)


def _automatic_cap(tier: str, bounds: Bounds) -> Cap:
    static, metal = max(1, bounds.ram - reserve(tier, bounds.ram)), bounds.metal
    if metal is not None and metal < static:
        return Cap(max(1, metal), "metal", f"raise Metal's limit: {_sysctl(static, bounds.total)}")
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
