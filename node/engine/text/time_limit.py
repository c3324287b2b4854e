"""Time limit for Python code that comes with a model, such as its chat template, on a thread of this process."""

import ctypes
import math
import threading
import time


class DeadlineError(Exception):
    """Error: code has exceeded its time limit."""


class Deadline:
    """Context that raises `DeadlineError` with this message in its thread after `seconds`.

    Python code is interrupted between two instructions, but a native call is not. If the time limit has passed by the
    end of the context, its exit raises the error. Nothing is raised after the context.

    The last statement of the context must not be a loop. CPython 3.13 does not call `__exit__` if an exception arrives
    at the jump that ends such a loop.
    """

    def __init__(self, seconds: float, message: str) -> None:
        self._seconds = seconds
        self._message = message
        self._lock = threading.Lock()
        self._thread = 0
        self._over = self._raised = False

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        _CLOCK.add(self, time.monotonic() + self._seconds)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            with self._lock:
                self._over = True
            if self._raised:
                self._raise_in_thread()
                while True:  # the exception arrives here, and replaces an exception that has not arrived yet
                    pass
        except DeadlineError:
            raise DeadlineError(self._message) from None
        _CLOCK.remove(self)  # no exception can arrive any longer, which would leave the lock of the clock acquired

    def expire(self) -> None:
        """Raise `DeadlineError` in the thread that is inside the context. Do nothing if it has left the context. Any
        thread may call this."""
        with self._lock:
            if not self._over:
                self._raised = True
                self._raise_in_thread()

    def _raise_in_thread(self) -> None:
        """Make CPython raise `DeadlineError` in the thread inside the context.

        CPython before 3.13 keeps its mark of a pending exception until an exception arrives, even if the exception is
        withdrawn. With the mark every thread is slower, and a call under `sys.setprofile` never returns.
        """
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._thread), ctypes.py_object(DeadlineError))


class DeadlineClock:
    """Thread that expires the deadlines of all threads, because starting a thread for each deadline takes too long.

    The thread starts with the first deadline. It sleeps until the earliest deadline, even if that is removed before.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._expiries: dict[Deadline, float] = {}
        """Deadlines in force, each with its monotonic time in seconds."""
        self._wakes_at = math.inf
        """Monotonic time at which the thread wakes up."""
        self._thread: threading.Thread | None = None

    def add(self, deadline: Deadline, expires_at: float) -> None:
        """Expire a deadline at the monotonic time `expires_at`, unless it is removed before."""
        with self._changed:
            self._expiries[deadline] = expires_at
            if self._thread is None or not self._thread.is_alive():  # a fork has no threads
                self._thread = threading.Thread(target=self._run, name="deadlines", daemon=True)
                self._thread.start()
            elif expires_at < self._wakes_at:
                self._changed.notify()

    def remove(self, deadline: Deadline) -> None:
        """Remove a deadline; do nothing if it has expired."""
        with self._changed:
            self._expiries.pop(deadline, None)

    def _run(self) -> None:
        while True:
            for deadline in self._wait_for_expired():
                deadline.expire()

    def _wait_for_expired(self) -> list[Deadline]:
        """Wait until a deadline has expired, or the deadlines have changed. Remove and return the expired deadlines."""
        with self._changed:
            self._wakes_at = min(self._expiries.values(), default=math.inf)
            left = self._wakes_at - time.monotonic()
            if left > 0:
                self._changed.wait(None if left == math.inf else left)
            now = time.monotonic()
            expired = [deadline for deadline, expires_at in self._expiries.items() if expires_at <= now]
            for deadline in expired:
                del self._expiries[deadline]
            return expired


_CLOCK = DeadlineClock()
