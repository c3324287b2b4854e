"""Limit repeated log events, because a flood of events would fill the disk.

Within WINDOW_SECONDS, at most BURST_EVENTS events with the same logger, name and subject are admitted. The subject of
an event are the values of its fields such as node, peer, address and reason. The first event of the next window has the
number of events that were not admitted. Pure: time is an argument.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

BURST_EVENTS = 20
"""Maximum number of events with the same logger, name and subject that are admitted in a window."""
WINDOW_SECONDS = 60.0
"""Length of a window in seconds, from its first event."""
MAX_SUBJECTS = 1024
"""Maximum number of counted subjects. At the maximum, expired subjects are deleted.

If that is not enough, all new subjects of an event count as one subject.
"""
_SUBJECT = ("node", "peer", "address", "reason", "why", "condition", "model")


@dataclass(slots=True)
class _RecentEvent:
    since: float
    count: int = 0
    left_out: int = 0

    def begin_window(self, now: float) -> int:
        """Begin a new window, and return the number of events that the last window did not admit."""
        left_out = self.left_out
        self.since, self.count, self.left_out = now, 0, 0
        return left_out

    def count_event(self) -> bool:
        """Count an event, and return whether it is within the limit of the window."""
        self.count += 1
        if self.count <= BURST_EVENTS:
            return True
        self.left_out += 1
        return False


class LogDeduplicator:
    """Filter of repeated log events, by counts of recent events for each subject. Not thread-safe."""

    def __init__(self) -> None:
        self._recent: dict[tuple[str, ...], _RecentEvent] = {}

    @property
    def subjects(self) -> int:
        """Number of combinations of logger, event name and subject with a count."""
        return len(self._recent)

    @property
    def left_out(self) -> int:
        """Number of events that were not admitted and are not yet reported with a later event."""
        return sum(recent.left_out for recent in self._recent.values())

    def admit(self, logger: str, event: str, fields: Mapping[str, Any], now: float) -> int | None:
        """Return None if an event must not be written, else the number of earlier repeats that were not written.

        That number is 0, except for the first event of a window, which has the count of the previous window. `logger`
        and `event` are names, and `fields` are the values of the event. `now` is in seconds of a monotonic clock.
        """
        key = (logger, event, *(str(fields[name])[:100] for name in _SUBJECT if name in fields))
        recent = self._recent.get(key)
        if recent is None:
            if len(self._recent) >= MAX_SUBJECTS:
                self._drop_old_subjects(now)
            if len(self._recent) >= MAX_SUBJECTS:
                key = (logger, event)
            recent = self._recent.setdefault(key, _RecentEvent(now))
        left_out = recent.begin_window(now) if now - recent.since >= WINDOW_SECONDS else 0
        return left_out if recent.count_event() else None

    def _drop_old_subjects(self, now: float) -> None:
        old = [
            key for key, recent in self._recent.items() if now - recent.since >= WINDOW_SECONDS and not recent.left_out
        ]
        for key in old:
            del self._recent[key]
