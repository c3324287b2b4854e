"""Make malloc return free memory to the system."""

import ctypes
import sys
from collections.abc import Callable


def _malloc_trim() -> Callable[[], object]:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return (lambda: None) if trim is None else (lambda: trim(0))


_M_MMAP_THRESHOLD = -3
"""Parameter of `mallopt(3)`."""
MMAP_THRESHOLD_BYTES = 256 * 1024
"""Size in bytes from which a block is mapped separately.

By default glibc raises the limit to the size of the longest block that was freed, and keeps shorter blocks in its heap.
"""


def map_long_blocks() -> None:
    """Configure glibc to return blocks of at least `MMAP_THRESHOLD_BYTES` to the system when they are freed.

    Call once, at start. On systems without glibc, do nothing.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)


trim = _malloc_trim()
"""Return free pages of glibc's malloc to the system; does nothing elsewhere."""
