"""Words and missing fields of frames: peers of other versions compare the words, and older peers send fewer fields."""

from enum import StrEnum

import pytest
from msgspec import msgpack

from wire.bounds import MAX_BLOB_BYTES, MAX_ITEMS, MAX_SIZE_BYTES
from wire.codec import TAG_OF, WireError, decode, encode
from wire.frames import (
    Denied,
    FetchChunk,
    FetchRequest,
    Frame,
    GoodbyeReason,
    Hello,
    LeaseEnded,
    LeaseRefused,
    LeaseRequest,
    PauseNode,
    Report,
)
from wire.report import EngineState, Hardware, Memory
from wire.video import Artifact, LeaseEndCode, LeaseRefusalCode, ReleaseCause, VideoPackage, VideoState

HARDWARE = Hardware("M4", 64, 8, "macOS", "3.12")
ENDS = (
    "completed memory_lease_exceeded worker_stalled job_timeout monitor_failed worker_crashed worker_lost start_failed "
    "output_invalid generation_failed model_invalid disk_full node_paused node_stopping"
)
REFUSALS = (
    "lease_held lease_superseded lease_too_large guard_off video_not_ready engine_silent disk_full node_paused "
    "node_stopping"
)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (GoodbyeReason, "stopping asleep leave"),
        (LeaseEndCode, ENDS),
        (LeaseRefusalCode, REFUSALS),
        (ReleaseCause, "acknowledged cancelled superseded lease_timeout start_timeout"),
    ],
)
def test_the_words_of_a_released_protocol_do_not_change(kind: type[StrEnum], words: str) -> None:
    assert set(words.split()) <= set(kind), "peers of other versions compare the word"


def test_fields_that_an_older_peer_does_not_send_have_the_meaning_of_its_version() -> None:
    report = decode(TAG_OF[Report], msgpack.encode([1, Memory(), EngineState()]))
    assert isinstance(report, Report)
    assert (report.draining, report.video.allowed, report.acked_seq, report.ping) == (False, None, 0, 0)
    denied = decode(TAG_OF[Denied], msgpack.encode(["busy", "later"]))
    assert denied == Denied("busy", "later", final=False, retry_after=0.0)
    package = msgpack.decode(msgpack.encode(["wan"]), type=VideoPackage)
    assert (package.experts, package.token_side, package.token_frames) == (1, 16, 4)
    assert (package.fps, package.steps, package.frames) == (16, 40, 81)
    assert VideoState().ready is False


@pytest.mark.parametrize(
    "frame",
    [
        FetchRequest(1, "logs", offset=-1),
        PauseNode(None),
        LeaseRefused("l", 1, "code", "text", need=-1, headroom=-1),
        Hello(1, "n", "name", "i", "m", "1", HARDWARE, generation=2**60),
    ],
)
def test_numbers_below_zero_and_unknown_and_very_large_ones_are_sent_where_they_have_a_meaning(frame: Frame) -> None:
    encoded = encode(frame)
    assert decode(encoded[4], encoded[5:]) == frame


@pytest.mark.parametrize(
    "frame",
    [
        LeaseRequest("l", 1, "j", "m", -1, b""),
        LeaseRequest("l", 1, "j", "m", MAX_SIZE_BYTES + 1, b""),
        FetchChunk(1, bytes(MAX_BLOB_BYTES + 1)),
        LeaseEnded("l", 1, "completed", made=bytes(MAX_BLOB_BYTES + 1)),
        LeaseEnded("l", 1, "completed", artifacts=(Artifact("a", 1, b""),) * (MAX_ITEMS + 1)),
        Hello(1, "n", "name", "i", "m", "1", HARDWARE, frames=(1,) * (MAX_ITEMS + 1)),
    ],
)
def test_a_node_or_coordinator_cannot_send_more_than_the_bounds(frame: Frame) -> None:
    body = msgpack.encode(frame)
    with pytest.raises(WireError, match=f"bad {type(frame).__name__}"):
        decode(TAG_OF[type(frame)], body)
