"""A time limit for Python code of others that runs on a thread of ours, such as a model's chat template."""

import ctypes
import threading

AGAIN_SECONDS = 0.5
"""Seconds after which DeadlineError is raised again in a context that has not ended."""


class DeadlineError(Exception):
    """The code took longer than it may."""


class Deadline:
    """Raises DeadlineError in the thread that entered the context, once `seconds` have passed.

    The exception interrupts Python code between two instructions, but no native call. The interpreter swallows it in a
    finalizer or a callback of the garbage collector, so it is raised every AGAIN_SECONDS until the context ends. An
    exception that is still pending at the end of the context is withdrawn."""

    def __init__(self, seconds: float, message: str) -> None:
        self._timer = self._after(seconds)
        self._message = message
        self._lock = threading.Lock()
        self._thread = 0
        self._over = self._raised = False

    def _after(self, seconds: float) -> threading.Timer:
        timer = threading.Timer(seconds, self.expire)
        timer.daemon = True
        return timer

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
        """Raise DeadlineError in the thread inside the context; do nothing outside it."""
        with self._lock:
            if not self._over:
                self._raised = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread), ctypes.py_object(DeadlineError)
                )  # fmt: skip
                self._timer = self._after(AGAIN_SECONDS)
                self._timer.start()
