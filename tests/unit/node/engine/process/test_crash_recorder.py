"""The engine's last activity can be read after a crash, from a page in any state."""

import os
import threading

from hypothesis import given
from hypothesis import strategies as st

from node.engine.process.crash_recorder import (
    SIZE,
    SLOTS,
    CrashRecord,
    CrashRecorder,
    create_page,
    parse_slot,
    read_crash_record,
)
from node.engine.process.interface import NativeCallKind
from wire.identity import is_valid_model


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
    recorder.begin(NativeCallKind.DECODE, "m" * 900)
    assert recorder.read_running_call() == CrashRecord(NativeCallKind.DECODE, 0, "m" * 800)


def test_a_crash_is_of_the_running_call_and_a_hang_of_the_oldest_one():
    page = create_page()
    recorder = CrashRecorder(page)
    with recorder.record_tokenization("older", 1):
        recorder.begin(NativeCallKind.PREFILL, "newer", 2)
        last = [read_crash_record(page, hung=hung) for hung in (False, True)]
        assert [record and record.request for record in last] == [2, 1]
        recorder.end()
        last = read_crash_record(page)
        assert last == CrashRecord(NativeCallKind.READ, 1, "older"), "no call runs, so that the tokenization crashed"
    os.close(page)


def test_the_longest_name_of_a_model_is_recorded_whole_in_every_slot():
    longest = "\U00020000" * 200
    assert is_valid_model(longest)
    page, started, done = create_page(), threading.Barrier(SLOTS), threading.Event()
    recorder = CrashRecorder(page)

    def tokenize(number: int) -> None:
        with recorder.record_tokenization(longest, number):
            started.wait()
            done.wait()

    threads = [threading.Thread(target=tokenize, args=(number,)) for number in range(1, SLOTS)]
    for thread in threads:
        thread.start()
    started.wait()
    recorder.begin(NativeCallKind.PREFILL, longest, SLOTS)
    slots = [parse_slot(os.pread(page, SIZE, 0), slot) for slot in range(SLOTS)]
    done.set()
    for thread in threads:
        thread.join()
    assert {(slot.request, slot.model) for slot in slots if slot} == {(n, longest) for n in range(1, SLOTS + 1)}
    os.close(page)


@given(st.binary(max_size=300))
def test_no_page_raises(page: bytes):
    last = parse_slot(page.ljust(SIZE, b"\0"))
    assert last is None or last.doing in NativeCallKind
