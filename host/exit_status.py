"""Describe how a process ended, for messages to users."""

import signal


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
