"""Becomes Ray's own command line, with a life line: when standard input ends, so does Ray here.

A parent that is killed closes the pipe whatever the system is; macOS has no other way to tell a child.
"""

import os
import runpy
import signal
import threading

PATIENCE = 5.0
"""Seconds that Ray has to end its processes before its launcher leaves all the same."""


def _hold_on() -> None:
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(PATIENCE)
    os._exit(1)


def main() -> None:
    """Run Ray with the words of our own command line."""
    threading.Thread(target=_hold_on, daemon=True).start()
    runpy.run_module("ray.scripts.scripts", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
