"""Time limit for foreign Python code on a thread of this process, such as a model's chat template."""

import ctypes
import threading


class DeadlineError(Exception):
    """Error of code that exceeded its time limit."""


class Deadline:
    """Context that raises `DeadlineError` with this message in its thread after `seconds`.

    Python code is interrupted between two instructions, but a native call is not. No exception is raised outside the
    context: one that is pending at the end is withdrawn.
    """

    def __init__(self, seconds: float, message: str) -> None:
        self._timer = threading.Timer(seconds, self.expire)
        self._timer.daemon = True
        self._message = message
        self._lock = threading.Lock()
        self._thread = 0
        self._over = self._raised = False

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._timer.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with self._lock:
            self._over = True
        self._timer.cancel()
        if self._raised:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), None)
            raise DeadlineError(self._message) from None

    def expire(self) -> None:
        """Raise `DeadlineError` in the thread inside the context; do nothing outside it."""
        with self._lock:
            if not self._over:
                self._raised = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(DeadlineError)
                )
