"""Compute cap, ceiling and margin of a node, and name the term that limits each.

    static  = RAM − reserve of the tier              in a container the RAM is the container's limit
    cap     = min(static, Metal limit)               or memory.cap, which may exceed the Metal limit only with
              memory.allow_above_metal_limit
    dynamic = engine's footprint + reclaimable + min(footprint of the lease's process group, lease)
              each byte counted once
    ceiling = max(1, min(cap, dynamic) − leases)

Invariants
- Cap and ceiling are never 0: a 0 from arithmetic could be taken for "no guard".
- An unknown value never counts as unlimited.
- The limiting term is named, with advice for a person.

All inputs are read at each check. A `memory.cap` above the RAM, or above the Metal limit without permission, is an
error at start. If a limit falls later, or the limit of the container is lower, the lower value applies, with a warning.
"""

import re
from bisect import bisect_left
from dataclasses import dataclass, replace

from host.settings_loader import SettingsError
from wire.capacity.arithmetic import UNREADABLE, compute_default_margin
from wire.frames import MemoryLimits
from wire.units import GIB, MIB, parse_size, show_size


@dataclass(frozen=True, slots=True)
class MemoryTier:
    """Memory that the node leaves to the system and to other programs, for one value of `memory.tier`."""

    reserve: int
    """Bytes of RAM that an automatic cap leaves to the system on a machine with at least `SMALL_MACHINE_BYTES`."""
    active_share: float
    """Share of the active pages that counts as reclaimable, 0 to 1."""


CUSTOM = "custom"
"""Tier of an explicit cap, which needs no reserve.

`compute_reserve` returns 0 for this tier, except on a machine with less RAM than `SMALL_MACHINE_BYTES`.
"""
TIERS = {
    "safe": MemoryTier(12 * GIB, 0.2),
    "balanced": MemoryTier(8 * GIB, 0.5),
    "aggressive": MemoryTier(6 * GIB, 0.8),
    CUSTOM: MemoryTier(0, 0.5),
}
"""Tiers by the value of `memory.tier`."""
SMALL_MACHINE_BYTES = 24 * GIB
"""Bytes of RAM below which every tier has the reserve `SMALL_RESERVE_BYTES`."""
SMALL_RESERVE_BYTES = 4 * GIB
"""Bytes of RAM that every tier leaves to the system on a small machine."""
METAL_SHARES = (
    (8 * GIB, 2 / 3),
    (16 * GIB, 0.74),
    (32 * GIB, 0.78),
    (48 * GIB, 0.78),
    (64 * GIB, 0.81),
    (128 * GIB, 0.84),
    (512 * GIB, 0.75),
)
"""Pairs of a RAM size in bytes and the default Metal limit as a share of that RAM. Sizes between are interpolated.

16 GiB: https://github.com/AlexsJones/llmfit/pull/754, 128: https://github.com/antirez/ds4/pull/893, 32 to 64: the
device line of llama.cpp in public logs of macOS 26 and 27, 8 and 512 (macOS 15):
https://github.com/ollama/ollama/pull/17367. The entry `metal-share` of the macOS checklist compares them with a Mac.
"""
METAL_SHARES_SINCE = 26
"""Major version of macOS from which `METAL_SHARES` applies."""
METAL_SHARE_BEFORE, METAL_SHARE_BEFORE_SMALL, METAL_SMALL = 0.75, 2 / 3, 36 * GIB
"""Default Metal limit before macOS 26: two shares of the RAM, 0 to 1, and a RAM size in bytes.

`METAL_SHARE_BEFORE_SMALL` applies to a RAM of at most `METAL_SMALL` bytes, `METAL_SHARE_BEFORE` to more RAM.

Examples: 10.7 of 16 GiB, 21.3 of 32, 384 of 512.

Sources: https://github.com/ollama/ollama/pull/17367, https://github.com/exo-explore/exo/pull/1672
"""
MAX_WIRED_SHARE = 0.95
"""Maximum share of the RAM for a wired limit that the program advises.

Higher limits caused a crash loop on a machine with 512 GiB.
"""


@dataclass(frozen=True, slots=True)
class MachineBounds:
    """Memory limits of this machine in bytes: inputs of `resolve_cap`."""

    total: int
    """RAM of the machine; 0 if unreadable."""
    metal: int | None = None
    """Metal limit; None without Metal.

    Until the device has reported a limit (`with_device`), this is the limit that a person set, or an estimate.
    """
    container: int | None = None
    """Memory limit of the container; None without one."""
    wired: int | None = None
    """Limit that a person set with `iogpu.wired_limit_mb`; None for the default."""

    @property
    def ram(self) -> int:
        """RAM in bytes that the node can use: the RAM, or the limit of the container if that is less."""
        return self.total if self.container is None else min(self.total, self.container)


@dataclass(frozen=True, slots=True)
class MetalDevice:
    """Metal limit that the engine's device reported."""

    limit: int
    """Metal limit in bytes."""
    wired: int | None = None
    """`MachineBounds.wired` at the time of the report."""


@dataclass(frozen=True, slots=True)
class MemoryCap:
    """Cap: maximum memory of the engine, as the settings and the limits of the machine allow."""

    bytes: int
    """Cap in bytes, at least 1."""
    bound_by: str
    """Name of the limiting term: `setting`, `static` (RAM less the reserve), `metal` or `container`."""
    remedy: str
    """Advice about the limiting term."""
    warning: str = ""
    """Warning about the setting, reported as long as this cap applies; empty for none."""


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Memory that the engine may use now: the cap, less leases and the memory that other programs use."""

    bytes: int
    """Ceiling in bytes, at least 1."""
    bound_by: str
    """Name of the limiting term: `leases`, `dynamic` (other programs), `UNREADABLE`, or that of the cap."""
    remedy: str
    """Advice about the limiting term."""


@dataclass(frozen=True, slots=True)
class Margin:
    """Margin: part of the cap that is kept free for transients that readings do not show."""

    bytes: int
    """Margin in bytes."""
    warning: str = ""
    """Warning about the setting, reported as long as this margin applies; empty for none."""
    automatic: bool = False
    """Whether the margin is the default, which a profile of the loaded models may replace."""


def compute_reserve(tier: str, total: int) -> int:
    """Return the bytes that an automatic cap leaves to the system, for a tier and `total` bytes of RAM.

    Below `SMALL_MACHINE_BYTES` the tier has no effect.
    """
    return SMALL_RESERVE_BYTES if total < SMALL_MACHINE_BYTES else TIERS[tier].reserve


def estimate_metal_limit(total: int, system: str = "") -> int:
    """Return an estimate of the default Metal limit in bytes for `total` bytes of RAM.

    `system` is the name of the system, such as "macOS 15.5". Other texts count as the newest macOS.
    """
    match = re.match(r"macOS (\d+)", system)
    if match is not None and int(match[1]) < METAL_SHARES_SINCE:
        return int(total * (METAL_SHARE_BEFORE_SMALL if total <= METAL_SMALL else METAL_SHARE_BEFORE))
    sizes = [size for size, _ in METAL_SHARES]
    place = bisect_left(sizes, total)
    if place in (0, len(sizes)):
        return int(total * METAL_SHARES[min(place, len(sizes) - 1)][1])
    (below, low), (above, high) = METAL_SHARES[place - 1 : place + 1]
    return int(total * (low + (high - low) * (total - below) / (above - below)))


def with_device(bounds: MachineBounds, device: MetalDevice | None) -> MachineBounds:
    """Return the bounds with the Metal limit that the device reported; unchanged without a device or Metal.

    The limit of the device follows `iogpu.wired_limit_mb`, but MLX reads the limit only once in each process. A lower
    value of `iogpu.wired_limit_mb` therefore applies immediately, a higher value after the next start of the engine.
    """
    if device is None or bounds.metal is None:
        return bounds
    default = bounds.wired is None and device.wired is None
    return replace(bounds, metal=device.limit if default else min(device.limit, bounds.metal))


def compute_safe_wired_limit(tier: str, total: int) -> int:
    """Return the highest wired limit in bytes that leaves the reserve of the tier and 5 % of the RAM to the system.

    `total` is the RAM in bytes. Return 0 if the reserve exceeds the RAM.
    """
    return max(0, min(total - compute_reserve(tier, total), int(total * MAX_WIRED_SHARE)))


def resolve_cap(
    setting: str | int, tier: str, bounds: MachineBounds, *, above_metal: bool = False, starting: bool = True
) -> MemoryCap:
    """Return the cap for the values of `memory.cap` (`setting`) and `memory.tier`.

    `above_metal` is `memory.allow_above_metal_limit`. Raise `SettingsError` for an invalid size, a cap of 0, and for
    "auto" or a percentage if the RAM cannot be read. With `starting`, also raise `SettingsError` for an explicit cap
    above the RAM, or above the Metal limit without `above_metal`. Later, the lower limit applies. A lower limit of the
    container replaces an explicit cap, with a warning.
    """
    relative = setting == "auto" or str(setting).strip().endswith("%")
    if not bounds.total and relative:
        raise SettingsError(
            f"setting memory.cap: the RAM of this machine cannot be read to resolve {setting}: "
            'set a size such as "24GiB"'
        )
    if setting == "auto":
        return _compute_automatic_cap(tier, bounds)
    size = _parse_explicit_cap(setting, bounds, starting=starting)
    metal_first = bounds.metal is not None and not above_metal and bounds.metal < (bounds.container or 0)
    if bounds.container is not None and size > bounds.container and not metal_first:
        return MemoryCap(
            max(1, bounds.container),
            "container",
            _CONTAINER,
            (
                f"memory.cap is {show_size(size)}, the container's limit {show_size(bounds.container)}: the lower "
                "value is used"
            ),
        )
    return _limit_by_metal(setting, size, bounds, above_metal=above_metal, starting=starting)


_RAISE_CAP = "raise memory.cap"
_CONTAINER = "raise the memory limit of the container that the node runs in"


def _limit_by_metal(
    setting: str | int, size: int, bounds: MachineBounds, *, above_metal: bool, starting: bool
) -> MemoryCap:
    metal = bounds.metal
    if metal is None or size <= metal:
        warning = "" if bounds.total else "the RAM cannot be read: memory.cap is used without a check"
        return MemoryCap(size, "setting", _RAISE_CAP, warning)
    if above_metal:
        warning = (
            f"the cap of {show_size(size)} is above the Metal limit of {show_size(metal)} "
            "(memory.allow_above_metal_limit)"
        )
        return MemoryCap(size, "setting", _RAISE_CAP, warning)
    raising = _build_sysctl_command(size, bounds.total)
    if starting:
        raise SettingsError(
            f"setting memory.cap: {setting} is {show_size(size)}, above the Metal limit of {show_size(metal)}: lower "
            f"it, raise the limit ({raising}), or set memory.allow_above_metal_limit = true at your own risk"
        )
    warning = f"memory.cap is {show_size(size)}, above the Metal limit of {show_size(metal)}: the lower value is used"
    return MemoryCap(max(1, metal), "metal", _advise_raising_metal(raising), warning)


def _compute_automatic_cap(tier: str, bounds: MachineBounds) -> MemoryCap:
    static, metal = max(1, bounds.ram - compute_reserve(tier, bounds.ram)), bounds.metal
    if metal is not None and metal < static:
        return MemoryCap(max(1, metal), "metal", _advise_raising_metal(_build_sysctl_command(static, bounds.total)))
    if bounds.ram < bounds.total:
        return MemoryCap(static, "container", _CONTAINER)
    return MemoryCap(static, "static", "choose a memory.tier with a smaller reserve, or set memory.cap")


def _parse_explicit_cap(setting: str | int, bounds: MachineBounds, *, starting: bool) -> int:
    try:
        size = parse_size(setting, total=bounds.ram)
    except ValueError as error:
        raise SettingsError(f"setting memory.cap: {error}") from None
    if size == 0:
        raise SettingsError(
            'setting memory.cap: the cap cannot be 0: to switch the guard off, set memory.guard = "off"'
        )
    if size > bounds.total > 0 and starting:
        raise SettingsError(f"setting memory.cap: {show_size(size)} is more than the RAM of {show_size(bounds.total)}")
    return min(size, bounds.total or size)


def _advise_raising_metal(command: str) -> str:
    """Return the advice. The engine has to restart, because MLX reads the limit once for each process."""
    return f"raise the Metal limit with {command}, then restart the node"


def _build_sysctl_command(wanted: int, total: int) -> str:
    return f"sudo sysctl iogpu.wired_limit_mb={min(wanted, int(total * MAX_WIRED_SHARE)) // MIB}"


def resolve_margin(setting: str | int, cap: int) -> Margin:
    """Return the margin for a value of `memory.margin` and a cap in bytes.

    The result has a warning for a margin of 0, or of at least the cap. Raise `SettingsError` for an invalid size.
    """
    if setting == "auto":
        return Margin(compute_default_margin(cap), automatic=True)
    try:
        size = parse_size(setting)
    except ValueError as error:
        raise SettingsError(f"setting memory.margin: {error}") from None
    if size == 0:
        return Margin(0, "memory.margin is 0: a short memory peak can end the process")
    if size >= cap:
        return Margin(size, f"memory.margin is as large as the cap of {show_size(cap)}: no request will fit")
    return Margin(size)


def compute_reach(phys: int | None, reclaimable: int | None, *, worker: int = 0, lease: int = 0) -> int | None:
    """Return the bytes that the engine could use now; None if `phys` or `reclaimable` is None.

    All arguments are bytes. The result is the sum of the engine's footprint (`phys`), the memory that the system can
    free (`reclaimable`), and `worker`. That is the footprint of the process group that uses the lease; it counts up to
    `lease`, because `compute_ceiling` subtracts the lease.
    """
    if phys is None or reclaimable is None:
        return None
    return phys + reclaimable + min(worker, lease)


def compute_ceiling(cap: MemoryCap, reach: int | None, leases: int = 0) -> Ceiling:
    """Return the bytes that the engine may use now, at least 1, with the term that limits them and a remedy.

    `reach` is the result of `compute_reach`: the bytes that the engine could use on this machine. `leases` are the
    leased bytes. The limiting term is the larger reduction of the cap, by leases or by other programs; on a tie, the
    leases. Without a reduction, it is the term that limits the cap. If `reach` is None, the ceiling is 1 byte and the
    term is `UNREADABLE`.
    """
    if reach is None:
        return Ceiling(1, UNREADABLE, "the memory of this machine cannot be read: see the log of the node")
    size = max(1, min(cap.bytes, reach) - leases)
    lost = max(0, cap.bytes - reach)
    if leases > 0 and leases >= lost:
        return Ceiling(size, "leases", "wait for the video job or the quantization that holds the lease, or cancel it")
    if lost:
        return Ceiling(size, "dynamic", f"close other programs on this machine: they use {show_size(lost)} of the cap")
    return Ceiling(size, cap.bound_by, cap.remedy)


def build_limits(cap: MemoryCap, margin: Margin, now: Ceiling, *, guard: bool, leases: int = 0) -> MemoryLimits:
    """Return the limits as a frame for the engine, without a sequence number.

    `now` is the ceiling in force. `guard` is whether requests are refused for lack of memory. `leases` are the leased
    bytes.
    """
    return MemoryLimits(cap.bytes, now.bytes, margin.bytes, now.bound_by, guard, leases, margin_auto=margin.automatic)
