"""The coordinator's own log: its newest part, added lines, and a file that was started again."""

import asyncio
from pathlib import Path

import pytest

from coordinator.observe import log_reader
from node.agent.fetch import read_chunks
from wire.frames import FetchRequest


async def test_the_newest_bytes_are_read(tmp_path: Path):
    file = tmp_path / "x.log"
    file.write_bytes(b"0123456789" * 20_000)
    for size in (1, 7, 200_000, 10**9):
        found = b"".join([piece async for piece in log_reader.read_log(file, size)])
        assert found == file.read_bytes()[-size:]


async def test_read_log_begins_with_a_whole_line(tmp_path: Path):
    file = tmp_path / "x.log"
    file.write_bytes(b"".join(b'{"number": %d}\n' % number for number in range(100)))
    whole = file.read_bytes()
    for size in (20, 100, 500, len(whole) - 1, len(whole), 10**6):
        found = b"".join([piece async for piece in log_reader.read_log(file, size)])
        assert found
        assert whole.endswith(found)
        assert found.startswith(b"{")
        ask = FetchRequest(1, "logs", -size, 10**6)
        asked = b"".join(answer.payload for answer in read_chunks(ask, file, lines=True))
        assert asked == found


async def test_log_reader_reports_a_missing_file(tmp_path: Path):
    with pytest.raises(OSError, match="none"):
        await anext(log_reader.read_log(tmp_path / "none", 10))


async def test_log_reader_follows_appends_and_restarts_with_a_new_file(tmp_path: Path):
    file = tmp_path / "x.log"
    file.write_bytes(b"old line\n")
    reading = log_reader.read_log(file, 100, interval_seconds=0.01)
    async with asyncio.timeout(30):
        assert await anext(reading) == b"old line\n"
        with file.open("ab") as opened:
            opened.write(b"new\n")
        assert await anext(reading) == b"new\n"
        file.write_bytes(b"again\n")
        assert await anext(reading) == b"again\n"
    await reading.aclose()


async def test_log_reader_reads_a_rotated_file_to_its_end(tmp_path: Path):
    file = tmp_path / "x.log"
    file.write_bytes(b"old\n")
    reading = log_reader.read_log(file, 100, interval_seconds=0.001)
    async with asyncio.timeout(30):
        assert await anext(reading) == b"old\n"
        with file.open("ab") as opened:
            opened.write(b"last before the rotation\n")
        file.rename(tmp_path / "x.log.1")
        assert await anext(reading) == b"last before the rotation\n", "no file has the name during a rotation"
        with (tmp_path / "x.log.1").open("ab") as opened:
            opened.write(b"last\n")
        file.write_bytes(b"a line that is longer than all of the former file together\n")
        assert await anext(reading) == b"last\n"
        assert await anext(reading) == file.read_bytes()
        with file.open("ab") as opened:
            opened.write(b"new\n")
        assert await anext(reading) == b"new\n"
    await reading.aclose()


async def test_a_line_that_begins_with_the_newest_bytes_is_read(tmp_path: Path):
    file = tmp_path / "x.log"
    file.write_bytes(b"".join(b"line %d\n" % number for number in range(9)))
    for size, lines in ((14, b"line 7\nline 8\n"), (13, b"line 8\n"), (7, b"line 8\n")):
        assert b"".join([piece async for piece in log_reader.read_log(file, size)]) == lines
