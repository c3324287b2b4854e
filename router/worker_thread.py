"""Run long parsing and encoding in one worker thread, outside the event loop.

There is only one thread, because Python runs one thread at a time, and every further thread would delay the event loop.
Each C call in the thread must be short: a C call keeps the interpreter lock until its end and blocks the event loop.
The limits in `router.admission.request_limits` ensure this for bodies, and `encoded_list` for answers.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import msgspec

T = TypeVar("T")
SLICE_ITEMS = 64
"""List items encoded in one call. 64 tokens with 20 alternatives each take less than 2 ms."""

_thread = ThreadPoolExecutor(1, thread_name_prefix="router-worker")
_encode = msgspec.json.Encoder().encode


async def run_in_worker(work: Callable[[], T]) -> T:
    """Run `work` in the worker thread, and return its result or raise its exception.

    If the caller is cancelled, `work` that has already started still runs to its end.
    """
    return await asyncio.get_running_loop().run_in_executor(_thread, work)


def encoded_list(items: Iterable[object]) -> msgspec.Raw:
    """Encode a JSON list in slices of `SLICE_ITEMS`, because one long encoding call would block the event loop."""
    return msgspec.Raw(b"[" + b",".join(_slices(iter(items))) + b"]")


def _slices(items: Iterator[object]) -> Iterator[bytes]:
    while part := list(islice(items, SLICE_ITEMS)):
        yield _encode(part)[1:-1]
