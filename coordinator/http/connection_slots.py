"""Connection limits of the HTTP port, and choice of the connection that is closed for a new one.

Every connection has a slot from its acceptance, before any handshake. A handshake costs 60 KiB, and one client without
a key could otherwise use all file descriptors of this process. An address without a valid key has few slots. If no slot
is free, the connection with the longest idle time is closed for the new one. A connection with an unanswered request is
never closed for a new one. A handshake counts as idle.
"""

import ipaddress
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

MAX_CONNECTIONS = 4096
"""Maximum connections of the HTTP port in total, even if the limit of open files allows more."""
RESERVED_FILES = 512
"""File descriptors that connections leave free for the nodes' links, the database, the log and child processes."""
MAX_HANDSHAKES = 256
"""Maximum concurrent TLS handshakes, over all addresses. Above that, the oldest handshake is aborted for a new one."""
MAX_NEW_CONNECTIONS = 128
"""Default of `http.max_connections_without_key`, the maximum connections of an address without a valid key."""
MAX_KNOWN_ADDRESSES = 4096
"""Maximum origins (`get_origin`) with a valid key that are remembered.

Above that, the origin whose last valid key is oldest is forgotten.
"""


def compute_max_connections(files: int) -> int:
    """Return the maximum number of connections if this process may open `files` files.

    That is `files` − `RESERVED_FILES`, at least 16 and at most `MAX_CONNECTIONS`.
    """
    return max(16, min(MAX_CONNECTIONS, files - RESERVED_FILES))


@lru_cache(maxsize=1024)
def get_origin(address: str) -> str:
    """Return the key under which an address is counted: an IPv4 address, or the /64 network of an IPv6 address.

    An IPv4-mapped IPv6 address counts as its IPv4 address. The loopback address `::1` and a text that is not an IP
    address are returned unchanged.
    """
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address) or parsed.is_loopback:
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False).network_address)


@lru_cache(maxsize=1024)
def is_this_machine(address: str) -> bool:
    """Return whether an address is loopback.

    A text that is not an IP address, such as that of a local socket, counts as loopback.
    """
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return True  # a socket of this machine has no address


@dataclass(slots=True, eq=False)
class ConnectionSlot:
    """Slot of one connection of the HTTP port, created by `ConnectionSlots.reserve_slot`."""

    origin: str
    """Key under which the client's address is counted (`get_origin`)."""
    slots: "ConnectionSlots"
    close_connection: Callable[[], object] = bool
    """Function that closes the connection to make room for a new one. It does nothing before `bind`."""
    has_valid_key: bool = False
    """Whether the client has presented a valid key."""

    def bind(self, close: Callable[[], object]) -> None:
        """Set the function that closes the connection to make room for a new one."""
        self.close_connection = close

    def record_handshake_end(self) -> None:
        """Record the end of this connection's TLS handshake."""
        self.slots.record_handshake_end(self)

    def mark_busy(self) -> None:
        """Mark the connection as busy, because a request has begun. A busy connection is not closed for a new one."""
        self.slots.mark_busy(self)

    def mark_idle(self) -> None:
        """Mark the connection as idle, because all of its requests are answered."""
        self.slots.mark_idle(self)

    def record_valid_key(self) -> None:
        """Record that the client has presented a valid key, after which its origin may have more connections."""
        self.has_valid_key = True
        self.slots.record_valid_key(self.origin)

    def release(self) -> None:
        """Release the slot for another connection. Do nothing if it is already released."""
        self.slots.release(self)


@dataclass(slots=True)
class _Origin:
    """Connections of one origin; `idle` has the idle ones, longest idle first."""

    taken: set[ConnectionSlot] = field(default_factory=set[ConnectionSlot])
    idle: OrderedDict[ConnectionSlot, None] = field(default_factory=OrderedDict[ConnectionSlot, None])


class ConnectionSlots:
    """Slots of all connections of the HTTP port.

    The limits are `max_connections` in total, half of that for an origin with a valid key, and `max_unauthenticated`
    for an origin without one. At most `max_handshakes` TLS handshakes run at a time. Origins for which `is_trusted`
    returns True need no key.
    """

    def __init__(
        self,
        max_connections: int = MAX_CONNECTIONS,
        max_unauthenticated: int = MAX_NEW_CONNECTIONS,
        max_handshakes: int = MAX_HANDSHAKES,
        is_trusted: Callable[[str], bool] = is_this_machine,
    ) -> None:
        self._max_connections = max_connections
        self._max_unauthenticated = max_unauthenticated
        self._max_handshakes = max_handshakes
        self._is_trusted = is_trusted
        self._taken: set[ConnectionSlot] = set()
        self._origins: dict[str, _Origin] = {}
        self._idle: OrderedDict[ConnectionSlot, None] = OrderedDict()
        self._handshaking: OrderedDict[ConnectionSlot, None] = OrderedDict()
        self._known: OrderedDict[str, None] = OrderedDict()
        self.shed = 0
        """Number of idle connections and unfinished handshakes that were closed for a new connection."""
        self.refused = 0
        """Number of connections that were refused because no slot was free."""

    def __len__(self) -> int:
        return len(self._taken)

    def reserve_slot(self, address: str) -> ConnectionSlot | None:
        """Reserve a slot for a new connection from `address`. Return None if no slot is free.

        At the limit of the address, or the total limit, the connection under that limit with the longest idle time is
        closed. If none is idle, no slot is free. At the limit of TLS handshakes, the oldest handshake is aborted.
        """
        origin = get_origin(address)
        mine = self._origins.get(origin)
        if mine is not None and len(mine.taken) >= self._get_limit(origin) and not self._close_oldest(mine.idle):
            self.refused += 1
            return None
        if len(self._handshaking) >= self._max_handshakes:
            self._close_oldest(self._handshaking)
        if len(self._taken) >= self._max_connections and not self._close_oldest(self._idle):
            self.refused += 1
            return None
        slot = ConnectionSlot(origin, self)
        self._taken.add(slot)
        self._handshaking[slot] = None
        self._origins.setdefault(origin, _Origin()).taken.add(slot)
        self.mark_idle(slot)
        return slot

    def _get_limit(self, origin: str) -> int:
        return (
            self._max_connections // 2
            if origin in self._known or self._is_trusted(origin)
            else self._max_unauthenticated
        )

    def _close_oldest(self, among: OrderedDict[ConnectionSlot, None]) -> bool:
        """Close the connection with the longest idle time. Return False if there is none."""
        if not among:
            return False
        oldest = next(iter(among))
        self.shed += 1
        self.release(oldest)
        oldest.close_connection()
        return True

    def record_handshake_end(self, slot: ConnectionSlot) -> None:
        """Record the end of a connection's TLS handshake."""
        self._handshaking.pop(slot, None)

    def mark_busy(self, slot: ConnectionSlot) -> None:
        """Mark a connection as busy, because a request has begun."""
        self._idle.pop(slot, None)
        if slot in self._taken:
            self._origins[slot.origin].idle.pop(slot, None)

    def mark_idle(self, slot: ConnectionSlot) -> None:
        """Mark a connection as idle, because all of its requests are answered. Ignore a released slot."""
        if slot not in self._taken:
            return
        for order in (self._idle, self._origins[slot.origin].idle):
            order[slot] = None
            order.move_to_end(slot)

    def record_valid_key(self, origin: str) -> None:
        """Record that a client of this origin has presented a valid key.

        Above `MAX_KNOWN_ADDRESSES`, the origin whose last valid key is oldest is forgotten.
        """
        self._known[origin] = None
        self._known.move_to_end(origin)
        if len(self._known) > MAX_KNOWN_ADDRESSES:
            self._known.popitem(last=False)

    def release(self, slot: ConnectionSlot) -> None:
        """Release the slot of a connection. Do nothing if it is already released."""
        if slot not in self._taken:
            return
        self.mark_busy(slot)
        self.record_handshake_end(slot)
        self._taken.discard(slot)
        mine = self._origins[slot.origin]
        mine.taken.discard(slot)
        if not mine.taken:
            del self._origins[slot.origin]
