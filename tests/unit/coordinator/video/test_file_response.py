import asyncio
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


@pytest.mark.parametrize(
    ("method", "header", "status", "length", "body"),
    [
        ("GET", b"bytes=2-3", 206, b"2", b"cl"),
        ("GET", b"bytes=9-", 416, None, None),
        ("HEAD", b"bytes=2-3", 200, b"6", b""),
        ("HEAD", b"bytes=9-", 200, b"6", b""),
    ],
)
async def test_only_get_has_ranges(
    tmp_path: Path, method: str, header: bytes, status: int, length: bytes | None, body: bytes | None
):
    file = tmp_path / "video.mp4"
    file.write_bytes(b"a clip")
    sent: list[MutableMapping[str, Any]] = []

    async def receive() -> dict[str, object]:
        return {}

    async def send(message: MutableMapping[str, object]) -> None:
        sent.append(message)

    exchange = Exchange({"method": method, "path": "/", "headers": [(b"range", header)]}, receive, send)
    await send_file(exchange, file, StoredFile(file.name, 6, "ab"))
    assert sent[0]["status"] == status
    if length is not None:
        assert dict(sent[0]["headers"])[b"content-length"] == length
        assert b"".join(part.get("body", b"") for part in sent[1:]) == body
