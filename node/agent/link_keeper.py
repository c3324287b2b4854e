"""Keeper of the connection to the coordinator: dials, detects silence, handles sleep and stop, renews the certificate.

The rules are in `link_state`, as data. This module dials the latest stored address. If that fails, `discovery` checks
the other stored addresses and searches by Bonjour for the cluster's id. A coordinator with a lower
generation than an earlier one is superseded: the keeper closes its link, and avoids its address for a while. With a
renewed certificate the keeper opens a second link, which replaces the first once the coordinator has accepted it.
"""

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass

import structlog

from node.agent import discovery, link_state
from node.agent.connection import CoordinatorLink, DialFailures, dial
from node.agent.identity import (
    IdentityError,
    NodeIdentity,
    adopt_generation,
    create_client_context,
    install_certificate,
    needs_renewal,
    new_csr,
    remove_address,
    store_address,
)
from node.agent.link_state import LinkLife, LinkState
from node.agent.links import CoordinatorLinks
from node.illegal_events import IllegalEvents
from wire.frames import TAGS, CertificateRenewed, Denied, Goodbye, GoodbyeReason, Hello, RenewCertificate, Welcome
from wire.identity import PROTOCOL
from wire.report import Hardware

GOODBYE_SECONDS = 0.2
"""Seconds for a goodbye to leave this machine before it sleeps."""
FIND_TIMEOUT_SECONDS = 3.0
"""Timeout in seconds of a Bonjour search for a coordinator whose address changed."""
SUPERSEDED_ADDRESS_SECONDS = 30.0
"""Seconds for which the address of a superseded coordinator is not dialed."""
SUPERSEDED = "superseded"
"""Denial reason of a superseded coordinator: the generation in this node's Hello is higher than its own."""

log = structlog.get_logger("node.agent.agent")


@dataclass(frozen=True, slots=True)
class LinkTimeouts:
    """Timeouts of a `LinkKeeper` in seconds."""

    silence: float = 10.0
    """Time without received bytes after which the link is aborted."""
    renewal: float = 600.0
    """Time after which a renewal of the certificate without a result is requested again on the same link."""


class ExpelledError(Exception):
    """Raised by `LinkKeeper.run` if the coordinator denied this node for good.

    The text names the reason and the next step. `reason` is machine-readable.
    """

    def __init__(self, denied: Denied) -> None:
        super().__init__(denied.message)
        self.reason = denied.reason


class LinkKeeper:
    """Keeper of the links of this node.

    `version` is the installed version of Macpool. `receive(link, tag, body)` is called for each frame of the
    coordinator, `cancel(number)` for each open request of a lost link. The constructor raises `OSError` or `ValueError`
    if the certificate or the CA of the identity cannot be used.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        version: str,
        hardware: Hardware,
        links: CoordinatorLinks,
        *,
        receive: Callable[[CoordinatorLink, int, bytes], None],
        cancel: Callable[[int], None],
        illegal_events: IllegalEvents,
        timeouts: LinkTimeouts,
    ) -> None:
        self._identity = identity
        self._version = version
        self._hardware = hardware
        self._links = links
        self._receive = receive
        self._cancel = cancel
        self._illegal_events = illegal_events
        self._timeouts = timeouts
        self._instance = uuid.uuid4().hex
        self._context = create_client_context(identity)
        self._life = LinkLife()
        self._changed = asyncio.Event()
        self._superseded: dict[str, float] = {}
        self._failures = DialFailures()
        self._denied = Denied("", "", final=True)
        self._draining = False
        self._renew_from = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self.welcomed = asyncio.Event()
        """Set when the coordinator has accepted a link for the first time."""
        links.request_ended.subscribe(self.handle_ended_request)

    @property
    def name(self) -> str:
        """Display name of this node, as in its identity."""
        return self._identity.name

    async def run(self) -> None:
        """Keep the node linked until `stop`. Raise `ExpelledError` if the coordinator permanently denies the node."""
        while True:
            match self._life.state:
                case LinkState.DIALING:
                    await self._dial_unless_stopped()
                case LinkState.CONNECTED | LinkState.LINKED:
                    await self._watch()
                case LinkState.WAITING:
                    await self._wait_until_left(LinkState.WAITING, self._life.wait)
                    self._apply(link_state.DelayOver())
                case LinkState.ASLEEP:
                    await self._wait_until_left(LinkState.ASLEEP, None)
                case LinkState.EXPELLED:
                    raise ExpelledError(self._denied)
                case LinkState.STOPPED:
                    return

    async def stop(self, drain: float, reason: GoodbyeReason) -> None:
        """Wait at most `drain` seconds for open requests, send a goodbye with `reason` and close the links. `run` then
        returns. Requests that are still open are cancelled when their link ends."""
        self._draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + drain
        while self._links.open_requests and (left := deadline - loop.time()) > 0:
            await self._wait_changed(left)
        self._apply(link_state.LinkStop())
        self._links.send(Goodbye(reason))
        self._links.close_all()

    def fall_asleep(self, acknowledge: Callable[[], None]) -> None:
        """Send a goodbye before this machine sleeps, close the links, and call `acknowledge` after `GOODBYE_SECONDS`.

        `acknowledge` allows the system to sleep. The coordinator resumes the requests of this node on another node, and
        raises no alarm.
        """
        self._apply(link_state.SleepAnnounced())
        self._links.send(Goodbye(GoodbyeReason.ASLEEP))
        self._links.close_all()
        asyncio.get_running_loop().call_later(GOODBYE_SECONDS, acknowledge)

    def wake_up(self, slept: float) -> None:
        """Abort all links after `slept` seconds of sleep, because frames from before the sleep are outdated.

        If `fall_asleep` was called before the sleep, dial at once. Otherwise dial after the delay of any lost link.
        """
        self._links.abort_all(f"this machine slept for {slept:.0f} s")
        self._apply(link_state.WokeUp())

    def handle_ended_request(self) -> None:
        """Make a waiting `stop` count the open requests again. Do nothing while no `stop` waits."""
        if self._draining:
            self._changed.set()

    # frames about the link

    def receive_welcome(self, link: CoordinatorLink, welcome: Welcome) -> bool:
        """Make the link of a Welcome the current one, and store the coordinator's generation and addresses.

        Set `welcomed` and return True. Return False if the coordinator is superseded: the link is then closed, and its
        address removed.
        """
        if welcome.generation < self._identity.generation:
            self._leave_superseded(link)
            return False
        self._identity = adopt_generation(self._identity, welcome.generation, welcome.seal)
        for address in reversed((link.address, *welcome.addresses)):
            self._store_address(address)
        log.info("linked", cluster=welcome.cluster_name, epoch=welcome.epoch, skew=round(time.time() - welcome.time, 3))
        self._links.accept(link)
        self._apply(link_state.LinkAccepted())
        self._renew_from, self._failures = 0.0, DialFailures()
        self.welcomed.set()
        return True

    def receive_denial(self, link: CoordinatorLink, denied: Denied) -> None:
        """Handle the coordinator's denial of this node.

        A final denial ends `run`. For the reason `SUPERSEDED`, close the link and remove its address. Any other denial
        delays the next dial by at least `denied.retry_after` seconds.
        """
        log.error("denied", reason=denied.reason, message=denied.message)
        if denied.reason == SUPERSEDED:
            self._leave_superseded(link)
            return
        if denied.final:
            self._denied = denied
        self._apply(link_state.LinkDenied(denied.final, denied.retry_after))

    def take_over(self, renewed: CertificateRenewed) -> None:
        """Install a renewed certificate, and start a task that opens a second link with it.

        Log a certificate that cannot be installed, such as the answer to an earlier request, and keep the present one.
        """
        try:
            self._identity = install_certificate(self._identity, renewed.certificate)
            self._context = create_client_context(self._identity)
        except (IdentityError, OSError) as error:
            log.warning("renewed certificate not installed", error=str(error))
            return
        log.info("certificate renewed")
        self._spawn(self._connect_again())

    def _leave_superseded(self, link: CoordinatorLink) -> None:
        """Close the link to a superseded coordinator and search for the current coordinator."""
        log.warning("coordinator superseded", address=link.address, generation=self._identity.generation)
        self._superseded[link.address] = asyncio.get_running_loop().time()
        link.close()
        self._changed.set()
        try:
            self._identity = remove_address(self._identity, link.address)
        except OSError as error:
            log.warning("address not removed", address=link.address, error=str(error))

    # connecting

    def _apply(self, event: link_state.Event) -> None:
        """Apply an event to the state machine, and wake up `run`. An illegal event is counted and changes nothing."""
        try:
            self._life = link_state.step(self._life, event)
        except link_state.IllegalEventError as error:
            self._illegal_events.record("link", error)
        self._changed.set()

    async def _dial_unless_stopped(self) -> None:
        """Connect. A change of the state ends the attempt: an unreachable coordinator delays neither stop nor sleep."""
        connecting = asyncio.ensure_future(self._connect(takeover=False))
        left = asyncio.ensure_future(self._wait_until_left(LinkState.DIALING, None))
        try:
            await asyncio.wait({connecting, left}, return_when=asyncio.FIRST_COMPLETED)
            connected = connecting.done() and connecting.result()
            self._apply(link_state.LinkOpened() if connected else link_state.DialFailed(_draw_jitter()))
        finally:
            connecting.cancel()
            left.cancel()
            await asyncio.gather(connecting, left, return_exceptions=True)

    async def _connect(self, *, takeover: bool) -> bool:
        """Open a link to the coordinator and send its Hello. Return whether the link is open.

        First dial the last known address, then an address that is searched for. A link that is open only after a stop,
        or after the node fell asleep, is closed again.
        """
        now = asyncio.get_running_loop().time()
        besides = {address for address, at in self._superseded.items() if now - at < SUPERSEDED_ADDRESS_SECONDS}
        last = next((address for address in self._identity.addresses if address not in besides), None)
        for address in (last, None):
            where = address or await discovery.locate_coordinator(self._identity, FIND_TIMEOUT_SECONDS, besides=besides)
            if where is None or self._life.state is LinkState.STOPPED:
                break
            try:
                link = await dial(where, self._context, self._new_link)
            except (OSError, ValueError, OverflowError) as error:  # no host or port: ValueError, OverflowError
                self._failures.record(where, error)
                continue
            if self._life.state in (LinkState.ASLEEP, LinkState.STOPPED):
                link.close()
                return False
            self._store_address(where)
            self._links.add(link)
            link.send(self._build_hello(takeover))
            return True
        self._failures.end_round()
        return False

    def _store_address(self, address: str) -> None:
        """Store an address of the coordinator as the first one to dial. A full disk ends no link."""
        try:
            self._identity = store_address(self._identity, address)
        except OSError as error:
            log.warning("address not stored", address=address, error=str(error))

    async def _connect_again(self) -> None:
        await self._connect(takeover=True)

    def _new_link(self, address: str) -> CoordinatorLink:
        return CoordinatorLink(address, self._identity.cluster, self._receive, self._handle_lost_link)

    def _build_hello(self, takeover: bool) -> Hello:
        identity = self._identity
        return Hello(
            protocol=PROTOCOL,
            node=identity.node,
            name=identity.name,
            instance=self._instance,
            machine=identity.machine,
            version=self._version,
            hardware=self._hardware,
            takeover=takeover,
            generation=identity.generation,
            seal=identity.seal,
            frames=tuple(TAGS),
        )

    async def _watch(self) -> None:
        """Watch the link for silence until its connection ends. Meanwhile renew the certificate when that is due."""
        loop = asyncio.get_running_loop()
        while self._life.state in (LinkState.CONNECTED, LinkState.LINKED):
            link = self._links.watched
            silent = 0.0 if link is None else loop.time() - link.received_at
            if link is not None and silent >= self._timeouts.silence:
                link.abort(f"the coordinator was silent for {silent:.0f} s")
                link = None
            if link is None:
                self._apply(link_state.LinkClosed(_draw_jitter()))
                return
            self._renew_if_due()
            await self._wait_changed(self._timeouts.silence - silent)

    def _renew_if_due(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._links.current is not None and now >= self._renew_from and needs_renewal(self._identity, time.time()):
            try:
                request = new_csr(self._identity)
            except OSError as error:
                log.warning("no renewal of the certificate requested", error=str(error))
                return
            self._renew_from = now + self._timeouts.renewal
            self._links.send(RenewCertificate(request))

    def _handle_lost_link(self, link: CoordinatorLink, reason: str) -> None:
        for request in link.requests:
            self._cancel(request)
        if link is self._links.current:
            if self._life.state is LinkState.STOPPED:
                log.info("link ended", reason=reason, cancelled=len(link.requests))  # expected: we sent a goodbye
            else:
                log.warning("link lost", reason=reason, cancelled=len(link.requests))
        self._links.remove(link)
        self._changed.set()

    # waiting

    async def _wait_changed(self, seconds: float | None) -> None:
        """Wait for a change of links, requests or state, at most `seconds`; None for no limit."""
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    async def _wait_until_left(self, state: LinkState, seconds: float | None) -> None:
        """Wait until the state is no longer `state`, at most `seconds`; None for no limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self._life.state is state:
                    self._changed.clear()
                    await self._changed.wait()

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _draw_jitter() -> float:
    return random.uniform(0.5, 1.5)  # noqa: S311  no secret
