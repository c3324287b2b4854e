"""Parse and format sizes ("96GiB" for people, `int` bytes in code), and format counts with their nouns."""

import re
from decimal import Decimal

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]*|%)\s*$", re.IGNORECASE)
_FACTOR = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1024 * GIB,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}


def parse_size(text: str | int, *, total: int | None = None) -> int:
    """Parse a size and return bytes: `96GiB` (1024³), `12GB` (10⁹), `80%` of `total` bytes, or a number of bytes.

    Raise ValueError for other texts, negative numbers, and a percentage without `total` or above 100 %.
    """
    if isinstance(text, int):
        if text < 0:
            raise ValueError(f"a size cannot be negative: {text}")
        return text
    match = _SIZE.match(text)
    unit = match[2].lower() if match else None
    if match is None or (unit not in _FACTOR and unit != "%"):
        raise ValueError(f'{text!r} is not a size: write "96GiB", "12GB", "80%" or a number of bytes')
    if unit != "%":
        return int(Decimal(match[1]) * _FACTOR[unit])
    if total is None or float(match[1]) > 100:
        raise ValueError(f"{text!r}: a percentage must be at most 100 %, and this setting needs a known total")
    return int(total * float(match[1]) / 100)


def show_size(size: int | None) -> str:
    """Format bytes in GiB, MiB or KiB with one decimal; `-` for None."""
    if size is None:
        return "-"
    if abs(size) >= GIB:
        return f"{size / GIB:.1f} GiB"
    return f"{size / MIB:.1f} MiB" if abs(size) >= MIB or size == 0 else f"{size / KIB:.1f} KiB"


def show_count(count: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun, such as `1 node` or `2 nodes`. An empty `plural` means that of `noun` adds an s."""
    return f"{count} {noun}" if count == 1 else f"{count} {plural or noun + 's'}"
