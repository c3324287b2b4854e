"""Configure the log of a process: JSON lines in a rotating private file, and warnings on standard error.

Events of this project and of libraries pass the same steps: repeats are limited (`log_dedup`), secrets are hidden
(`redaction`), and the line is written. Exceptions are written without the values of variables.

A child process has no log file of its own. Its events go to standard error, and repeats are not limited
(`log_to_stderr`).
"""

import contextlib
import errno
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
from typing import Any, TextIO, cast

import structlog

from host.log_dedup import LogDeduplicator
from host.redaction import PRIVATE, format_exception, hide_secrets_in_line, redact_fields

MAX_LOG_BYTES = 20 * 1024 * 1024
"""Bytes above which the log file is rotated, and above which the file of standard error is emptied."""
MAX_LOG_FILES = 5
"""Number of rotated files that are kept."""
Tap = Callable[[Mapping[str, Any]], None]
"""Function that gets each written event, after redaction."""


def open_journal(file: Path, level: str, tap: Tap | None = None) -> None:
    """Write the log events of this process to `file`, and warnings to standard error.

    `level` is the lowest level in the file, such as `info`. `tap` is called with each event that is written to the
    file; None for no call. Missing folders are created, the folder of the file with mode 0700. Raise OSError if the
    file cannot be opened.
    """
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    lines = _PrivateRotatingHandler(file, maxBytes=MAX_LOG_BYTES, backupCount=MAX_LOG_FILES)
    lines.setFormatter(_build_formatter(structlog.processors.JSONRenderer(default=str), tap))
    screen = _StderrHandler()
    screen.setLevel(logging.WARNING)
    plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    screen.setFormatter(_build_formatter(render_terminal_line if sys.stderr.isatty() else plain, None))
    for handler in (lines, screen):
        handler.addFilter(_DeduplicationFilter())
    logging.basicConfig(level=level.upper(), handlers=[lines, screen], force=True)
    structlog.configure(
        processors=[*_build_shared_processors(), structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )


def hide_warnings() -> None:
    """Write only errors to standard error from now on, because warnings of an orderly stop need no action.

    The log file does not change.
    """
    for handler in logging.getLogger().handlers:
        if isinstance(handler, _StderrHandler):
            handler.setLevel(logging.ERROR)


def log_to_stderr() -> None:
    """Write log events of level `info` or higher to standard error, in a child process whose parent stores the output.

    Secrets are hidden. Events that cannot be written, as on a full disk, are lost.
    """
    plain = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S"),
            *_HIDING,
            plain,
            _hide_secrets,
        ],
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _LossyStream(sys.stderr))),
        wrapper_class=structlog.make_filtering_bound_logger("info"),
    )


class _LossyStream:
    """Text stream whose write errors are ignored, because a full disk must not fail the work that is logged."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write a text. Return the number of its characters."""
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write the buffered text."""
        with contextlib.suppress(OSError):
            self._stream.flush()


class _StderrHandler(logging.StreamHandler[Any]):
    """Handler for standard error.

    Under launchd, standard error is a file without rotation. The handler empties that file above MAX_LOG_BYTES; the
    journal has the same events. Child processes append to the same file.
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, after the file of standard error was emptied if it is too long."""
        with contextlib.suppress(OSError, ValueError):  # not all streams have a descriptor
            empty_if_longer(sys.stderr.fileno())
        super().emit(record)


def empty_if_longer(descriptor: int, longest: int = MAX_LOG_BYTES) -> bool:
    """Empty an open file if it is a regular file of more than `longest` bytes. Return whether it was emptied.

    Raise OSError if that fails, for example for a closed descriptor.
    """
    facts = os.fstat(descriptor)
    if not stat.S_ISREG(facts.st_mode) or facts.st_size <= longest:
        return False
    os.ftruncate(descriptor, 0)
    return True


class _PrivateRotatingHandler(logging.handlers.RotatingFileHandler):
    """Handler that writes a rotating file of mode 0600.

    The handler formats a record only once. That of `logging` formats it twice: to check the size of the file, and to
    write the record. For a file that cannot be written, as on a full disk, the handler prints one line. `logging`
    prints a traceback for each record.
    """

    _failures = 0
    """Number of records that could not be written since the last written record."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        before = self._failures
        super().emit(record)
        if self._failures == before:
            self._failures = 0

    def _report_error(self, record: logging.LogRecord) -> None:
        """Print the first of several write errors in a row. Handle other errors as `logging` does."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._failures += 1
        if self._failures == 1:
            step = ": free disk space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            with contextlib.suppress(OSError):  # standard error may be a file of the same disk
                print(f"Error: the log {self.baseFilename} cannot be written: {error.strerror}{step}", file=sys.stderr)

    handleError = _report_error  # noqa: N815  called by `logging`

    def format(self, record: logging.LogRecord) -> str:
        """Format a record once."""
        line: str | None = getattr(record, "journal_line", None)
        if line is None:
            line = record.journal_line = super().format(record)
        return line

    def _open(self) -> Any:
        return os.fdopen(
            os.open(self.baseFilename, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600),
            "a",
            encoding="utf-8",
            errors="backslashreplace",
        )


class _DeduplicationFilter(logging.Filter):
    """Filter that limits repeated events. Thread-safe."""

    def __init__(self) -> None:
        super().__init__()
        self._repeats = LogDeduplicator()
        self._lock = threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written. Add the field `left_out`, the number of repeats that were not written.

        Records without fields, such as those of libraries, do not get this number.
        """
        message: Any = record.msg
        fields = cast("dict[str, Any]", message) if isinstance(message, dict) else {}
        with self._lock:
            left_out = self._repeats.admit(
                record.name, str(fields.get("event", message))[:200], fields, time.monotonic()
            )
        if left_out and fields:
            fields["left_out"] = left_out
        return left_out is not None


def render_terminal_line(_: Any, __: str, event: structlog.typing.EventDict) -> str:
    """Render an event for a terminal: a line with local time, level, event and fields, and then the exception.

    Control characters in the name of the event and in its fields are escaped. The signature is that of a structlog
    processor. The function removes time, level, name of the event, logger and exception from `event`.
    """
    when = str(event.pop("timestamp", ""))
    with contextlib.suppress(ValueError):
        when = datetime.fromisoformat(when).astimezone().strftime("%H:%M:%S")
    level, name = str(event.pop("level", "")), str(event.pop("event", ""))
    event.pop("logger", None)
    exception = str(event.pop("exception", ""))
    fields = "  ".join(f"{field}={_escape_unprintable(value)}" for field, value in event.items())
    return f"{when}  {level:<7}  {_escape_unprintable(name)}  {fields}".rstrip() + (
        f"\n{exception}" if exception else ""
    )


def _escape_unprintable(value: object) -> str:
    text = str(value)
    return text if text.isprintable() else repr(text)


def _build_shared_processors() -> list[structlog.typing.Processor]:
    return [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso"),
    ]


def _build_formatter(renderer: structlog.typing.Processor, tap: Tap | None) -> structlog.stdlib.ProcessorFormatter:
    def call_tap(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        if tap is not None:
            tap(event)
        return event

    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=_build_shared_processors(),
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            *_HIDING,
            call_tap,
            renderer,
            _hide_secrets,
        ],
    )


def _render_exception(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Replace an exception by its trace without values."""
    failure = event.pop("exc_info", None)
    if failure is True:
        failure = sys.exc_info()
    if isinstance(failure, BaseException):
        failure = (type(failure), failure, failure.__traceback__)
    if failure and failure[0] is not None:
        event["exception"] = format_exception(failure, private=event.get("event") in PRIVATE)
    return event


def _redact_event(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """Hide private fields and secrets."""
    return redact_fields(event)


def _hide_secrets(_: Any, __: str, line: Any) -> Any:
    """Hide secrets in the rendered line."""
    return hide_secrets_in_line(line)


_HIDING: tuple[structlog.typing.Processor, ...] = (_render_exception, _redact_event)
