"""Free memory of malloc is returned to the system."""

import subprocess
import sys

import pytest

HEAD = """
import os
from host.heap import map_long_blocks, trim
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = resident()
"""
SHORT = (
    HEAD
    + """
kept = [bytearray(60_000) for _ in range(2000)]
for piece in kept:
    piece[::4096] = bytes(len(piece[::4096]))
held, last = resident() - before, kept.pop()
del kept
trim()
print(held, resident() - before)
"""
)
LONG = (
    HEAD
    + """
map_long_blocks()
del [bytearray(30_000_000) for _ in range(2)][:]
kept = [bytearray(b"a" * 8_000_000) for _ in range(12)]
held, last = resident() - before, kept.pop()
del kept
print(held, resident() - before)
"""
)
READS = (
    HEAD
    + """
import resource
map_long_blocks()
for _ in range(10):
    bytearray(256 * 1024)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(100):
    bytearray(256 * 1024)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
)


def _measure(program: str) -> list[int]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return [int(one) for one in done.stdout.split()]


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only glibc keeps free memory for the next allocation")


def test_trim_returns_what_was_freed_below_a_block_that_stays() -> None:
    held, left = _measure(SHORT)
    assert held > 100_000_000
    assert left < 10_000_000


def test_long_blocks_are_returned_as_they_are_freed() -> None:
    held, left = _measure(LONG)
    assert held > 90_000_000
    assert left < 20_000_000


def test_the_block_of_a_read_is_reused() -> None:
    """uvloop reads TLS records into blocks of 256 KiB. A block from the system costs a page fault for each 4 KiB of
    its use."""
    [faults] = _measure(READS)
    assert faults < 50
