import json
import logging
import os
import re
import time
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

import pytest
import structlog

from host.log_setup import (
    MAX_LOG_BYTES,
    empty_if_longer,
    hide_warnings,
    log_to_stderr,
    open_journal,
    render_terminal_line,
)


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Restore the logging configuration."""
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
def test_an_event_is_notified_and_written_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    heard: list[Any] = []
    open_journal(tmp_path / "x.log", "info", heard.append)
    structlog.get_logger("coordinator.test").warning("node gone", node="a", reason="stopped")
    assert [event["event"] for event in heard] == ["node gone"]
    (line,) = (tmp_path / "x.log").read_text().splitlines()
    assert json.loads(line)["reason"] == "stopped"
    assert capsys.readouterr().err.count("node gone") == 1


@pytest.mark.usefixtures("own_logging")
def test_a_line_has_level_logger_time_context_and_the_way_of_an_exception(tmp_path: Path):
    file = tmp_path / "state" / "logs" / "x.log"
    open_journal(file, "info")
    assert [one.stat().st_mode & 0o777 for one in (file, file.parent)] == [0o600, 0o700]
    log = structlog.get_logger("node.test")
    log.debug("too fine")
    with structlog.contextvars.bound_contextvars(request=7):
        log.info("one", value=Path("x"))
    kept: KeyError | None = None
    try:
        {}["k"]
    except KeyError as error:
        log.exception("two")
        logging.getLogger("library").error("three %s", 3, exc_info=True)
        kept = error
    log.warning("four", exc_info=kept)
    log.error("five", exc_info=True)
    log.info("six", headers={"x-api-key": "abcdef123"})
    told = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["event"] for line in told] == ["one", "two", "three 3", "four", "five", "six"]
    assert {key: told[0][key] for key in ("level", "logger", "request", "value")} == {
        "level": "info",
        "logger": "node.test",
        "request": 7,
        "value": "x",
    }
    assert told[0]["timestamp"].endswith("Z")
    assert all(line["exception"].startswith("KeyError: 'k'\ntest_log_setup.py:") for line in told[1:4])
    assert [line["level"] for line in told[1:]] == ["error", "error", "warning", "error", "info"]
    assert told[5]["headers"] == {"x-api-key": "[hidden]"}, "the rendered line is redacted, too"
    assert "exception" not in told[4], "there was none"
    assert (told[2]["logger"], "exc_info" in told[1]) == ("library", False)


@pytest.mark.usefixtures("own_logging")
def test_standard_error_that_is_a_long_file_is_truncated_with_the_next_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with (tmp_path / "service.log").open("a") as screen:
        monkeypatch.setattr("sys.stderr", screen)
        open_journal(tmp_path / "x.log", "info")
        os.truncate(screen.fileno(), MAX_LOG_BYTES + 1)
        structlog.get_logger("coordinator.test").info("for the journal alone")
        assert os.fstat(screen.fileno()).st_size == MAX_LOG_BYTES + 1
        structlog.get_logger("coordinator.test").warning("node gone")
    told = (tmp_path / "service.log").read_text()
    assert "node gone" in told
    assert len(told) < 1000
    assert "journal alone" not in told
    assert "[warning" in told
    assert "\x1b" not in told


@pytest.mark.usefixtures("own_logging")
def test_a_warning_on_a_terminal_is_a_short_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    ours, theirs = os.openpty()
    with os.fdopen(theirs, "w") as screen, os.fdopen(ours, "rb", buffering=0) as read:
        monkeypatch.setattr("sys.stderr", screen)
        open_journal(tmp_path / "x.log", "info")
        structlog.get_logger("coordinator.test").warning("node gone", node="a")
        assert re.fullmatch(rb"\d\d:\d\d:\d\d  warning  node gone  node=a\r\n", read.read(1000))


@pytest.mark.usefixtures("own_logging")
def test_a_log_that_cannot_be_written_is_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    full = tmp_path / "x.log"
    full.symlink_to("/dev/full")
    open_journal(full, "info")
    log = structlog.get_logger("node.test")
    for number in range(3):
        log.info("event", number=number)
    name = f"Error: the log {full} cannot be written: No space left on device: free disk space"
    assert capsys.readouterr().err.splitlines() == [name]
    handler = next(handler for handler in logging.getLogger().handlers if isinstance(handler, RotatingFileHandler))
    for place in (tmp_path / "y.log", full, Path(os.devnull)):
        with place.open("a") as file:
            assert handler.stream is not None
            os.dup2(file.fileno(), handler.stream.fileno())
        log.info("event", place=str(place))
    assert capsys.readouterr().err.splitlines() == [name], "again after a line that was written"


@pytest.mark.usefixtures("own_logging")
def test_a_log_and_standard_error_on_a_full_disk_fail_no_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    full = tmp_path / "x.log"
    full.symlink_to("/dev/full")
    with Path("/dev/full").open("w", buffering=1) as stream:
        monkeypatch.setattr("sys.stderr", stream)
        open_journal(full, "info")
        structlog.get_logger("node.test").warning("lost")
        (handler,) = (one for one in logging.getLogger().handlers if isinstance(one, RotatingFileHandler))
        with Path(os.devnull).open("w") as file:
            for used in (stream, handler.stream):
                assert used is not None
                os.dup2(file.fileno(), used.fileno())


@pytest.mark.usefixtures("own_logging")
def test_what_another_process_appends_is_not_written_over(tmp_path: Path):
    open_journal(tmp_path / "x.log", "info")
    log = structlog.get_logger("coordinator.test")
    log.info("one")
    with (tmp_path / "x.log").open("a") as file:
        file.write("{}\n")
    log.info("two")
    lines = (tmp_path / "x.log").read_text().splitlines()
    assert [json.loads(line).get("event") for line in lines] == ["one", None, "two"]


@pytest.mark.usefixtures("own_logging")
def test_a_child_writes_its_events_to_standard_error_with_secrets_hidden(capsys: pytest.CaptureFixture[str]):
    log_to_stderr()
    log = structlog.get_logger()
    log.debug("too fine")
    with structlog.contextvars.bound_contextvars(model="tiny"):
        log.info("loaded", key="abc", header="Bearer abcdef123456")
    try:
        {}["k"]
    except KeyError:
        log.exception("prepare")
    first, second, *trace = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[info +\] loaded +header=.*", first)
    assert [part for part in ("key=[hidden]", "model=tiny", "Bearer [hidden]") if part not in first] == []
    assert second.rstrip().endswith("] prepare")
    assert trace[0] == "KeyError: [hidden]", "the message of such an event may quote a client's text"
    assert trace[1].startswith("test_log_setup.py:")


@pytest.mark.usefixtures("own_logging")
def test_a_child_continues_although_its_events_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with Path("/dev/full").open("w", buffering=1) as stream:
        monkeypatch.setattr("sys.stderr", stream)
        log_to_stderr()
        log = structlog.get_logger("engine.test")
        log.warning("lost")
        with (tmp_path / "engine.log").open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
        log.warning("written")
    assert (tmp_path / "engine.log").read_text().rstrip().endswith("written")


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
    event = {
        "timestamp": "2026-11-23T03:37:02.885116Z",
        "level": "warning",
        "logger": "coordinator.cluster.registry",
        "event": "node gone",
        "node": "studio",
        "reason": "\x1b[2Jstopped",
    }
    line = render_terminal_line(None, "", event)
    assert line[2] == line[5] == ":"
    assert line[8:] == r"  warning  node gone  node=studio  reason='\x1b[2Jstopped'"
    assert len(line) < 80


@pytest.mark.parametrize(("zone", "hour"), [("UTC0", "03"), ("EAST-9", "12")])
def test_the_time_of_a_line_for_a_terminal_is_local(monkeypatch: pytest.MonkeyPatch, zone: str, hour: str):
    with monkeypatch.context() as patch:
        patch.setenv("TZ", zone)
        time.tzset()
        line = render_terminal_line(None, "", {"timestamp": "2026-11-23T03:37:02Z", "event": "x"})
    time.tzset()
    assert line.startswith(f"{hour}:37:02")


def test_a_line_for_a_terminal_ends_with_its_exception():
    event = {"timestamp": "never", "level": "info", "event": "a\nb", "exception": "KeyError: k\nx.py:1 f"}
    assert render_terminal_line(None, "", event) == "never  info     'a\\nb'\nKeyError: k\nx.py:1 f"
    assert render_terminal_line(None, "", {}) == ""


def test_a_file_without_rotation_is_truncated(tmp_path: Path):
    file = tmp_path / "service.log"
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, b"x" * 100)
        assert not empty_if_longer(descriptor, 100)
        os.write(descriptor, b"x")
        assert empty_if_longer(descriptor, 100)
        os.write(descriptor, b"new")
        assert file.read_bytes() == b"new"
    finally:
        os.close(descriptor)


def test_what_is_no_file_is_left_alone():
    read, write = os.pipe()
    try:
        assert not empty_if_longer(write, -1)
    finally:
        os.close(read)
        os.close(write)
