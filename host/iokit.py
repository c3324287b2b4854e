"""Receive sleep notifications of macOS by ctypes. Unverified on macOS: tested against a compiled stand-in.

Calls and numbers come from <IOKit/pwr_mgt/IOPMLib.h> and <IOKit/IOMessage.h>. The system asks registered processes for
permission before an idle sleep, and notifies them before every sleep. It waits up to 30 s for IOAllowPowerChange. This
module always allows the sleep: as soon as the receiver of the notification permits it, and after ANSWER_TIMEOUT_SECONDS
at the latest.
"""

import ctypes
import threading
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, byref, c_int, c_ssize_t, c_uint32, c_void_p

IOKIT = "/System/Library/Frameworks/IOKit.framework/IOKit"
CORE = "/System/Library/Frameworks/CoreFoundation.framework/CoreFoundation"
CAN_SLEEP, WILL_SLEEP, POWERED_ON = 0xE0000270, 0xE0000280, 0xE0000300
"""Messages of IOKit: an idle sleep may be refused, a sleep begins, and the machine is awake again."""
ANSWER_TIMEOUT_SECONDS = 2.0
"""Maximum seconds by which this module delays a sleep; also the timeout of the start and the end of the thread."""

_CALLBACK = CFUNCTYPE(None, c_void_p, c_uint32, c_uint32, c_void_p)


class SleepNotificationListener:
    """Listener for sleep notifications of macOS, on a thread with its own run loop.

    `iokit` and `core` are the paths of the frameworks IOKit and CoreFoundation.
    """

    def __init__(self, iokit: str = IOKIT, core: str = CORE) -> None:
        self._paths = iokit, core
        self._loop: int | None = None
        self._core: ctypes.CDLL | None = None
        self._running = threading.Event()
        self._ended = threading.Event()

    def start(self, on_sleep: Callable[[Callable[[], None]], None], on_wake: Callable[[], None]) -> bool:
        """Start listening for notifications in a thread. Return whether the registration has succeeded.

        Return False if the frameworks are missing or refuse the registration. Return False also if the registration
        takes longer than ANSWER_TIMEOUT_SECONDS; it may still succeed later.

        The thread calls `on_sleep(permit)` before a sleep, and `on_wake()` after the sleep. The call of `permit()`
        allows the sleep; without that call, the sleep begins after ANSWER_TIMEOUT_SECONDS.
        """
        try:
            iokit, core = (ctypes.CDLL(path) for path in self._paths)
            declare_functions(iokit, core)
        except (OSError, AttributeError):
            return False
        self._core = core
        registered: list[bool] = []
        thread = threading.Thread(
            target=self._listen, args=(iokit, core, on_sleep, on_wake, registered), name="sleep notice", daemon=True
        )
        thread.start()
        self._running.wait(ANSWER_TIMEOUT_SECONDS)
        return bool(registered)

    def stop(self) -> None:
        """Stop listening and end the thread. Wait for its end at most ANSWER_TIMEOUT_SECONDS.

        Do nothing without a registration.
        """
        if self._core is not None and self._loop is not None and not self._ended.is_set():
            self._core.CFRunLoopStop(self._loop)
            self._ended.wait(ANSWER_TIMEOUT_SECONDS)

    def _listen(
        self,
        iokit: ctypes.CDLL,
        core: ctypes.CDLL,
        on_sleep: Callable[[Callable[[], None]], None],
        on_wake: Callable[[], None],
        registered: list[bool],
    ) -> None:
        port, notifier, root = c_void_p(), c_uint32(), c_uint32()

        def on_power_event(_: int | None, __: int, message: int, argument: int | None) -> None:
            if message == CAN_SLEEP:
                iokit.IOAllowPowerChange(root, argument or 0)
            elif message == WILL_SLEEP:
                acknowledged = threading.Event()
                on_sleep(acknowledged.set)
                acknowledged.wait(ANSWER_TIMEOUT_SECONDS)
                iokit.IOAllowPowerChange(root, argument or 0)
            elif message == POWERED_ON:
                on_wake()

        callback = _CALLBACK(on_power_event)  # this frame keeps a reference while the run loop can call it
        root.value = iokit.IORegisterForSystemPower(None, byref(port), callback, byref(notifier))
        if root.value and port.value:
            self._loop = core.CFRunLoopGetCurrent()
            mode = c_void_p.in_dll(core, "kCFRunLoopDefaultMode")
            core.CFRunLoopAddSource(self._loop, iokit.IONotificationPortGetRunLoopSource(port), mode)
            registered.append(True)
            self._running.set()
            core.CFRunLoopRun()
            iokit.IODeregisterForSystemPower(byref(notifier))
        self._running.set()
        self._ended.set()


def declare_functions(iokit: ctypes.CDLL, core: ctypes.CDLL) -> None:
    """Declare the argument and result types of the functions used, because ctypes truncates pointers to 32 bits.

    Raise AttributeError if a function is missing.
    """
    register = iokit.IORegisterForSystemPower
    register.argtypes, register.restype = [c_void_p, POINTER(c_void_p), _CALLBACK, POINTER(c_uint32)], c_uint32
    iokit.IODeregisterForSystemPower.argtypes = [POINTER(c_uint32)]
    iokit.IODeregisterForSystemPower.restype = c_int
    iokit.IOAllowPowerChange.argtypes, iokit.IOAllowPowerChange.restype = [c_uint32, c_ssize_t], c_int
    source = iokit.IONotificationPortGetRunLoopSource
    source.argtypes, source.restype = [c_void_p], c_void_p
    core.CFRunLoopGetCurrent.argtypes, core.CFRunLoopGetCurrent.restype = [], c_void_p
    core.CFRunLoopAddSource.argtypes, core.CFRunLoopAddSource.restype = [c_void_p, c_void_p, c_void_p], None
    core.CFRunLoopRun.argtypes, core.CFRunLoopRun.restype = [], None
    core.CFRunLoopStop.argtypes, core.CFRunLoopStop.restype = [c_void_p], None
