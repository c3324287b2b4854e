"""Who may have how many connections to the HTTP port, and which of them ends when there is no room for a new one.

Every connection has a place from the moment when it is accepted, before any handshake: there each costs 60 KiB, and a
stranger could take every descriptor of this process. An address of which no good key was seen yet has few places. When
places run out, the connection that has been at rest for longest ends, and the new one takes its place; one that is
being answered never ends for another. A handshake counts as rest.
"""

import ipaddress
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

MOST_CONNECTIONS = 4096
RESERVED_FILES = 512
"""Descriptors that are kept for the nodes' links, the database, the log and child processes."""
MOST_HANDSHAKES = 256
"""TLS handshakes at a time, of all addresses."""
STRANGER_CONNECTIONS = 128
"""Connections of an address that has shown no good key; `http.stranger_connections` sets it."""
MAX_KNOWN = 4096
"""Addresses that are remembered for their good key."""


def room_for(files: int) -> int:
    """Return how many connections fit into `files` descriptors."""
    return max(16, min(MOST_CONNECTIONS, files - RESERVED_FILES))


@lru_cache(maxsize=1024)
def origin(address: str) -> str:
    """Return whose address this is: itself, or for IPv6 its network of 64 bits, which one host may have to itself."""
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
    """Return whether an origin is this machine, whose programs are not strangers to each other."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return True  # a socket of this machine has no address


@dataclass(slots=True, eq=False)
class Place:
    """One connection. `end` closes it; `proven` once its client has shown a good key."""

    origin: str
    places: "Places"
    end: Callable[[], object] = bool
    proven: bool = False

    def greeted(self) -> None:
        """Note that the handshake is over."""
        self.places.greeted(self)

    def work(self) -> None:
        """Note that a request has begun."""
        self.places.work(self)

    def rest(self) -> None:
        """Note that everything is answered."""
        self.places.rest(self)

    def know(self) -> None:
        """Note that its client has shown a good key."""
        self.proven = True
        self.places.know(self.origin)

    def leave(self) -> None:
        """Give the place back."""
        self.places.leave(self)


@dataclass(slots=True)
class _Origin:
    """The connections of one origin; those at rest, the longest first."""

    count: int = 0
    resting: OrderedDict[Place, None] = field(default_factory=OrderedDict[Place, None])


class Places:
    """See the module. `most` connections in all, `strangers` of an origin without a good key, half of all of others."""

    def __init__(
        self,
        most: int = MOST_CONNECTIONS,
        strangers: int = STRANGER_CONNECTIONS,
        handshakes: int = MOST_HANDSHAKES,
        trusted: Callable[[str], bool] = is_this_machine,
    ) -> None:
        self._most = most
        self._strangers = strangers
        self._handshakes = handshakes
        self._trusted = trusted
        self._taken: set[Place] = set()
        self._origins: dict[str, _Origin] = {}
        self._resting: OrderedDict[Place, None] = OrderedDict()
        self._shaking: OrderedDict[Place, None] = OrderedDict()
        self._known: OrderedDict[str, None] = OrderedDict()
        self.shed = 0
        """Connections at rest that ended for another."""
        self.refused = 0
        """Connections that found no place."""

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, address: str) -> Place | None:
        """Take a place for a new connection; None when there is none."""
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
        place = Place(where, self)
        self._taken.add(place)
        self._shaking[place] = None
        self._origins.setdefault(where, _Origin()).count += 1
        self.rest(place)
        return place

    def _allowed(self, where: str) -> int:
        return self._most // 2 if where in self._known or self._trusted(where) else self._strangers

    def _shed(self, among: OrderedDict[Place, None]) -> bool:
        """End the connection that has been at rest for longest; False when there is none."""
        if not among:
            return False
        oldest = next(iter(among))
        self.shed += 1
        self.leave(oldest)
        oldest.end()
        return True

    def greeted(self, place: Place) -> None:
        """See `Place`."""
        self._shaking.pop(place, None)

    def work(self, place: Place) -> None:
        """See `Place`."""
        self._resting.pop(place, None)
        if place in self._taken:
            self._origins[place.origin].resting.pop(place, None)

    def rest(self, place: Place) -> None:
        """See `Place`."""
        if place not in self._taken:
            return
        for order in (self._resting, self._origins[place.origin].resting):
            order[place] = None
            order.move_to_end(place)

    def know(self, where: str) -> None:
        """See `Place`."""
        self._known[where] = None
        self._known.move_to_end(where)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def leave(self, place: Place) -> None:
        """See `Place`."""
        if place not in self._taken:
            return
        self.work(place)
        self.greeted(place)
        self._taken.discard(place)
        mine = self._origins[place.origin]
        mine.count -= 1
        if not mine.count:
            del self._origins[place.origin]
