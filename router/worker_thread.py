"""Worker thread next to the event loop: parses long bodies and encodes long answers.

There is one thread and not several, because Python runs one thread at a time. Each additional thread would make the
event loop wait longer. Each C call of the thread must be short: it holds the interpreter's lock until it returns, and
blocks the loop. The limits in `router.admission.request_limits` ensure that for bodies, and `encoded_list` for answers.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import msgspec

T = TypeVar("T")
SLICE_ITEMS = 64
"""Items of a list that are encoded in one call: 64 tokens with 20 alternatives take less than 2 ms."""

_thread = ThreadPoolExecutor(1, thread_name_prefix="router-worker")
_encode = msgspec.json.Encoder().encode


async def run_in_worker(work: Callable[[], T]) -> T:
    """Run `work` in the worker thread. Return its result, or raise its exception.

    Work that has begun continues if the caller is cancelled.
    """
    return await asyncio.get_running_loop().run_in_executor(_thread, work)


def encoded_list(items: Iterable[object]) -> msgspec.Raw:
    """Encode a JSON list in slices, because one long encoding call would block the event loop."""
    return msgspec.Raw(b"[" + b",".join(_slices(iter(items))) + b"]")


def _slices(items: Iterator[object]) -> Iterator[bytes]:
    while part := list(islice(items, SLICE_ITEMS)):
        yield _encode(part)[1:-1]
