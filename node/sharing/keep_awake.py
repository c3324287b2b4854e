"""Prevent idle sleep of this Mac while it works, always, or never (`node.stay_awake`)."""

from collections.abc import Callable

from host.sleep_inhibitor import SleepInhibitor

LINGER_SECONDS = 60.0
"""Seconds without idle sleep after the node last worked, because the next request of a chat comes soon."""


class SleepPolicy:
    """Rule that decides whether this Mac may sleep when idle.

    `rule` is the value of `node.stay_awake`. `busy()` returns whether the node works, `clock()` monotonic seconds.
    `awake` prevents idle sleep while it is held.
    """

    def __init__(self, rule: str, busy: Callable[[], bool], clock: Callable[[], float], awake: SleepInhibitor) -> None:
        self._rule = rule
        self._busy = busy
        self._clock = clock
        self._awake = awake
        self._worked_at = -LINGER_SECONDS

    def update(self) -> None:
        """Prevent or allow idle sleep, by the rule and the current work. Call this method periodically.

        With the rule `busy`, sleep is prevented while the node works, and for another `LINGER_SECONDS`. A release can
        block (`SleepInhibitor.set_held`).
        """
        now = self._clock()
        if self._busy():
            self._worked_at = now
        self._awake.set_held(
            self._rule == "always" or (self._rule == "busy" and now - self._worked_at < LINGER_SECONDS)
        )

    def stop(self) -> None:
        """Allow idle sleep. Block until the system tool that prevented it has ended."""
        self._awake.set_held(False)
