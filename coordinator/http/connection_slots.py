"""Connection limits of the HTTP port, and choice of the connection that closes for a new one.

Every connection has a slot from its acceptance, before any handshake. A handshake costs 60 KiB, and one client without
a key could use all file descriptors of this process. An address without a valid key has few slots. If no slot is free,
the connection with the longest idle time closes for the new one. A connection with an unanswered request never closes
for another. A handshake counts as idle.
"""

import ipaddress
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

MAX_CONNECTIONS = 4096
"""Most connections in total."""
RESERVED_FILES = 512
"""Descriptors reserved for the nodes' links, the database, the log and child processes."""
MAX_HANDSHAKES = 256
"""Most concurrent TLS handshakes, over all addresses."""
MAX_NEW_CONNECTIONS = 128
"""Most connections of an address without a valid key; set by `http.max_connections_without_key`."""
MAX_KNOWN_ADDRESSES = 4096
"""Most addresses remembered for their valid key."""


def connections_for(files: int) -> int:
    """Return the number of connections for a limit of `files` open files: at least 16, at most `MAX_CONNECTIONS`."""
    return max(16, min(MAX_CONNECTIONS, files - RESERVED_FILES))


@lru_cache(maxsize=1024)
def origin(address: str) -> str:
    """Return the key under which an address is counted: the address, or the /64 network of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False).network_address)


@lru_cache(maxsize=1024)
def is_this_machine(address: str) -> bool:
    """Return whether an address is of this machine, whose programs are trusted."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return True  # a socket of this machine has no address


@dataclass(slots=True, eq=False)
class ConnectionSlot:
    """Slot of one connection of the HTTP port. `ConnectionSlots.take` creates it."""

    origin: str
    """Key under which the client's address is counted (`origin()`)."""
    places: "ConnectionSlots"
    end: Callable[[], object] = bool
    """Function that closes the connection for a new one."""
    proven: bool = False
    """Whether the client has presented a valid key."""

    def handshake_done(self) -> None:
        """Record the end of this connection's TLS handshake."""
        self.places.handshake_done(self)

    def work(self) -> None:
        """Mark the connection as busy, because a request has begun. It then never closes for a new one."""
        self.places.work(self)

    def rest(self) -> None:
        """Mark the connection as idle, because all of its requests are answered."""
        self.places.rest(self)

    def know(self) -> None:
        """Record that the client has presented a valid key, after which its origin may have more connections."""
        self.proven = True
        self.places.know(self.origin)

    def leave(self) -> None:
        """Release the slot."""
        self.places.leave(self)


@dataclass(slots=True)
class _Origin:
    """Connections of one origin; `resting` has the idle ones, longest idle first."""

    count: int = 0
    resting: OrderedDict[ConnectionSlot, None] = field(default_factory=OrderedDict[ConnectionSlot, None])


class ConnectionSlots:
    """Slots of all connections of the HTTP port.

    The limits are `most` in total, `unauthenticated` for an origin without a valid key, and half of `most` for an
    origin with one. At most `handshakes` TLS handshakes run at a time. Origins for which `trusted` returns true need no
    key.
    """

    def __init__(
        self,
        most: int = MAX_CONNECTIONS,
        unauthenticated: int = MAX_NEW_CONNECTIONS,
        handshakes: int = MAX_HANDSHAKES,
        trusted: Callable[[str], bool] = is_this_machine,
    ) -> None:
        self._most = most
        self._unauthenticated = unauthenticated
        self._handshakes = handshakes
        self._trusted = trusted
        self._taken: set[ConnectionSlot] = set()
        self._origins: dict[str, _Origin] = {}
        self._resting: OrderedDict[ConnectionSlot, None] = OrderedDict()
        self._shaking: OrderedDict[ConnectionSlot, None] = OrderedDict()
        self._known: OrderedDict[str, None] = OrderedDict()
        self.shed = 0
        """Number of idle connections that were closed for a new one."""
        self.refused = 0
        """Number of connections for which no slot was free."""

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, address: str) -> ConnectionSlot | None:
        """Reserve a slot for a new connection, if necessary by closing an idle one. Return None if no slot is free."""
        where = origin(address)
        mine = self._origins.get(where)
        if mine is not None and mine.count >= self._allowed(where) and not self._shed(mine.resting):
            self.refused += 1
            return None
        if len(self._shaking) >= self._handshakes:
            self._shed(self._shaking)
        if len(self._taken) >= self._most and not self._shed(self._resting):
            self.refused += 1
            return None
        place = ConnectionSlot(where, self)
        self._taken.add(place)
        self._shaking[place] = None
        self._origins.setdefault(where, _Origin()).count += 1
        self.rest(place)
        return place

    def _allowed(self, where: str) -> int:
        return self._most // 2 if where in self._known or self._trusted(where) else self._unauthenticated

    def _shed(self, among: OrderedDict[ConnectionSlot, None]) -> bool:
        """Close the connection with the longest idle time. Return False if there is none."""
        if not among:
            return False
        oldest = next(iter(among))
        self.shed += 1
        self.leave(oldest)
        oldest.end()
        return True

    def handshake_done(self, place: ConnectionSlot) -> None:
        """Record the end of a connection's TLS handshake."""
        self._shaking.pop(place, None)

    def work(self, place: ConnectionSlot) -> None:
        """Mark a connection as busy, because a request has begun."""
        self._resting.pop(place, None)
        if place in self._taken:
            self._origins[place.origin].resting.pop(place, None)

    def rest(self, place: ConnectionSlot) -> None:
        """Mark a connection as idle, because all of its requests are answered."""
        if place not in self._taken:
            return
        for order in (self._resting, self._origins[place.origin].resting):
            order[place] = None
            order.move_to_end(place)

    def know(self, where: str) -> None:
        """Record that a client of the origin `where` has presented a valid key."""
        self._known[where] = None
        self._known.move_to_end(where)
        if len(self._known) > MAX_KNOWN_ADDRESSES:
            self._known.popitem(last=False)

    def leave(self, place: ConnectionSlot) -> None:
        """Release the slot of a connection. Do nothing if it is released already."""
        if place not in self._taken:
            return
        self.work(place)
        self.handshake_done(place)
        self._taken.discard(place)
        mine = self._origins[place.origin]
        mine.count -= 1
        if not mine.count:
            del self._origins[place.origin]
