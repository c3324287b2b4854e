"""Run a tool of the system, and describe how a process ended."""

import signal
import subprocess
from collections.abc import Callable, Sequence

TOOL_TIMEOUT_SECONDS = 5.0
"""Maximum seconds that a tool may run."""

RunTool = Callable[[tuple[str, ...]], str]
"""Function that runs a tool and returns its output; empty after an error."""


def run_process(command: Sequence[str], timeout_seconds: float) -> "subprocess.CompletedProcess[str]":
    """Run a process without input, wait for its end, and return its exit code and its output as text.

    Raise OSError if the process cannot be started, `subprocess.TimeoutExpired` after `timeout_seconds`.
    """
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_seconds,
        stdin=subprocess.DEVNULL,
        check=False,
    )


def run_tool(command: tuple[str, ...]) -> str:
    """Run a tool of the system and return its standard output.

    Return an empty text if the tool is missing, fails, or runs longer than `TOOL_TIMEOUT_SECONDS`.
    """
    try:
        done = run_process(command, TOOL_TIMEOUT_SECONDS)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""


def describe_exit(code: int | None) -> str:
    """Describe the return code of an ended process: "ended by SIGSEGV" or "ended with exit code 3".

    `code` is a `subprocess.Popen.returncode`: negative for a signal, None if it is unknown.
    """
    if code is None:
        return "ended with an unknown exit code"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"
