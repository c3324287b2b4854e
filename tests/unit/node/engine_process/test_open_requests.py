"""Requests that the engine process has not ended: their frames, and their ends when the process ends."""

import asyncio

import pytest
import structlog

from node.engine.process.crash_recorder import CrashRecord
from node.engine.process.interface import NativeCallKind
from node.engine_process.open_requests import OpenRequests
from wire.codec import WireError, decode, encode
from wire.frames import Admitted, Deltas, Failed, Finished, Frame, Refusal
from wire.refusals import FailureCode, RefusalCode, Refused

CAUSE = "the engine process ended"
REFUSED = Refused(RefusalCode.NOT_READY, "the engine starts")
HEADER_BYTES = 5


class Link:
    """Receiver of frames: each as its tag, the request that is passed with it, and the decoded frame."""

    def __init__(self, *numbers: int) -> None:
        self.frames: list[tuple[int, int, Frame]] = []
        self.requests = OpenRequests(self._receive)
        for number in numbers:
            self.requests.add(number)

    def _receive(self, tag: int, encoded: bytes, request: int) -> None:
        assert int.from_bytes(encoded[:4], "big") == len(encoded) - 4
        assert encoded[4] == tag
        self.frames.append((tag, request, decode(tag, encoded[HEADER_BYTES:])))

    def forward(self, frame: Frame) -> None:
        """Pass a frame as the engine sends it."""
        encoded = encode(frame)
        self.requests.forward_answer(type(frame), encoded[4], encoded[HEADER_BYTES:])


def fail_all(record: CrashRecord | None, *, stopping: bool = False) -> list[FailureCode | str]:
    """Return the codes with which requests 1 and 7 end."""
    link = Link(7, 1)
    link.requests.fail_all(CAUSE, record, stopping=stopping)
    assert (link.requests.numbers, bool(link.requests)) == (frozenset(), False)
    codes: list[FailureCode | str] = []
    for (_, request, frame), number in zip(link.frames, (1, 7), strict=True):
        assert isinstance(frame, Failed)
        assert (request, frame.request, frame.message) == (number, number, CAUSE)
        codes.append(frame.code)
    return codes


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (None, [FailureCode.ENGINE_LOST, FailureCode.ENGINE_LOST]),
        (CrashRecord(NativeCallKind.PREFILL, 7, "m"), [FailureCode.ENGINE_LOST, FailureCode.ENGINE_CRASHED]),
        (CrashRecord(NativeCallKind.DECODE, 7, "m"), [FailureCode.ENGINE_LOST, FailureCode.ENGINE_LOST]),
        (CrashRecord(NativeCallKind.LOAD, 0, "m"), [FailureCode.ENGINE_LOST, FailureCode.ENGINE_LOST]),
    ],
)
def test_only_the_request_of_the_native_call_is_blamed_for_a_crash(
    record: CrashRecord | None, expected: list[FailureCode]
):
    assert fail_all(record) == expected


def test_lost_requests_are_logged_if_there_are_any():
    with structlog.testing.capture_logs() as logs:
        Link().requests.fail_all(CAUSE, None, stopping=False)
        assert logs == []
        Link(7, 2).requests.fail_all(CAUSE, None, stopping=False)
    (entry,) = logs
    assert (entry["event"], entry["requests"], entry["count"]) == ("requests lost", [2, 7], 2)


def test_no_request_is_blamed_when_the_agent_stops():
    record = CrashRecord(NativeCallKind.PREFILL, 7, "m")
    assert fail_all(record, stopping=True) == [FailureCode.NODE_STOPPING, FailureCode.NODE_STOPPING]


@pytest.mark.parametrize("end", [Finished(7, (), 0, 0), Refusal(7, REFUSED), Failed(7, FailureCode.ENGINE_ERROR, "x")])
def test_a_frame_that_ends_a_request_removes_it(end: Frame):
    link = Link(2, 7)
    link.forward(end)
    assert link.requests.numbers == {2}
    assert [(request, frame) for _, request, frame in link.frames] == [(7, end)]


def test_other_frames_are_forwarded_and_remove_no_request():
    link = Link(7)
    admitted, deltas = Admitted(7, 3), Deltas(())
    link.forward(admitted)
    encoded = encode(deltas)
    link.requests.forward_deltas(encoded[4], encoded[HEADER_BYTES:])
    assert [(request, frame) for _, request, frame in link.frames] == [(7, admitted), (0, deltas)]
    assert link.requests.numbers == {7}


def test_a_frame_without_the_number_of_a_request_is_refused():
    with pytest.raises(WireError):
        Link(7).requests.forward_answer(Finished, 1, b"\x90")


def test_cancelled_and_refused_requests():
    link = Link(2, 7)
    link.requests.remove(2)
    link.requests.remove(3)
    assert link.requests.numbers == {7}
    link.requests.refuse(9, REFUSED)
    assert [(request, frame) for _, request, frame in link.frames] == [(9, Refusal(9, REFUSED))]


async def test_a_wait_ends_with_the_next_request_or_after_its_time():
    requests = Link(7).requests
    await asyncio.wait_for(requests.wait_added(0.01), 5)
    waiting = asyncio.ensure_future(requests.wait_added(60))
    await asyncio.sleep(0.01)
    assert not waiting.done(), "a request that was added before does not end the wait"
    requests.add(8)
    await asyncio.wait_for(waiting, 5)
