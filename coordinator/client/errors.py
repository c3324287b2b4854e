"""Exception for a failed command, and the exit codes of commands."""

import click

from coordinator.client.terminal_text import replace_control_characters

UNREACHABLE, DENIED, NOT_FOUND, REFUSED, TIMED_OUT, PROTOCOL, PIN, BLOCKED = 3, 4, 5, 6, 7, 8, 9, 10
"""Exit codes of failed commands, with the meanings in `cluster --help`.

In order: coordinator not reached, key or token refused, not found, refused by policy or memory, timed out. Then: other
protocol version, CA pin mismatch, blocked by macOS local network privacy.
"""


class CommandError(click.ClickException):
    """Raised if a command fails. `code` is the exit code, `message` a text for a person.

    Terminal control sequences in the message are replaced.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(replace_control_characters(message))
        self.exit_code = code  # pyright: ignore[reportAttributeAccessIssue]  click reads it from the instance
