"""Agent of a node: dispatches each frame of the coordinator to the part of the node that it concerns.

Other modules keep the connection (`link_keeper`), forward the frames of requests (`links`), and send reports
(`reporter`). `node.engine_process.supervisor` runs the engine's process, `node.memory` reads memory and sets limits,
and `node.agent.enrollment` enrolls the machine.

Rules
- When a link ends, the agent cancels the requests that came over it.
- The loss of a link unloads no model.
- A Mac that does not share (`node.sharing.policy`) refuses requests and commands for the engine. The Mac still unloads
  models and clears caches.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from node.agent.connection import CoordinatorLink
from node.agent.fetch import FetchAnswers
from node.agent.identity import NodeIdentity
from node.agent.link_keeper import LinkKeeper, LinkTimeouts
from node.agent.links import CoordinatorLinks
from node.agent.reporter import Reporter
from node.engine_process.supervisor import Supervisor
from node.hub.file_orders import ModelFileOrders
from node.hub.quantization.quantizer import Quantizer
from node.illegal_events import IllegalEvents
from node.memory.poll import MemoryPoll
from node.sharing.controller import SharingController
from node.video.lease_manager import LeaseManager
from node.video.ray.local_ray import LocalRay
from wire.codec import decode, decode_request_number, encode
from wire.frames import (
    TAGS,
    AllowVideo,
    Cancel,
    CancelModelOrder,
    CertificateRenewed,
    ClearCache,
    CountTokens,
    Denied,
    Embed,
    FetchRequest,
    Frame,
    Generate,
    GoodbyeReason,
    LeaseRelease,
    LeaseRequest,
    LoadModel,
    PauseNode,
    Ping,
    ProfileModel,
    PullModel,
    QuantizeModel,
    RayHead,
    Refusal,
    RemoveModel,
    ServeModel,
    UnloadModel,
    VerifyModel,
    Welcome,
)
from wire.refusals import RefusalCode, Refused
from wire.report import Hardware

_FOR_ENGINE = (Generate, Embed, LoadModel, UnloadModel, ProfileModel, ClearCache, CountTokens)


@dataclass(frozen=True, slots=True)
class AgentParts:
    """Parts of the node that the agent connects."""

    links: CoordinatorLinks
    supervisor: Supervisor
    poll: MemoryPoll
    lease_manager: LeaseManager
    ray: LocalRay
    sharing: SharingController
    reporter: Reporter
    answers: FetchAnswers
    model_orders: ModelFileOrders
    quantizer: Quantizer
    illegal_events: IllegalEvents


class Agent:
    """Agent of this node: handles the frames of the coordinator, and starts and stops the links.

    `version` is the installed version of Macpool. `on_ready(address)` is called after each change of the link or the
    engine while this node is linked and its engine is ready. `address` (`host:port`) is the coordinator's. The
    constructor raises `OSError` or `ValueError` if the certificate or the CA of the identity cannot be used.
    """

    def __init__(
        self,
        identity: NodeIdentity,
        version: str,
        hardware: Hardware,
        parts: AgentParts,
        *,
        on_ready: Callable[[str], None],
        link_timeouts: LinkTimeouts,
    ) -> None:
        self._name = identity.name
        self._parts = parts
        self._on_ready = on_ready
        self._keeper = LinkKeeper(
            identity,
            version,
            hardware,
            parts.links,
            receive=self._receive,
            cancel=self._cancel_in_engine,
            illegal_events=parts.illegal_events,
            timeouts=link_timeouts,
        )
        parts.links.request_ended.subscribe(self._handle_ended_request)

    @property
    def welcomed(self) -> asyncio.Event:
        """Event that is set when the coordinator has accepted a link for the first time."""
        return self._keeper.welcomed

    async def run(self) -> None:
        """Keep the node linked until `stop`. Raise `ExpelledError` if the coordinator denies the node for good."""
        await self._keeper.run()

    async def stop(self, drain: float, reason: GoodbyeReason = GoodbyeReason.STOPPING) -> None:
        """Report draining, end the lease and the model orders, and wait at most `drain` seconds for running requests.

        Then send a Goodbye with `reason` (`stopping` or `leave`), close the links, and cancel requests that still run.
        The report comes first, because the end of a lease can take `worker.terminate_grace_seconds`.
        """
        self._parts.reporter.report_draining()
        await self._parts.lease_manager.stop()
        await self._parts.model_orders.stop()
        await self._keeper.stop(drain, reason)

    def fall_asleep(self, acknowledge: Callable[[], None]) -> None:
        """Send a goodbye before this machine sleeps, and close the links.

        After `link_keeper.GOODBYE_SECONDS`, call `acknowledge`, which allows the system to sleep.
        """
        self._keeper.fall_asleep(acknowledge)

    def wake_up(self, slept: float) -> None:
        """Abort all links after `slept` seconds of sleep, and reconnect.

        Dial at once if `fall_asleep` was called before the sleep, else after the delay of any lost link.
        """
        self._keeper.wake_up(slept)

    def on_engine_change(self) -> None:
        """Handle a new report or a new state of the engine: schedule a memory poll and a report to the coordinator.

        Resume a lease or a quantization that waits for the engine. Call `on_ready` if the engine is ready and this node
        is linked.
        """
        self._parts.poll.poll_sooner()
        self._parts.lease_manager.on_engine_change()
        self._parts.quantizer.on_engine_change()
        self._notify_ready()
        self._parts.reporter.send_soon()

    # frames from the coordinator

    def _receive(self, link: CoordinatorLink, tag: int, body: bytes) -> None:
        kind = TAGS.get(tag)
        if kind in _FOR_ENGINE:
            self._forward_to_engine(link, kind, tag, body)
        else:
            self._act(link, decode(tag, body))

    def _forward_to_engine(self, link: CoordinatorLink, kind: type[Frame], tag: int, body: bytes) -> None:
        request = decode_request_number(body)
        if not self._parts.sharing.sharing_state.shared and kind not in (UnloadModel, ClearCache):
            link.send(Refusal(request, self._build_paused_refusal()))
            return
        link.requests.add(request)
        encoded = (len(body) + 1).to_bytes(4, "big") + bytes((tag,)) + body
        self._parts.supervisor.send(encoded, kind, request)

    def _act(self, link: CoordinatorLink, frame: Frame) -> None:
        parts = self._parts
        match frame:
            case Cancel():
                parts.links.cancel(frame.request)
                self._cancel_in_engine(frame.request)
                self._keeper.handle_ended_request()
            case Ping():
                parts.reporter.answer_ping(frame.nonce)
            case Welcome():
                self._receive_welcome(link, frame)
            case Denied():
                self._keeper.receive_denial(link, frame)
            case FetchRequest():
                parts.answers.answer(link, frame)
            case LeaseRequest():
                parts.lease_manager.handle_request(frame)
            case LeaseRelease():
                parts.lease_manager.release(frame)
            case AllowVideo():
                parts.ray.set_allowed(on=frame.allowed)
            case RayHead():
                pass
            case PullModel() | ServeModel() | VerifyModel() | RemoveModel() | QuantizeModel() | CancelModelOrder():
                parts.model_orders.handle(frame, link)
            case PauseNode():
                parts.sharing.apply_order(frame)
                parts.reporter.send()
            case CertificateRenewed():
                self._keeper.take_over(frame)
            case _:
                link.abort(f"the coordinator sent {type(frame).__name__}, which only nodes send")

    def _receive_welcome(self, link: CoordinatorLink, welcome: Welcome) -> None:
        if self._keeper.receive_welcome(link, welcome):
            self._parts.reporter.send()
            self._parts.lease_manager.resend_ends()
            self._parts.model_orders.resend_ends()
            self._notify_ready()

    def _build_paused_refusal(self) -> Refused:
        """Return the refusal of a request while this Mac is paused.

        The code is `DRAINING`, which coordinators of all versions know.
        """
        sharing = self._parts.sharing
        text = f"this Mac accepts no requests: {sharing.sharing_state.why}"
        return Refused(RefusalCode.DRAINING, text, None, sharing.compute_retry_after(), self._name)

    # requests

    def _cancel_in_engine(self, request: int) -> None:
        self._parts.supervisor.send(encode(Cancel(request)), Cancel, request)

    def _handle_ended_request(self) -> None:
        if not self._parts.sharing.sharing_state.shared:
            self._parts.sharing.update_now()

    def _notify_ready(self) -> None:
        link = self._parts.links.current
        if link is not None and self._parts.supervisor.ready is not None:
            self._on_ready(link.address)
