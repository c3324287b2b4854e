"""The one thread beside the loop: it parses long bodies and writes long answers.

One thread and not several, because Python runs one at a time anyway, and each more makes the loop wait longer for its
turn. Each call into C that it makes must be short: a call holds the interpreter's lock until it returns, and the loop
with it. The bounds in `router.admission.request_limits` see to that for bodies, and `encoded_list` for answers.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import msgspec

T = TypeVar("T")
SLICE = 64
"""Items of a list that are encoded in one call: 64 tokens with 20 alternatives take less than 2 ms."""

_thread = ThreadPoolExecutor(1, thread_name_prefix="beside")
_encode = msgspec.json.Encoder().encode


async def beside(work: Callable[[], T]) -> T:
    """Run work in the thread beside the loop; return its result."""
    return await asyncio.get_running_loop().run_in_executor(_thread, work)


def encoded_list(items: Iterable[object]) -> msgspec.Raw:
    """Encode a JSON list in slices, so that neither the objects nor the call that encodes them become large."""
    return msgspec.Raw(b"[" + b",".join(_slices(iter(items))) + b"]")


def _slices(items: Iterator[object]) -> Iterator[bytes]:
    while part := list(islice(items, SLICE)):
        yield _encode(part)[1:-1]
