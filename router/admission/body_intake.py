"""Bound the bytes of long request bodies that are received and parsed concurrently, for each API key.

Without a bound, two hundred connections that send half of 8 MiB and then stop occupy 800 MiB for a minute. Before the
rest of a body is read, the body reserves its announced length, or the maximum length if none is announced. If the limit
of its key is reached, the body waits, in order of arrival. Bodies of other keys, and bodies that are being received,
are not delayed.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class _KeyIntake:
    """Reserved bytes of one key (`taken`), at most `most` unless a single body is longer, and its waiting bodies."""

    most: int
    taken: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque[tuple[int, asyncio.Future[None]]])

    def fits(self, size: int) -> bool:
        return not self.taken or self.taken + size <= self.most

    def reserve(self, size: int) -> None:
        self.taken += size

    def release(self, size: int) -> None:
        self.taken -= size

    def admit_waiting(self) -> None:
        while self.waiting:
            size, turn = self.waiting[0]
            if turn.cancelled():  # its task has not run since
                self.waiting.popleft()
                continue
            if not self.fits(size):
                return
            self.waiting.popleft()
            self.reserve(size)
            turn.set_result(None)


class BodyIntake:
    """Limit on the bytes of long bodies that each API key has in transfer at the same time.

    `most` is the limit of one key in bytes. A single body may be longer. While such a body is received, all other
    bodies of its key wait.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lanes: dict[str, _KeyIntake] = {}

    @property
    def keys(self) -> frozenset[str]:
        """Ids of the API keys with reserved bytes or waiting bodies."""
        return frozenset(self._lanes)

    async def take(self, key: str, size: int) -> None:
        """Wait until the limit of a key allows a body of `size` bytes, and reserve these bytes.

        The wait has no time limit. The caller must call `release` later, unless this call was cancelled.
        """
        lane = self._lanes.setdefault(key, _KeyIntake(self._most))
        if not lane.waiting and lane.fits(size):
            lane.reserve(size)
            return
        turn = asyncio.get_running_loop().create_future()
        lane.waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # admitted in the same step of the loop
                self.release(key, size)
            elif self._lanes.get(key) is lane:
                self._admit_waiting(key, lane)
            raise

    def release(self, key: str, size: int) -> None:
        """Release the bytes that `take` reserved, and admit waiting bodies of the key."""
        lane = self._lanes[key]
        lane.release(size)
        self._admit_waiting(key, lane)

    def _admit_waiting(self, key: str, lane: _KeyIntake) -> None:
        lane.admit_waiting()
        if not lane.taken:
            self._lanes.pop(key, None)
