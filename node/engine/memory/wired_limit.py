"""How much of the engine's memory MLX keeps wired. Pure; `footprint.Wiring` does it.

Wired memory is never paged out or compressed. Without it models of 40 GB and more decode 10 to 40 times slower on some
Macs; with it, two streams and a churn of buffers inside the wired set end in a kernel panic on others. So only large
weights are wired, and nothing that comes and goes: sources and reasons are in docs/decisions/0017-the-wired-limit.md.

Rules that nobody may break: never above the device's limit, which MLX refuses; the size changes with the set of loaded
models alone, never with a lease, a request or a reading.
"""

from enum import StrEnum

from wire.units import GIB

SHARE = 0.75
"""Of Metal's limit: weights of about this share ran for hours unwired where the same load, wired, ended in a panic."""
LEAST = 32 * GIB
"""Bytes of weights below which no slow unwired model is reported, and panics and freezes of wired ones are."""


class Wire(StrEnum):
    """`memory.wire`."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


def wired_bytes(wire: Wire, weights: int, active: int, limit: int) -> int:
    """Return the bytes that MLX may keep wired for a set of loaded models; 0: none.

    `weights` are those of all loaded models, `active` what MLX counts at this moment, `limit` Metal's (0: no Metal).
    `active` is the weights in whole pages. A smaller size leaves some of them out; a larger one lets in buffers that
    come and go.
    """
    if wire is Wire.OFF or not weights or (wire is Wire.AUTO and not _large(weights, limit)):
        return 0
    return min(active, limit)


def _large(weights: int, limit: int) -> bool:
    return weights >= LEAST and weights > SHARE * limit
