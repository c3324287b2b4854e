"""Exception for a failed command, and the exit codes of commands."""

import click

from coordinator.client.terminal_text import replace_control_characters

UNREACHABLE, DENIED, NOT_FOUND, REFUSED, TIMED_OUT, PROTOCOL, PIN, BLOCKED = 3, 4, 5, 6, 7, 8, 9, 10
"""Exit codes of failed commands, with the meanings in `cluster --help`.

In order: the coordinator is not reached, the key or token is refused, something is not found. Then: refused by policy
or memory, a timeout, another version of the protocol. The last two are a wrong pin of the CA, and a block by macOS's
local network privacy.
"""


class CommandError(click.ClickException):
    """Failure of a command: its exit code, and a message for a person, without terminal control sequences."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(replace_control_characters(message))
        self.exit_code = code  # pyright: ignore[reportAttributeAccessIssue]  click reads it from the instance
