"""Make malloc of glibc return free memory to the system."""

import ctypes
import sys
from collections.abc import Callable


def _malloc_trim() -> Callable[[], object]:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    return (lambda: None) if trim is None else (lambda: trim(0))


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Parameters of `mallopt(3)`."""
MMAP_THRESHOLD_BYTES = 512 * 1024
"""Size in bytes from which on malloc maps a block separately, and returns it to the system when it is freed.

By default, glibc raises the limit to the size of the longest block that was freed, and keeps shorter blocks in its
heap. The limit is above 256 KiB, because a read of a TLS connection allocates that much for each record.
"""
TRIM_THRESHOLD_BYTES = 2 * 1024 * 1024
"""Free bytes at the end of the heap above which malloc returns them to the system.

With a limit of only a few reads of a TLS connection, each read would extend the heap and shrink it again.
"""


def map_long_blocks() -> None:
    """Configure malloc of glibc to return freed memory to the system: long blocks, and the free end of the heap.

    The limits are `MMAP_THRESHOLD_BYTES` and `TRIM_THRESHOLD_BYTES`. Call this once, at the start of the process. Do
    nothing on systems without glibc.
    """
    if sys.platform == "linux" and (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        mallopt(_M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


trim = _malloc_trim()
"""Return free pages of glibc's malloc to the system; does nothing elsewhere."""
