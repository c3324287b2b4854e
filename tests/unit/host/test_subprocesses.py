"""Runs of a process, and the text for its end."""

import subprocess

import pytest

from host.subprocesses import describe_exit, run_process, run_tool


def test_process_has_no_input_and_its_output_is_text():
    done = run_process(("sh", "-c", "cat; printf 'a\\377b'; echo why >&2; exit 3"), 20)
    assert (done.returncode, done.stdout, done.stderr) == (3, "a\ufffdb", "why\n")
    with pytest.raises(FileNotFoundError):
        run_process(("/no/such/tool",), 20)
    with pytest.raises(subprocess.TimeoutExpired):
        run_process(("sleep", "20"), 0.01)


def test_tool_that_fails_or_is_missing_has_no_output():
    assert run_tool(("echo", "a")) == "a\n"
    assert run_tool(("sh", "-c", "echo a; exit 1")) == ""
    assert run_tool(("/no/such/tool",)) == ""


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
