"""Failures of commands, and their exit codes."""

import click

from coordinator.client.terminal_text import harmless

UNREACHABLE, DENIED, NOT_FOUND, REFUSED, TIMED_OUT, PROTOCOL, PIN, BLOCKED = 3, 4, 5, 6, 7, 8, 9, 10
"""Exit codes; the whole list is in `cluster --help`."""


class CommandError(click.ClickException):
    """Failure of a command: exit code, and a text with the next step."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(harmless(message))
        self.exit_code = code  # pyright: ignore[reportAttributeAccessIssue]  click reads it from the instance
