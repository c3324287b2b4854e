import asyncio
import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.video import file_response
from coordinator.video.file_response import ByteRange, parse_range, send_file
from coordinator.video.state.jobs import StoredFile
from router.errors import Problem
from router.http.exchange import Exchange


@given(st.text(max_size=40) | st.from_regex(r"bytes=\d{0,20}-\d{0,20}", fullmatch=True), st.integers(1, 10**12))
def test_any_range_lies_within_the_file(header: str, size: int):
    found = parse_range(header, size)
    if isinstance(found, Problem):
        assert found.status == 416
    elif found is not None:
        assert 0 <= found.first <= found.last < size


@given(st.integers(1, 1000), st.integers(0, 1100), st.integers(0, 1100))
def test_parse_range_follows_rfc_9110(size: int, first: int, last: int):
    found = parse_range(f"bytes={first}-{last}", size)
    if first > last:
        assert found is None
    elif first >= size:
        assert isinstance(found, Problem)
    else:
        assert found == ByteRange(first, min(last, size - 1))
    tail = parse_range(f"bytes=-{last}", size)
    assert tail == ByteRange(max(0, size - last), size - 1) if last else isinstance(tail, Problem)


def test_a_range_outside_of_the_file_names_its_size():
    for header in ("bytes=5-", "bytes=5-9", "bytes=-0"):
        problem = parse_range(header, 5)
        assert isinstance(problem, Problem)
        assert (problem.status, problem.message) == (416, "the file has 5 bytes")


async def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "video.mp4").symlink_to("secret")
    sent: list[object] = []

    async def receive() -> dict[str, object]:
        return {}

    async def send(message: object) -> None:
        sent.append(message)

    exchange = Exchange({"method": "GET", "path": "/", "headers": []}, receive, send)
    with pytest.raises(OSError, match=r"video\.mp4"):
        await send_file(exchange, tmp_path / "video.mp4", StoredFile("video.mp4", 6, "ab"))
    assert sent == []


async def test_a_client_that_stops_reading_ends_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(file_response, "CHUNK_TIMEOUT_SECONDS", 0.01)
    file = tmp_path / "video.mp4"
    file.write_bytes(b"a clip")

    async def receive() -> dict[str, object]:
        return {}

    async def send(message: MutableMapping[str, object]) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    exchange = Exchange({"method": "GET", "path": "/", "headers": []}, receive, send)
    async with asyncio.timeout(30) as limit:
        with pytest.raises(TimeoutError):
            await send_file(exchange, file, StoredFile(file.name, 6, "ab"))
    assert not limit.expired()


class Answer:
    """An answer with a file of six bytes, to a request with these headers."""

    def __init__(self, method: str = "GET", **headers: bytes) -> None:
        self.sent: list[MutableMapping[str, Any]] = []
        names = [(name.replace("_", "-").encode(), value) for name, value in headers.items()]
        self.exchange = Exchange({"method": method, "path": "/", "headers": names}, self.receive, self.send)

    async def receive(self) -> dict[str, object]:
        return {}

    async def send(self, message: MutableMapping[str, Any]) -> None:
        self.sent.append(message)

    async def send_file(self, folder: Path, content: bytes = b"a clip") -> None:
        (folder / "video.mp4").write_bytes(content)
        await send_file(self.exchange, folder / "video.mp4", StoredFile("video.mp4", 6, "ab" * 32))

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(part.get("body", b"") for part in self.sent[1:])


@pytest.mark.parametrize(
    ("method", "header", "status", "length", "body"),
    [
        ("GET", b"bytes=2-3", 206, b"2", b"cl"),
        ("HEAD", b"bytes=2-3", 200, b"6", b""),
        ("HEAD", b"bytes=9-", 200, b"6", b""),
    ],
)
async def test_only_get_has_ranges(tmp_path: Path, method: str, header: bytes, status: int, length: bytes, body: bytes):
    answer = Answer(method, range=header)
    await answer.send_file(tmp_path)
    assert (answer.sent[0]["status"], answer.headers[b"content-length"], answer.body) == (status, length, body)
    assert answer.headers[b"etag"] == b'"%s"' % (b"ab" * 16)
    assert answer.headers.get(b"content-range") == (b"bytes 2-3/6" if status == 206 else None)
    assert answer.exchange.request_id.encode() in answer.headers.values()


async def test_a_range_outside_of_the_file_is_refused_with_its_size(tmp_path: Path):
    answer = Answer(range=b"bytes=9-")
    await answer.send_file(tmp_path)
    assert (answer.sent[0]["status"], answer.headers[b"content-range"]) == (416, b"bytes */6")


@pytest.mark.parametrize(("tag", "status"), [(b' "%s" ' % (b"ab" * 16), 206), (b'"other"', 200)])
async def test_a_range_of_another_file_is_answered_with_the_complete_file(tmp_path: Path, tag: bytes, status: int):
    answer = Answer(range=b"bytes=2-3", if_range=tag)
    await answer.send_file(tmp_path)
    assert (answer.sent[0]["status"], answer.body) == (status, b"cl" if status == 206 else b"a clip")


async def test_a_file_that_is_shorter_than_its_record_cuts_the_connection(tmp_path: Path):
    answer, before = Answer(), len(os.listdir("/dev/fd"))
    with pytest.raises(OSError, match="the file ends at 2"):
        await answer.send_file(tmp_path, b"a ")
    assert (answer.body, answer.sent[-1]["more_body"]) == (b"a ", True)
    assert len(os.listdir("/dev/fd")) <= before, "the file is closed"
