import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from machine.journal import hide_warnings, open_journal, shorten, terminal_line


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Give logging back as it was."""
    root, before = logging.getLogger(), structlog.get_config()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.configure(**before)


@pytest.mark.usefixtures("own_logging")
def test_an_event_is_heard_and_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    heard: list[Any] = []
    open_journal(tmp_path / "x.log", "info", heard.append)
    structlog.get_logger("coordinator.test").warning("node gone", node="a", reason="stopped")
    assert [event["event"] for event in heard] == ["node gone"]
    (line,) = (tmp_path / "x.log").read_text().splitlines()
    assert json.loads(line)["reason"] == "stopped"
    assert capsys.readouterr().err.count("node gone") == 1


@pytest.mark.usefixtures("own_logging")
def test_an_orderly_stop_shows_errors_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    open_journal(tmp_path / "x.log", "info")
    hide_warnings()
    log = structlog.get_logger("coordinator.test")
    log.warning("node gone")
    log.error("disk full")
    assert "node gone" in (tmp_path / "x.log").read_text()
    shown = capsys.readouterr().err
    assert "disk full" in shown
    assert "node gone" not in shown


def test_a_line_for_a_terminal_is_short_and_harmless():
    event = {"timestamp": "2026-11-23T03:37:02.885116Z", "level": "warning", "logger": "coordinator.registry",
             "event": "node gone", "node": "studio", "reason": "\x1b[2Jstopped"}  # fmt: skip
    line = terminal_line(None, "", event)
    assert line[2] == line[5] == ":"
    assert line[8:] == r"  warning  node gone  node=studio  reason='\x1b[2Jstopped'"
    assert len(line) < 80


def test_a_file_that_nobody_rotates_begins_anew(tmp_path: Path):
    file = tmp_path / "service.log"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, b"x" * 100)
        assert not shorten(descriptor, 100)
        os.write(descriptor, b"x")
        assert shorten(descriptor, 100)
        os.write(descriptor, b"new")
        assert file.read_bytes() == b"new"
    finally:
        os.close(descriptor)


def test_what_is_no_file_is_left_alone():
    read, write = os.pipe()
    try:
        assert not shorten(write, 0)
    finally:
        os.close(read)
        os.close(write)
