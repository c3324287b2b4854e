"""Finds coordinators on the LAN, and Macs that have not joined.

A record is a hint from anybody: its texts are made printable, its addresses are only candidates, and the coordinator
is believed when its certificate proves it. A zeroconf failure is logged once and looks like an empty LAN; joining by
URL never needs multicast.
"""

import asyncio
import contextlib
import ipaddress
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

import structlog
from zeroconf import Error, IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from host.bonjour_announce import addresses
from node.agent.enrollment import proves_itself
from node.agent.identity import Identity
from wire.bonjour_record import (
    cluster_hint,
    from_txt,
    shown_name,
)  # fmt: skip
from wire.identity import SERVICE_TYPE

log = structlog.get_logger()

LOOK_EVERY = 5.0
"""Seconds between looks at our own addresses."""
GOODBYE_WITHIN = 3.0
"""Seconds that saying goodbye may take at the end."""
RESOLVE_WITHIN = 3000
"""Milliseconds that one record may take to resolve."""
SETTLE = 1.5
"""Seconds to wait for others after the first was found: two clusters on one LAN must both be seen, and somebody who
announces our cluster's id must not hide the coordinator that can prove it. A responder sends a record at most once a
second (RFC 6762, section 6), so the answer of one that has just announced itself comes a second later."""
MOST_FOUND = 64
STAGGER = 1.0
"""Seconds after which the next address is tried beside those that have not answered."""


@dataclass(frozen=True, slots=True)
class Found:
    """A record: a name for people, the cluster's hint (12 hex digits), the fingerprint's hint, where to dial."""

    name: str
    cluster: str
    addresses: tuple[str, ...]
    port: int
    protocol: int = 0
    version: str = ""
    fingerprint: str = ""

    @property
    def candidates(self) -> tuple[str, ...]:
        """Give `host:port` for every address, the best first."""
        return tuple(f"[{ip}]:{self.port}" if ":" in ip else f"{ip}:{self.port}" for ip in self.addresses)


async def find(
    seconds: float, cluster: str = "", *, role: str = "coord", interfaces: Sequence[str] | None = None
) -> list[Found]:
    """Look for coordinators for at most `seconds`, shorter once something was found.

    `cluster` (a whole id) leaves out all others. An empty list also when multicast is not possible here.
    """
    where = list(interfaces) if interfaces is not None else addresses()
    v4 = [address for address in where if ipaddress.ip_address(address).version == 4]
    if not where:
        return []
    try:
        zeroconf = AsyncZeroconf(v4 or where, ip_version=IPVersion.V4Only if v4 else IPVersion.V6Only)
    except (OSError, Error) as error:
        log.warning("bonjour unavailable", error=str(error) or type(error).__name__)
        return []
    search = _Search(zeroconf.zeroconf, role, cluster_hint(cluster))
    try:
        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE_TYPE, handlers=[search.heard])
        await search.wait(seconds)
        await browser.async_cancel()
    except (OSError, Error) as error:
        log.warning("bonjour unavailable", error=str(error) or type(error).__name__)
    finally:
        search.stop()
        with contextlib.suppress(OSError, Error, TimeoutError):
            await zeroconf.async_close()
    return sorted(search.found.values(), key=lambda found: found.name)


class _Search:
    """Collects what answers, resolved and cleaned."""

    def __init__(self, zeroconf: Zeroconf, role: str, hint: str) -> None:
        self._zeroconf = zeroconf
        self._role = role
        self._hint = hint
        self._tasks: set[asyncio.Task[None]] = set()
        self._first = asyncio.Event()
        self.found: dict[str, Found] = {}

    def heard(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange) -> None:
        """Take an event of the browser: resolve what came, drop what said goodbye."""
        if state_change is ServiceStateChange.Removed:
            self.found.pop(name, None)
        elif len(self._tasks) < MOST_FOUND:
            task = asyncio.create_task(self._resolve(service_type, name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def wait(self, seconds: float) -> None:
        """Return after `seconds`, or SETTLE after the first find."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._first.wait()
                await asyncio.sleep(SETTLE)

    def stop(self) -> None:
        """Give up what is being resolved."""
        for task in self._tasks:
            task.cancel()

    async def _resolve(self, service_type: str, name: str) -> None:
        with contextlib.suppress(OSError, Error, ValueError):
            record = AsyncServiceInfo(service_type, name)
            if await record.async_request(self._zeroconf, RESOLVE_WITHIN):
                self._keep(name, record)

    def _keep(self, name: str, record: AsyncServiceInfo) -> None:
        advert = from_txt(record.properties)
        if advert is None or advert.role != self._role or (self._hint and advert.cluster != self._hint):
            return
        ips = tuple(dict.fromkeys(record.parsed_scoped_addresses()))
        if not ips or not record.port or len(self.found) >= MOST_FOUND:
            return
        self.found[name] = Found(
            shown_name(name), advert.cluster, ips, record.port, advert.protocol, advert.version, advert.fingerprint
        )
        self._first.set()


async def locate(
    identity: Identity, seconds: float, *, interfaces: Sequence[str] | None = None, besides: Collection[str] = ()
) -> str | None:
    """Find our coordinator at the remembered addresses and by Bonjour, side by side: dead addresses hold nothing up.
    `besides` are addresses to leave out.

    Gives the `host:port` where its certificate proved it, None when it is nowhere.
    """

    async def proven(address: str) -> bool:
        return await proves_itself(identity, address)

    async def announced() -> str | None:
        heard = await find(seconds, identity.cluster, interfaces=interfaces)
        return await first_proven(_without([one for found in heard for one in found.candidates], besides), proven)

    known = _without(identity.addresses, besides)
    ways = [asyncio.ensure_future(way) for way in (first_proven(known, proven), announced())]
    try:
        for way in asyncio.as_completed(ways):
            address = await way
            if address is not None:
                return address
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
    return None


def _without(addresses: Sequence[str], besides: Collection[str]) -> list[str]:
    return [address for address in addresses if address not in besides]


async def first_proven(
    candidates: Sequence[str], proven: Callable[[str], Awaitable[bool]], stagger: float = STAGGER
) -> str | None:
    """Try addresses side by side, each STAGGER seconds after the one before or when all before have failed; give the
    first that is proven."""
    waiting = list(dict.fromkeys(candidates))
    running: dict[asyncio.Task[bool], str] = {}
    try:
        while waiting or running:
            if waiting:
                address = waiting.pop(0)
                running[asyncio.ensure_future(_truth(proven, address))] = address
            done, _ = await asyncio.wait(
                running, timeout=stagger if waiting else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                address = running.pop(task)
                if task.result():
                    return address
    finally:
        for task in running:
            task.cancel()
    return None


async def _truth(proven: Callable[[str], Awaitable[bool]], address: str) -> bool:
    return await proven(address)
