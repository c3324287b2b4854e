"""A process's log: JSON lines in a rotating file of its owner's, warnings for a person on standard error.

All loggers end here, ours and those of libraries, and all go the same way: repeats are counted instead of told
(`repeats`), what must not be told is hidden (`redaction`), and then the line is written. Exceptions are written without
the values of their variables.
"""

import contextlib
import logging
import logging.handlers
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import structlog

from machine.redaction import PRIVATE, hide_in_line, redact, trace
from machine.repeats import Repeats

LONGEST = 20 * 1024 * 1024
KEPT = 5
Tap = Callable[[Mapping[str, Any]], None]
"""Is given every event that is written, as its line has it."""


def open_journal(file: Path, level: str, tap: Tap | None = None) -> None:
    """Send all log events of this process to `file`, and warnings to standard error; `tap` hears what is written."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lines = _Rotating(file, maxBytes=LONGEST, backupCount=KEPT)
    lines.setFormatter(_formatter(structlog.processors.JSONRenderer(default=str), tap))
    screen = _Screen()
    screen.setLevel(logging.WARNING)
    plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    screen.setFormatter(_formatter(terminal_line if sys.stderr.isatty() else plain, None))
    for handler in (lines, screen):
        handler.addFilter(_Unrepeated())
    logging.basicConfig(level=level.upper(), handlers=[lines, screen], force=True)
    structlog.configure(
        processors=[*_shared(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )


def hide_warnings() -> None:
    """Write only errors to standard error from now on: what ends in an orderly stop is no warning to a person. The
    journal keeps everything."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _Screen):
            handler.setLevel(logging.ERROR)


def log_to_stderr() -> None:
    """Send a child's events to its standard error, which its parent keeps in a file: hidden as everywhere."""
    plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S"),
            *_HIDING,
            plain,
            _hide_line,
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger("info"),
    )


class _Screen(logging.StreamHandler[Any]):
    """Writes to standard error. Under launchd that is a file that nobody rotates: past LONGEST it begins anew, and
    what it lost is in the journal, too. Our children write to the same file, always at its end."""

    def emit(self, record: logging.LogRecord) -> None:
        """See logging."""
        with contextlib.suppress(OSError, ValueError):  # a stream that is no file has no descriptor
            shorten(sys.stderr.fileno())
        super().emit(record)


def shorten(descriptor: int, longest: int = LONGEST) -> bool:
    """Empty a file past its longest; whether it was. Terminals and pipes are left alone."""
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size <= longest:
        return False
    os.ftruncate(descriptor, 0)
    return True


class _Rotating(logging.handlers.RotatingFileHandler):
    """A rotating file that only its owner reads. A record is formatted once, although logging's own handler does it
    twice: for the size of the file, and to write it."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging."""
        line: str | None = getattr(record, "journal_line", None)
        if line is None:
            line = record.journal_line = super().format(record)
        return line

    def _open(self) -> Any:
        return os.fdopen(os.open(self.baseFilename, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600), "a",
                         encoding="utf-8", errors="backslashreplace")  # fmt: skip


class _Unrepeated(logging.Filter):
    """Lets no event through too often. Any thread may log."""

    def __init__(self) -> None:
        super().__init__()
        self._repeats = Repeats()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """See logging. What was left out is told by the record itself."""
        told: Any = record.msg
        fields = cast("dict[str, Any]", told) if isinstance(told, dict) else {}
        with self._lock:
            left_out = self._repeats.admit(record.name, str(fields.get("event", told))[:200], fields, time.monotonic())
        if left_out and fields:
            fields["left_out"] = left_out
        return left_out is not None


def terminal_line(_: Any, __: str, event: structlog.typing.EventDict) -> str:
    """Return an event as a line for a terminal: local time, level, event and its fields, without control characters."""
    when = str(event.pop("timestamp", ""))
    with contextlib.suppress(ValueError):
        when = datetime.fromisoformat(when).astimezone().strftime("%H:%M:%S")
    level, name = str(event.pop("level", "")), str(event.pop("event", ""))
    event.pop("logger", None)
    exception = str(event.pop("exception", ""))
    fields = "  ".join(f"{field}={_printable(value)}" for field, value in event.items())
    return f"{when}  {level:<7}  {_printable(name)}  {fields}".rstrip() + (f"\n{exception}" if exception else "")


def _printable(value: object) -> str:
    text = str(value)
    return text if text.isprintable() else repr(text)


def _shared() -> list[structlog.typing.Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso"),
    ]


def _formatter(renderer: structlog.typing.Processor, tap: Tap | None) -> structlog.stdlib.ProcessorFormatter:
    def tapped(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        if tap is not None:
            tap(event)
        return event

    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_shared(),
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_HIDING, tapped, renderer, _hide_line,
        ],
    )  # fmt: skip


def _exceptions(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Write an exception down without the values that were in it."""
    failure = event.pop("exc_info", None)
    if failure is True:
        failure = sys.exc_info()
    if isinstance(failure, BaseException):
        failure = (type(failure), failure, failure.__traceback__)
    if failure and failure[0] is not None:
        event["exception"] = trace(failure, private=event.get("event") in PRIVATE)
    return event


def _fields(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Hide what must not be told."""
    return redact(event)


def _hide_line(_: Any, __: str, line: Any) -> Any:
    """Look once more at the finished line."""
    return hide_in_line(line)


_HIDING: tuple[structlog.typing.Processor, ...] = (_exceptions, _fields)
