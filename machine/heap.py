"""Keep malloc from holding memory that is free."""

import ctypes
import sys
from collections.abc import Callable


def _malloc_trim() -> Callable[[], object]:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return (lambda: None) if trim is None else (lambda: trim(0))


_M_MMAP_THRESHOLD = -3
"""`mallopt(3)`"""
MAPPED_BYTES = 256 * 1024
"""Blocks of at least this size are mapped separately. By default, glibc raises the limit to the size of the longest
block that was freed, and keeps shorter blocks in its heap."""


def map_long_blocks() -> None:
    """Return long blocks to the system as soon as they are freed, where malloc is glibc's. Call it once, at start."""
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BYTES)


trim = _malloc_trim()
"""Return the free pages of malloc to the system, where malloc is glibc's: it keeps them for the next allocation."""
