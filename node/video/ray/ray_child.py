"""Run Ray's command line, and end Ray when the standard input of this process ends.

The standard input is a pipe of the agent, which closes on every system when the agent ends or is killed. No portable
call notifies a process of the end of its parent.
"""

import os
import runpy
import signal
import threading

EXIT_TIMEOUT_SECONDS = 5.0
"""Seconds that Ray has to end its processes before the launcher exits."""


def _end_at_end_of_stdin() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(EXIT_TIMEOUT_SECONDS)
    os._exit(1)


def main() -> None:
    """Run Ray's command line with the arguments of this process. End Ray and the process when stdin ends."""
    threading.Thread(target=_end_at_end_of_stdin, daemon=True).start()
    runpy.run_module("ray.scripts.scripts", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
