"""Bound the long request bodies that are received and parsed at once, for each API key.

Without a bound, two hundred connections that send half of 8 MiB and wait hold 800 MiB for a minute. A body reserves its
announced length before the rest of the body is read. If the limit of its key is reached, the body waits in order of
arrival. Bodies that are being received therefore always complete, and no other key waits.
"""

import asyncio
from collections import deque
from dataclasses import dataclass, field


@dataclass(slots=True)
class _KeyIntake:
    """Bytes reserved by a key's bodies, and its waiting bodies."""

    taken: int = 0
    waiting: deque[tuple[int, asyncio.Future[None]]] = field(default_factory=deque[tuple[int, asyncio.Future[None]]])


class BodyIntake:
    """Limit on the long bodies of each API key that are in transfer: `most` bytes. A single body always fits."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._lanes: dict[str, _KeyIntake] = {}

    @property
    def keys(self) -> frozenset[str]:
        """API keys that have reserved bytes or wait for them."""
        return frozenset(self._lanes)

    async def take(self, key: str, size: int) -> None:
        """Reserve `size` bytes for a body of a key, and wait until the limit allows them.

        `release` must follow, unless this call is cancelled.
        """
        lane = self._lanes.setdefault(key, _KeyIntake())
        if not lane.waiting and self._fits(lane, size):
            lane.taken += size
            return
        turn = asyncio.get_running_loop().create_future()
        lane.waiting.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                lane.waiting.remove((size, turn))
            else:  # admitted in the same step of the loop
                lane.taken -= size
            self._admit(key, lane)
            raise

    def release(self, key: str, size: int) -> None:
        """Release the bytes that `take` reserved, and admit waiting bodies of the key."""
        lane = self._lanes[key]
        lane.taken -= size
        self._admit(key, lane)

    def _fits(self, lane: _KeyIntake, size: int) -> bool:
        return not lane.taken or lane.taken + size <= self._most

    def _admit(self, key: str, lane: _KeyIntake) -> None:
        while lane.waiting and self._fits(lane, lane.waiting[0][0]):
            size, turn = lane.waiting.popleft()
            lane.taken += size
            turn.set_result(None)
        if not lane.taken:
            self._lanes.pop(key, None)
