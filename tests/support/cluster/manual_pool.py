"""A dispatcher with a manual clock and manual nodes: frames in, frames out, on a loop but without sockets."""

import asyncio
from collections.abc import Callable, Iterable

from router.admission.cache_scope import CacheScopes
from router.admission.rate_limits import KeyLimits, RateLimits
from router.dispatch.active_request import ActiveRequest
from router.dispatch.answer import StreamedAnswer
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.request import RequestSpec
from router.placement.candidate import ResourceDemand
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.sanitize_report import build_node_view
from router.settings import RouterSettings
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.frames import (
    Delta,
    Deltas,
    Finished,
    Frame,
    Generate,
    GenerationParams,
    Message,
    Refusal,
    Report,
)
from wire.identity import NodeId
from wire.refusals import MemoryNumbers, RefusalCode, Refused
from wire.report import EngineState, Memory, Model
from wire.units import MIB

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


class Cluster:
    """A dispatcher with a manual clock and manual nodes. All keys share the system prompts `prompts`."""

    def __init__(self, *nodes: NodeId, prompts: Iterable[str] = (), **settings: object) -> None:
        self.now = 100.0
        self.sent: list[tuple[NodeId, Frame]] = []
        self.cut: set[NodeId] = set()
        self.broken = False
        self.memory: dict[NodeId, Memory] = {}
        self.state: dict[NodeId, str] = {}
        self.acked = 0
        self.count = 0
        self.models: tuple[Model, ...] = (a_model(),)
        self.engine = EngineState("x", "ready")
        self.labels: dict[NodeId, frozenset[str]] = {}
        self.limits: dict[str, KeyLimits] = {}
        self.failures: list[tuple[str, str]] = []
        self.settings = RouterSettings(**settings)  # pyright: ignore
        self.dispatcher = Dispatcher(
            self._send,
            self.settings,
            numbers=self._numbers,
            clock=lambda: self.now,
            draw=lambda: 0.5,
            quotas=RateLimits(self.limits.get),
            scopes=CacheScopes(prompts=prompts),
            on_failure=lambda request, code: self.failures.append((request.spec.request_id, code)),
        )
        self.nodes = nodes
        self.report()

    def _send(self, node: NodeId, frame: Frame) -> bool:
        if self.broken:
            raise OSError("the transport is broken")
        if node in self.cut:
            return False
        self.sent.append((node, frame))
        return True

    def _numbers(self) -> tuple[int, int]:
        self.count += 1
        return 1000 + self.count, self.count

    def report(self, *only: NodeId) -> None:
        """Report the nodes, or `only` these, as they are now."""
        self.now += 0.01
        kept = {node.id: node for node in self.dispatcher.view.nodes}
        views = [kept[node] if only and node not in only else self.seen(node) for node in self.nodes]
        self.dispatcher.set_view(ClusterView(tuple(views)))

    def seen(self, node: NodeId) -> NodeView:
        """Return the dispatcher's view of a node."""
        report = Report(0, self.memory.get(node, a_memory()), self.engine, self.models, self.acked)
        return build_node_view(
            report,
            node=node,
            name=f"node-{node}",
            state=self.state.get(node, "ready"),
            reported_at=self.now,
            labels=self.labels.get(node, frozenset()),
        )

    def submit(self, *, stream: bool = True, key: str = "k", **demand: object) -> ActiveRequest:
        """Submit a request for the model `tiny` with a prompt of 100 bytes."""
        asked = ResourceDemand("tiny", 100, **demand)  # pyright: ignore
        job = RequestSpec(asked, key, f"r{self.count}", (Message("user", "hi"),), GenerationParams(), 0, stream)
        return self.dispatcher.submit(job)

    def generates(self) -> list[tuple[NodeId, Generate]]:
        """Return the requests that were sent to nodes."""
        return [(node, frame) for node, frame in self.sent if isinstance(frame, Generate)]

    def last(self) -> tuple[NodeId, int]:
        """Return node and number of the request that was sent last."""
        node, frame = self.generates()[-1]
        return node, frame.request

    def say(self, frame: Callable[[int], Frame], node: NodeId | None = None, request: int = 0) -> None:
        """Receive a frame of a node, by default about the request that was sent last."""
        where, number = self.last()
        self.dispatcher.receive(node or where, frame(request or number))

    def refuse(self, code: RefusalCode = RefusalCode.NO_ROOM, *, room: int = 0, tokens: int | None = 25) -> None:
        """Receive the refusal of the request that was sent last."""
        numbers = MemoryNumbers(headroom=room) if code is RefusalCode.NO_ROOM else None
        self.say(lambda number: Refusal(number, Refused(code, "no", numbers), tokens))

    def speak(self, text: str = "hi", choice: int = 0) -> None:
        """Receive a token of the request that was sent last."""
        self.say(lambda number: Deltas((Delta(number, choice, (1,), ((0, text),)),)))

    def finish(self) -> None:
        """Receive the end of the request that was sent last."""
        self.say(lambda number: Finished(number, ("stop",), 25, 3))

    def settled(self) -> None:
        """Check that no request, reservation or queue entry is left."""
        self.dispatcher.ledger.check()
        for request in self.dispatcher.list_open_requests():
            request.check()
        assert self.dispatcher.ledger.empty
        assert len(self.dispatcher.queue) == 0


def full(cluster: Cluster, *nodes: NodeId) -> None:
    """Report nodes without room."""
    for node in nodes:
        cluster.memory[node] = a_memory(MIB)
    cluster.report()


def roomy(cluster: Cluster, *nodes: NodeId) -> None:
    """Report nodes with room."""
    for node in nodes:
        cluster.memory[node] = a_memory()
    cluster.report(*nodes)


async def turn() -> None:
    """Run the tasks of the loop that are ready."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def taken(ticket: ActiveRequest) -> list[str]:
    """Take the texts that a streamed answer has received since the last call."""
    assert isinstance(ticket.answer, StreamedAnswer)
    return [text for delta in ticket.answer.take_deltas() for _, text in delta.pieces]
