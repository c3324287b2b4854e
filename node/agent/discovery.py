"""Find coordinators, and Macs that have not joined, on the LAN by Bonjour.

A record is an untrusted hint. Its texts are made printable, and its addresses are only candidates. A coordinator is
trusted only when its certificate proves its role. A zeroconf failure is logged and handled like an empty LAN.
Joining by URL never needs multicast.
"""

import asyncio
import contextlib
import ipaddress
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass

import structlog
from zeroconf import Error, IPVersion, ServiceStateChange, Zeroconf
from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf

from host.local_names import list_addresses
from node.agent.enrollment import proves_itself
from node.agent.identity import NodeIdentity
from wire.bonjour_record import (
    from_txt,
    get_shown_name,
    shorten_cluster_id,
)
from wire.identity import SERVICE_TYPE

log = structlog.get_logger()

RESOLVE_TIMEOUT_MS = 3000
"""Timeout in milliseconds of the resolution of one record."""
SETTLE_SECONDS = 1.5
"""Seconds to wait for more records after the first.

Two clusters on one LAN must both be found, and a false announcement of a cluster's id must not hide the real
coordinator. A responder sends a record at most once a second (RFC 6762, section 6). The answer of a responder that has
just announced itself therefore comes a second later.
"""
MAX_RECORDS = 64
"""Maximum number of services that a search returns, and of records that are resolved at the same time."""
STAGGER_SECONDS = 1.0
"""Seconds after which the next address is tried in parallel with those that have not answered."""


@dataclass(frozen=True, slots=True)
class DiscoveredService:
    """Resolved Bonjour record of a coordinator, or of a Mac that has not joined. All values are untrusted."""

    name: str
    """Printable name for people."""
    cluster: str
    """First 12 hex digits of the cluster id; empty for a Mac that has not joined."""
    addresses: tuple[str, ...]
    """IP addresses to dial."""
    port: int
    protocol: int = 0
    """Protocol version."""
    version: str = ""
    """Version of Macpool."""
    fingerprint: str = ""
    """First 16 hex digits of the SHA-256 of the CA."""

    @property
    def candidates(self) -> tuple[str, ...]:
        """Addresses to dial as `host:port`."""
        return tuple(f"[{ip}]:{self.port}" if ":" in ip else f"{ip}:{self.port}" for ip in self.addresses)


async def find_services(
    seconds: float, cluster: str = "", *, role: str = "coord", interfaces: Sequence[str] | None = None
) -> list[DiscoveredService]:
    """Search the LAN by Bonjour, and return the services found, sorted by name; none if multicast is not possible.

    The search ends after `seconds`, or `SETTLE_SECONDS` after the first record if that is earlier. `role` is `coord`
    for coordinators, `new` for Macs that have not joined. A `cluster` id limits the search to one cluster. `interfaces`
    are the addresses of this machine to search from; None for all. IPv6 addresses are used only if there is no IPv4
    address among them.
    """
    where = list(interfaces) if interfaces is not None else list_addresses()
    v4 = [address for address in where if ipaddress.ip_address(address).version == 4]
    if not where:
        return []
    try:
        zeroconf = AsyncZeroconf(v4 or where, ip_version=IPVersion.V4Only if v4 else IPVersion.V6Only)
    except (OSError, Error) as error:
        log.warning("bonjour unavailable", error=str(error) or type(error).__name__)
        return []
    search = _Search(zeroconf.zeroconf, role, shorten_cluster_id(cluster))
    try:
        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE_TYPE, handlers=[search.on_service_event])
        await search.wait(seconds)
        await browser.async_cancel()
    except (OSError, Error) as error:
        log.warning("bonjour unavailable", error=str(error) or type(error).__name__)
    finally:
        search.stop()
        with contextlib.suppress(OSError, Error, TimeoutError):
            await zeroconf.async_close()
    return sorted(search.services.values(), key=lambda service: service.name)


class _Search:
    """One Bonjour search for services of a role: resolves their records and stores the valid ones."""

    def __init__(self, zeroconf: Zeroconf, role: str, hint: str) -> None:
        self._zeroconf = zeroconf
        self._role = role
        self._hint = hint
        self._tasks: set[asyncio.Task[None]] = set()
        self._first = asyncio.Event()
        self.services: dict[str, DiscoveredService] = {}

    def on_service_event(
        self, zeroconf: Zeroconf, service_type: str, name: str, state_change: ServiceStateChange
    ) -> None:
        """Handle an event of the browser: resolve a new record, remove a record that was withdrawn."""
        if state_change is ServiceStateChange.Removed:
            self.services.pop(name, None)
        elif len(self._tasks) < MAX_RECORDS:
            task = asyncio.create_task(self._resolve(service_type, name))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def wait(self, seconds: float) -> None:
        """Wait until `SETTLE_SECONDS` after the first record, at most `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._first.wait()
                await asyncio.sleep(SETTLE_SECONDS)

    def stop(self) -> None:
        """Cancel pending resolutions."""
        for task in self._tasks:
            task.cancel()

    async def _resolve(self, service_type: str, name: str) -> None:
        with contextlib.suppress(OSError, Error, ValueError):
            record = AsyncServiceInfo(service_type, name)
            if await record.async_request(self._zeroconf, RESOLVE_TIMEOUT_MS):
                self._keep(name, record)

    def _keep(self, name: str, record: AsyncServiceInfo) -> None:
        advert = from_txt(record.properties)
        if advert is None or advert.role != self._role or (self._hint and advert.cluster != self._hint):
            return
        ips = tuple(dict.fromkeys(record.parsed_scoped_addresses()))
        if not ips or not record.port or len(self.services) >= MAX_RECORDS:
            return
        self.services[name] = DiscoveredService(
            get_shown_name(name), advert.cluster, ips, record.port, advert.protocol, advert.version, advert.fingerprint
        )
        self._first.set()


async def locate_coordinator(
    identity: NodeIdentity, seconds: float, *, interfaces: Sequence[str] | None = None, besides: Collection[str] = ()
) -> str | None:
    """Search for the coordinator of this node at its stored addresses and by Bonjour in parallel.

    Return the first address (`host:port`) at which a certificate proves the coordinator. Return None if there is none,
    or, with a log line, if the certificate of this node cannot be loaded. Raise `ValueError` if the stored CA is no
    certificate.

    Bonjour searches for at most `seconds`. Addresses in `besides` are not tried. `interfaces` are the addresses of this
    machine to search from; None for all.
    """

    async def is_proven(address: str) -> bool:
        return await proves_itself(identity, address)

    async def find_announced() -> str | None:
        services = await find_services(seconds, identity.cluster, interfaces=interfaces)
        return await find_first_proven(
            _exclude([candidate for service in services for candidate in service.candidates], besides), is_proven
        )

    known = _exclude(identity.addresses, besides)
    ways = [asyncio.ensure_future(way) for way in (find_first_proven(known, is_proven), find_announced())]
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


def _exclude(addresses: Sequence[str], besides: Collection[str]) -> list[str]:
    return [address for address in addresses if address not in besides]


async def find_first_proven(
    candidates: Sequence[str], is_proven: Callable[[str], Awaitable[bool]], stagger: float = STAGGER_SECONDS
) -> str | None:
    """Check addresses in parallel with `is_proven`. Return the first that passes; None if all fail.

    The check of an address starts `stagger` seconds after the check of the previous address has started, or at once
    after a failed check. An error that `is_proven` raises ends the search and is raised.
    """
    waiting = list(dict.fromkeys(candidates))
    running: dict[asyncio.Task[bool], str] = {}
    try:
        while waiting or running:
            if waiting:
                address = waiting.pop(0)
                running[asyncio.ensure_future(_await_proof(is_proven, address))] = address
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


async def _await_proof(is_proven: Callable[[str], Awaitable[bool]], address: str) -> bool:
    return await is_proven(address)
