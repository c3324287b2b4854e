"""Answers to fetch requests: which object, in which chunks, and where a window begins and ends."""

import asyncio
import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from node.agent import fetch
from node.agent.connection import CoordinatorLink
from node.agent.fetch import ANSWER_CHUNK_BYTES, FetchAnswers, read_chunks
from node.video.lease_rules import LeaseLedger, LeaseRecord
from tests.support.video.studio import Node
from tests.unit.node.agent.test_links import Transport
from wire.frames import EngineReport, FetchChunk, FetchRequest, LeaseEnded
from wire.histogram import GateMeasures, HistogramSnapshot, NodeMeasures
from wire.report import Memory
from wire.video import Artifact


class Reader:
    """A node's answers on a real link: `log` is the node's log, `read` returns the answer to a request."""

    def __init__(self, folder: Path) -> None:
        self.node = Node(folder, {"engine.kind": "scripted"})
        self.log = folder / "node.log"
        self.answers = FetchAnswers(self.log, self.node.supervisor, self.node.lender)
        self.link = CoordinatorLink("host:1", "cluster", lambda *frame: None, lambda *end: None)
        self.transport = Transport()
        self.link.connection_made(self.transport)  # pyright: ignore[reportArgumentType]

    async def read(self, source: str, offset: int = 0, limit: int = 1000) -> tuple[bytes, FetchChunk]:
        """Return the bytes of an answer and its last chunk."""
        self.transport.frames.clear()
        self.answers.answer(self.link, FetchRequest(7, source, offset, limit))
        async with asyncio.timeout(10):
            while not (self.transport.frames and is_last(self.transport.frames[-1])):
                self.transport.changed.clear()
                await self.transport.changed.wait()
        chunks = [frame for frame in self.transport.frames if isinstance(frame, FetchChunk)]
        assert {chunk.number for chunk in chunks} == {7}
        assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        return b"".join(chunk.payload for chunk in chunks), chunks[-1]


def is_last(frame: object) -> bool:
    return isinstance(frame, FetchChunk) and frame.last


async def test_a_log_is_read_in_windows_of_which_negative_ones_begin_with_a_line(tmp_path: Path) -> None:
    reader = Reader(tmp_path / "node")
    reader.log.write_bytes(b"first\nsecond\nthird\n")
    content, last = await reader.read("logs", -8)
    assert (content, last.end, last.next, last.error) == (b"third\n", 19, 0, "")
    content, last = await reader.read("logs", 0, 7)
    assert (content, last.end, last.next) == (b"first\ns", 7, 7)
    reader.log.unlink()
    content, last = await reader.read("logs")
    assert (content, "No such file" in last.error) == (b"", True)


async def test_measures_are_those_of_the_engine_and_of_this_process(tmp_path: Path) -> None:
    reader, began = Reader(tmp_path / "node"), time.process_time()
    content, last = await reader.read("metrics")
    measures = msgspec.msgpack.decode(content, type=NodeMeasures)
    assert (last.last, last.error, measures.gate) == (True, "", GateMeasures())
    assert measures.agent_phys > 2**20
    assert began <= measures.agent_cpu <= time.process_time()
    gate = GateMeasures((("prefill", 3),), (("no_headroom", 1),), HistogramSnapshot((1, 2), 0.5))
    reader.node.supervisor.reports.store(EngineReport(Memory(), (), 0, 0, measures=gate), 1.0)
    content, _ = await reader.read("metrics")
    assert msgspec.msgpack.decode(content, type=NodeMeasures).gate == gate


async def test_artifacts_are_those_of_ended_leases_and_all_else_is_an_error(tmp_path: Path) -> None:
    clip = b"\n" * 3 + b"clip" * 1000
    leases = tmp_path / "node" / "node" / "video" / "leases"
    (leases / "l-1.1" / "out").mkdir(parents=True)
    (leases / "l-1.1" / "out" / "video.mp4").write_bytes(clip)
    artifact = Artifact("video.mp4", len(clip), hashlib.sha256(clip).digest())
    ended = LeaseEnded("l-1", 1, "completed", artifacts=(artifact,))
    record = LeaseRecord(lease="l-1", generation=1, job="video_l-1", model="wan", size=1, ended=ended)
    (leases / "leases.json").write_bytes(msgspec.json.encode(LeaseLedger().put(record)))
    reader = Reader(tmp_path / "node")
    await reader.node.lender.start()
    content, last = await reader.read("artifact:l-1/video.mp4", 0, 10_000)
    assert (content, last.end, last.next) == (clip, len(clip), 0)
    content, _ = await reader.read("artifact:l-1/video.mp4", -5)
    assert content == b"pclip", "the window of an artifact does not begin with a line"
    for source in ("artifact:l-1/events.jsonl", "artifact:l-2/video.mp4", "l-1/video.mp4", "log", ""):
        content, last = await reader.read(source)
        assert (content, last.error) == (b"", f"this node cannot provide {source!r}")


def read_window(file: Path, offset: int, limit: int, *, lines: bool) -> tuple[bytes, FetchChunk]:
    *chunks, last = read_chunks(FetchRequest(1, "logs", offset, limit), file, lines=lines)
    assert last.last
    assert not any(chunk.last or chunk.next or chunk.end for chunk in chunks)
    return b"".join(chunk.payload for chunk in chunks), last


LOG = b"one\ntwo\nthree\n"


@pytest.mark.parametrize(
    ("offset", "content"),
    [
        (-1, b"\n"),
        (-5, b"hree\n"),
        (-6, b"three\n"),
        (-7, b"three\n"),
        (-9, b"three\n"),
        (-10, b"two\nthree\n"),
        (-12, b"two\nthree\n"),
        (-13, b"two\nthree\n"),
        (-14, LOG),
        (-15, LOG),
        (-1000, LOG),
        (0, LOG),
        (1, LOG[1:]),
        (13, b"\n"),
        (14, b""),
        (15, LOG),
    ],
)
def test_a_window_of_a_log_begins_at_its_offset_or_the_next_line(tmp_path: Path, offset: int, content: bytes) -> None:
    file = tmp_path / "node.log"
    file.write_bytes(LOG)
    found, last = read_window(file, offset, 1000, lines=True)
    assert (found, last.end, last.next) == (content, 14, 0)
    plain, last = read_window(file, offset, 1000, lines=False)
    assert (plain, last.end) == (LOG[max(-14, offset) :] if offset != 15 else LOG, 14)


def test_a_window_of_a_file_of_one_long_line_begins_at_its_offset(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "MAX_LINE_BYTES", 4)
    file = tmp_path / "node.log"
    file.write_bytes(b"0123456789\nab\ncd\n")
    assert read_window(file, -16, 1000, lines=True)[0] == b"123456789\nab\ncd\n"
    assert read_window(file, -9, 1000, lines=True)[0] == b"ab\ncd\n", "the next line begins within the limit"
    assert read_window(file, -10, 1000, lines=True)[0] == b"789\nab\ncd\n"


def test_a_window_is_read_in_chunks_up_to_its_limit(tmp_path: Path) -> None:
    file = tmp_path / "clip"
    content = bytes(range(256)) * 400
    file.write_bytes(content)
    limit = 2 * ANSWER_CHUNK_BYTES + 1
    chunks = list(read_chunks(FetchRequest(1, "artifact:a/b", 3, limit), file))
    assert [len(chunk.payload) for chunk in chunks] == [ANSWER_CHUNK_BYTES, ANSWER_CHUNK_BYTES, 1, 0]
    assert b"".join(chunk.payload for chunk in chunks) == content[3 : 3 + limit]
    assert (chunks[-1].next, chunks[-1].end) == (3 + limit, 3 + limit)
    (only,) = read_chunks(FetchRequest(1, "artifact:a/b", 3, 0), file)
    assert (only.payload, only.last, only.next, only.end) == (b"", True, 3, 3)


def test_only_a_log_continues_in_its_rotated_file(tmp_path: Path) -> None:
    file = tmp_path / "node.log"
    file.write_bytes(b"new\n")
    (tmp_path / "node.log.1").write_bytes(LOG)
    assert read_window(file, 8, 1000, lines=True)[0] == b"three\n"
    assert read_window(file, 8, 1000, lines=False)[0] == b"new\n"
    assert read_window(file, 4, 1000, lines=True)[0] == b"", "the offset is the end of the new log"
    assert read_window(file, 15, 1000, lines=True)[0] == b"new\n", "the rotated file is shorter"


def test_a_file_that_shrinks_while_it_is_sent_ends_its_window(tmp_path: Path) -> None:
    file = tmp_path / "clip"
    file.write_bytes(b"x" * (3 * ANSWER_CHUNK_BYTES))
    chunks: Iterator[FetchChunk] = read_chunks(FetchRequest(1, "artifact:a/b", 0, 10**9), file)
    assert len(next(chunks).payload) == ANSWER_CHUNK_BYTES
    with file.open("r+b") as shorter:
        shorter.truncate(ANSWER_CHUNK_BYTES)
    (last,) = chunks
    assert (last.payload, last.last, last.error) == (b"", True, "")


def window(file: Path, offset: int, limit: int = 1000) -> tuple[bytes, int, int]:
    *answers, last = read_chunks(FetchRequest(1, "logs", offset, limit), file, lines=True)
    return b"".join(piece.payload for piece in answers), last.next, last.end


def test_a_log_is_followed_from_where_the_last_window_ended(tmp_path: Path):
    file = tmp_path / "node.log"
    file.write_bytes(b"one\ntwo\n")
    assert window(file, -4) == (b"two\n", 0, 8)
    assert window(file, 8) == (b"", 0, 8)
    with file.open("ab") as more:
        more.write(b"three\n")
    assert window(file, 8) == (b"three\n", 0, 14)
    assert window(file, 8, 2) == (b"th", 10, 10)
    assert window(file, 1) == (b"ne\ntwo\nthree\n", 0, 14), "the offset of a reader is exact"


def test_a_truncated_file_is_read_from_its_beginning(tmp_path: Path):
    file = tmp_path / "node.log"
    file.write_bytes(b"new\n")
    assert window(file, 500) == (b"new\n", 0, 4)


def test_the_rest_of_a_rotated_file_precedes_the_new_file(tmp_path: Path):
    file = tmp_path / "node.log"
    file.write_bytes(b"one\ntwo\nthree\n")
    file.rename(tmp_path / "node.log.1")
    assert window(file, 4) == (b"two\nthree\n", 0, 0), "no file has the name during a rotation"
    file.write_bytes(b"new\n")
    assert window(file, 8, 2) == (b"th", 10, 10)
    assert window(file, 10) == (b"ree\n", 0, 0)
    assert window(file, 14) == (b"", 0, 0)
    assert window(file, 0) == (b"new\n", 0, 4)


def test_a_missing_log_is_an_error(tmp_path: Path):
    (answer,) = read_chunks(FetchRequest(1, "logs", -10, 10), tmp_path / "none")
    assert answer.last
    assert answer.error
