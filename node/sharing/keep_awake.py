"""Decides when this Mac must not fall asleep by itself: while it works, always, or never (`node.stay_awake`)."""

from collections.abc import Callable

from host.sleep_inhibitor import Awake

LINGER_SECONDS = 60.0
"""For so long after the last request it stays awake: the next one of a chat comes soon."""


class Wakeful:
    """Looks whether there is work, and holds the machine awake. `clock` gives seconds."""

    def __init__(self, rule: str, busy: Callable[[], bool], clock: Callable[[], float], awake: Awake) -> None:
        self._rule = rule
        self._busy = busy
        self._clock = clock
        self._awake = awake
        self._worked_at = -LINGER_SECONDS

    def look(self) -> None:
        """Hold or let go, as things are now."""
        now = self._clock()
        if self._busy():
            self._worked_at = now
        self._awake.hold(self._rule == "always" or (self._rule == "busy" and now - self._worked_at < LINGER_SECONDS))

    def stop(self) -> None:
        """Let go."""
        self._awake.hold(False)
