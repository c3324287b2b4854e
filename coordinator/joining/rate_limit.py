"""Rate limit per address: token buckets in bounded memory. `now` is monotonic seconds."""

import ipaddress
from collections import OrderedDict

MAX_ADDRESSES = 4096
"""Maximum number of addresses with a token bucket. Above that, the least recently used bucket is removed."""


class RateLimit:
    """Token bucket per address: `burst` attempts in a row, refilled with `per_minute` attempts per minute.

    An IPv6 /64 network counts as one address (`get_network`).
    """

    def __init__(self, per_minute: float = 30.0, burst: int = 10) -> None:
        self._rate = per_minute / 60.0
        self._burst = float(burst)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    @property
    def buckets(self) -> int:
        """Number of addresses with a bucket."""
        return len(self._buckets)

    def count_attempt(self, address: str, now: float) -> float:
        """Count an attempt of an IP address and return 0. At the limit, return the seconds until the next attempt.

        `now` is in monotonic seconds.
        """
        network = get_network(address)
        left, at = self._buckets.pop(network, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._rate)
        allowed = left >= 1.0
        self._buckets[network] = (left - 1.0 if allowed else left, now)
        if len(self._buckets) > MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (1.0 - left) / self._rate


def get_network(address: str) -> str:
    """Return the key under which an address is counted: an IPv4 address, or the /64 network of an IPv6 address.

    An IPv4-mapped IPv6 address counts as its IPv4 address. A text that is not an IP address is returned unchanged.
    """
    try:
        known = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(known, ipaddress.IPv4Address):
        return str(known)
    return str(known.ipv4_mapped or ipaddress.ip_network((known, 64), strict=False))
