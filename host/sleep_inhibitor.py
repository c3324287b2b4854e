"""Prevent idle sleep of this machine.

On macOS, a child process `caffeinate -i -w PID` holds the assertion. The child also ends if this process crashes. The
lid and the menu still put the Mac to sleep. On other systems, this module does nothing: servers do not sleep, and on
Linux laptops the desktop decides. Unverified on macOS: the entry `awake` of the checklist.
"""

import os
import subprocess
import sys

import structlog

log = structlog.get_logger("host.sleep_inhibitor")

CAFFEINATE = ("/usr/bin/caffeinate", "-i", "-w")
END_TIMEOUT_SECONDS = 2.0
"""Seconds from SIGTERM to SIGKILL for a child that does not end."""


class SleepInhibitor:
    """Assertion that prevents idle sleep of this machine while it is held.

    `command` replaces `caffeinate -i -w`; the id of this process is added as the last argument. None selects the
    command of the system. With an empty command, no assertion is held.
    """

    def __init__(self, command: tuple[str, ...] | None = None) -> None:
        self._command = command if command is not None else CAFFEINATE if sys.platform == "darwin" else ()
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def held(self) -> bool:
        """Whether the assertion is held."""
        return self._child is not None and self._child.poll() is None

    @property
    def pid(self) -> int | None:
        """Process id of the child that holds the assertion, also after the child has ended on its own.

        None before the first start and after a release.
        """
        return None if self._child is None else self._child.pid

    def set_held(self, wanted: bool) -> None:
        """Hold the assertion if `wanted`; release it otherwise. Do nothing on systems other than macOS.

        If the child cannot be started, log the error and do not try again. A release blocks until the child has ended,
        usually for less than END_TIMEOUT_SECONDS.
        """
        if wanted and not self.held:
            self._start_child()
        elif not wanted:
            self._end_child()

    def _start_child(self) -> None:
        if not self._command:
            return
        try:
            self._child = subprocess.Popen(
                [*self._command, str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            log.warning("idle sleep not prevented", error=error.strerror)
            self._command = ()
            return
        log.info("idle sleep prevented")

    def _end_child(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.terminate()
        try:
            child.wait(END_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        log.info("idle sleep allowed")
