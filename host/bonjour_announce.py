"""Announce a coordinator, or a Mac that has not joined, on the LAN by Bonjour.

An announcement is only a hint: certificates prove identity, and links prove liveness. After an error of zeroconf or of
the list of addresses, the next check of the addresses tries again. Of several errors in a row, only the first is
logged. No other part depends on Bonjour: `cluster join URL` needs no multicast. zeroconf binds its sockets to addresses
once. After a change of addresses, a new instance of zeroconf therefore replaces the old one.
"""

import asyncio
import contextlib
import ipaddress
from collections.abc import Sequence

import structlog
from zeroconf import IPVersion
from zeroconf.asyncio import AsyncServiceInfo, AsyncZeroconf

from host.local_names import read_addresses
from wire.bonjour_record import BonjourRecord, build_instance_name, to_txt
from wire.identity import SERVICE_TYPE

log = structlog.get_logger()

ADDRESS_POLL_SECONDS = 5.0
"""Interval of checks of the addresses of this machine, in seconds."""
GOODBYE_TIMEOUT_SECONDS = 3.0
"""Maximum seconds of each step of a withdrawal: unregister the record, and close zeroconf."""


class Announcement:
    """Bonjour announcement of this machine on the LAN, from `start` to `close`.

    `advert` has the TXT fields of the record. `name` is a display name. `identity`, the id of cluster or machine, makes
    the name of the record unique. `port` is the announced TCP port. `interfaces` are the addresses to announce; None
    for those of `read_addresses`, which are checked every `look_every` seconds.
    """

    def __init__(
        self,
        advert: BonjourRecord,
        name: str,
        identity: str,
        port: int,
        *,
        interfaces: Sequence[str] | None = None,
        look_every: float = ADDRESS_POLL_SECONDS,
    ) -> None:
        self._advert = advert
        self._instance = build_instance_name(name, identity)
        self._port = port
        self._fixed_addresses = interfaces
        self._check_interval_seconds = look_every
        self._announced: list[str] = []
        self._zeroconf: AsyncZeroconf | None = None
        self._task: asyncio.Task[None] | None = None
        self._failure_logged = False
        self.ready = asyncio.Event()
        """Set while the record is announced."""

    def start(self) -> None:
        """Start announcing in the background. Call this on a running event loop."""
        self._task = asyncio.create_task(self._follow_addresses(), name="bonjour")

    async def close(self) -> None:
        """Withdraw the record and stop, within twice `GOODBYE_TIMEOUT_SECONDS`."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._withdraw()

    async def _follow_addresses(self) -> None:
        while True:
            current_addresses = self._read_addresses()
            if current_addresses != self._announced:
                await self._withdraw()
                await self._announce(current_addresses)
            await asyncio.sleep(self._check_interval_seconds)

    def _read_addresses(self) -> list[str]:
        """Return the addresses to announce: those announced now if the system cannot list its addresses."""
        if self._fixed_addresses is not None:
            return list(self._fixed_addresses)
        try:
            return read_addresses()
        except OSError as error:
            self._log_failure_once(error)
            return self._announced

    async def _announce(self, current_addresses: list[str]) -> None:
        if not current_addresses:
            return
        v4 = [address for address in current_addresses if ipaddress.ip_address(address).version == 4]
        try:
            self._zeroconf = AsyncZeroconf(
                v4 or current_addresses, ip_version=IPVersion.V4Only if v4 else IPVersion.V6Only
            )
            register = self._zeroconf.async_register_service  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
            await (await register(self._build_record(current_addresses), allow_name_change=True))
        except Exception as error:  # zeroconf raises RuntimeErrors as well
            await self._withdraw()
            self._log_failure_once(error)
            return
        self._announced, self._failure_logged = current_addresses, False
        self.ready.set()
        log.info("bonjour announced", name=self._instance, addresses=current_addresses)

    async def _withdraw(self) -> None:
        zeroconf, self._announced = self._zeroconf, []
        self.ready.clear()
        if zeroconf is None:
            return
        with contextlib.suppress(Exception):  # zeroconf raises RuntimeErrors as well
            async with asyncio.timeout(GOODBYE_TIMEOUT_SECONDS):
                await zeroconf.async_unregister_all_services()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(GOODBYE_TIMEOUT_SECONDS):
                await zeroconf.async_close()
        self._zeroconf = None  # not before: `close` cancels a withdrawal for new addresses, and withdraws again

    def _build_record(self, addresses: list[str]) -> AsyncServiceInfo:
        label = self._instance.removesuffix("." + SERVICE_TYPE)
        host = f"macpool-{label.rpartition('-')[2]}.local."
        return AsyncServiceInfo(
            SERVICE_TYPE,
            self._instance,
            self._port,
            properties=to_txt(self._advert),
            server=host,
            parsed_addresses=addresses,
        )

    def _log_failure_once(self, error: Exception) -> None:
        if not self._failure_logged:
            self._failure_logged = True
            log.warning("bonjour unavailable", error=str(error) or type(error).__name__)
