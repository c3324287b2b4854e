"""A process's log: JSON lines in a rotating file of its owner's, warnings for a person on standard error."""

import logging
import logging.handlers
import os
import sys
from pathlib import Path

import structlog

LONGEST = 20 * 1024 * 1024
KEPT = 5


def open_journal(file: Path, level: str) -> None:
    """Send all log events of this process to `file`, and warnings to standard error."""
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    os.close(os.open(file, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600))
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso"),
    ]
    lines = logging.handlers.RotatingFileHandler(file, maxBytes=LONGEST, backupCount=KEPT)
    lines.setFormatter(_formatter(shared, structlog.processors.JSONRenderer()))
    screen = logging.StreamHandler()
    screen.setLevel(logging.WARNING)
    screen.setFormatter(_formatter(shared, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())))
    logging.basicConfig(level=level.upper(), handlers=[lines, screen], force=True)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=True,
    )


def _formatter(
    shared: list[structlog.typing.Processor], renderer: structlog.typing.Processor
) -> structlog.stdlib.ProcessorFormatter:
    return structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            renderer,
        ],
    )
