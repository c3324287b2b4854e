"""The engine's last activity can be read after a crash, from a page in any state."""

import os

from hypothesis import given
from hypothesis import strategies as st

from node.engine.process.crash_recorder import (
    SIZE,
    CrashRecord,
    CrashRecorder,
    create_page,
    parse_slot,
    read_crash_record,
)
from node.engine.process.interface import NativeCallKind


def test_a_call_is_read_from_the_shared_page_and_nothing_after_it_came_back():
    page = create_page()
    recorder = CrashRecorder(page)
    assert read_crash_record(page) is None
    recorder.begin(NativeCallKind.PREFILL, "org/model-4bit", 2**40 + 1)
    assert read_crash_record(page) == CrashRecord(NativeCallKind.PREFILL, 2**40 + 1, "org/model-4bit")
    recorder.begin(NativeCallKind.LOAD, "m")
    assert read_crash_record(page) == CrashRecord(NativeCallKind.LOAD, 0, "m")
    recorder.end()
    assert read_crash_record(page) is None
    os.close(page)


def test_a_page_of_its_own_serves_an_engine_without_viewers():
    recorder = CrashRecorder()
    recorder.begin(NativeCallKind.DECODE, "m" * 300)
    assert recorder.read_running_call() == CrashRecord(NativeCallKind.DECODE, 0, "m" * 200)


@given(st.binary(max_size=300))
def test_no_page_raises(page: bytes):
    last = parse_slot(page.ljust(SIZE, b"\0"))
    assert last is None or last.doing in NativeCallKind
