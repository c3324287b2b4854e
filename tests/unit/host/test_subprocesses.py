"""How the end of a process is described."""

import pytest

from host.subprocesses import describe_exit


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (0, "ended with exit code 0"),
        (3, "ended with exit code 3"),
        (-11, "ended by SIGSEGV"),
        (-9, "ended by SIGKILL"),
        (-40, "ended by signal 40"),
        (None, "ended with an unknown exit code"),
    ],
)
def test_a_signal_is_named_and_an_exit_code_is_a_number(code: int | None, text: str):
    assert describe_exit(code) == text
