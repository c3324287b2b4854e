"""Bytes of the engine's memory that MLX keeps wired. Pure; `footprint.WiredLimit` sets them.

Wired memory is never paged out or compressed. Without it, models of 40 GB and more decode 10 to 40 times slower on some
Macs. With it, two streams and frequent allocation inside the wired set end in a kernel panic on other Macs. Only large
weights are therefore wired by default (`memory.wire`), and no short-lived buffers. Sources and reasons:
docs/decisions/0017-the-wired-limit.md.

Two rules always hold. The size never exceeds the device's limit, because MLX would refuse it. The size changes only
with the weights in memory, never with a lease, a request or a reading.
"""

from enum import StrEnum

from wire.units import GIB

MAX_METAL_SHARE = 0.75
"""Share of Metal's limit up to which `auto` does not wire weights. Weights of about this share ran for hours unwired
where the same load ended in a panic when wired."""
MIN_WEIGHT_BYTES = 32 * GIB
"""Bytes of weights below which `auto` does not wire them. Below this size, reports name panics and freezes with wired
models, but no slow unwired model."""


class WireMode(StrEnum):
    """Values of the setting `memory.wire`: whether MLX keeps the memory of weights wired."""

    AUTO = "auto"
    """Only if the weights are large, in bytes and as a share of Metal's limit."""
    ON = "on"
    """Always."""
    OFF = "off"
    """Never."""


def compute_wired_bytes(wire: WireMode, weights: int, active: int, limit: int) -> int:
    """Return the bytes that MLX may keep wired for a set of loaded models; 0: none.

    `weights` are the bytes of the weights of all loaded models. `active` is MLX's active memory now in bytes, `limit`
    Metal's limit in bytes (0: no Metal).

    The result is `active`, at most `limit`, because the active memory is the weights in whole pages. A smaller size
    leaves some weights unwired; a larger one also wires short-lived buffers.
    """
    if wire is WireMode.OFF or not weights or (wire is WireMode.AUTO and not _are_large(weights, limit)):
        return 0
    return min(active, limit)


def _are_large(weights: int, limit: int) -> bool:
    return weights >= MIN_WEIGHT_BYTES and weights > MAX_METAL_SHARE * limit
