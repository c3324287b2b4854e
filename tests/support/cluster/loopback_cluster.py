"""A cluster in one process: the real dispatcher, and nodes that answer its frames with the same arithmetic.

Nothing of the router is replaced. A node here has memory and judges each Generate by `wire.capacity.arithmetic` on its
own reading, as an engine's gate does. Its answers are Admitted, Deltas and Finished, by the rules of
`tests/contract/test_engine_frames.py`. They arrive at the next turn of the loop, as they would from a link;
`step_seconds` paces them.
"""

import asyncio
import contextlib
import hashlib
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
import uvicorn

from coordinator.http.chat_fast_path import FastPath, create_protocol_class
from coordinator.http.connection_slots import ConnectionSlots
from coordinator.http.http_protocol import DeadlineProtocol
from coordinator.http.origin_check import OriginCheck
from coordinator.http.server import Server
from router.admission.api_keys import KeyRing, new_key
from router.admission.rate_limits import KeyLimits, RateLimits
from router.dispatch.dispatcher import Dispatcher
from router.http.app import App, RouterApp, serve_not_found
from router.http.upstream.client import create_clients
from router.http.upstream.forward import UpstreamForwarder
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.sanitize_report import build_node_view
from router.settings import RouterSettings
from wire.capacity.arithmetic import Fits, compute_headroom, estimate_request_need, judge
from wire.frames import (
    TAGS,
    Admitted,
    Cancel,
    ClearCache,
    CountTokens,
    Delta,
    Deltas,
    Embed,
    Failed,
    Finished,
    Frame,
    Generate,
    Refusal,
    Report,
    Vectors,
)
from wire.identity import NodeId
from wire.refusals import RefusalCode, Refused
from wire.report import EngineState, Memory, Model
from wire.units import GIB, MIB

PEPPER = b"pepper of the tests"
TEXT = ("The ", "pool ", "answers ", "from ", "one ", "Mac.")


def a_model(name: str = "tiny", **changes: object) -> Model:
    """Make a loaded model with a 4,096-token context and 64 KiB of KV per token."""
    facts: dict[str, object] = {
        "loaded": True,
        "weights": 1 * GIB,
        "kv_per_token": 64 * 1024,
        "transient": 64 * MIB,
        "context": 4096,
        "prefill_speed": 1000.0,
        "decode_speed": 50.0,
        "expected_output": 64,
        "fingerprint": "tiny-1",
    } | changes
    return Model(name, **facts)  # pyright: ignore[reportArgumentType]


def a_memory(headroom_bytes: int = 8 * GIB, cap: int = 24 * GIB, **changes: object) -> Memory:
    """Make a reading with exactly this headroom."""
    margin = 2 * GIB
    phys = cap - margin - headroom_bytes
    facts: dict[str, object] = {
        "cap": cap,
        "ceiling": cap,
        "margin": margin,
        "phys": phys,
        "active": 0,
        "current": phys,
        "headroom": headroom_bytes,
        "bound_by": "static",
        "armed": True,
    } | changes
    return Memory(**facts)  # pyright: ignore[reportArgumentType]


@dataclass
class LoopbackNode:
    """One Mac.

    `refuse`: Number of Generates that are refused regardless of memory.
    `mute`: Nothing is sent after Admitted; no vector is sent for embeddings.
    `silent`: Requests for embeddings get no answer.
    `play`: Returns the answer to a Generate in place of `text`: deltas, each in a frame of its own, and the finish
      reason.
    `stop`: The stop sequence that Finished reports.
    `thought`: The reasoning tokens that Finished reports.
    `keeps`: The node keeps the prefix of each prompt.
    """

    name: str
    memory: Memory = field(default_factory=a_memory)
    models: tuple[Model, ...] = field(default_factory=lambda: (a_model(),))
    text: tuple[str, ...] = TEXT
    step_seconds: float = 0.0
    refuse: int = 0
    refusal: Refused | None = None
    mute: bool = False
    silent: bool = False
    play: Callable[[Generate], tuple[Sequence[Delta], str]] | None = None
    stop: str = ""
    thought: int = 0
    keeps: bool = False
    labels: frozenset[str] = frozenset()
    state: str = "ready"
    engine: str = "ready"
    up: bool = True
    heard: list[Frame] = field(default_factory=list)
    sent: list[Frame] = field(default_factory=list)
    reserved: dict[int, int] = field(default_factory=dict)
    acked_seq: int = 0
    cancelled: set[int] = field(default_factory=set)

    @property
    def id(self) -> NodeId:
        return NodeId(self.name)

    def reading(self) -> Memory:
        """Return the memory including the commitments of this node."""
        memory = self.memory
        reserved = memory.reserved + sum(self.reserved.values())
        room = compute_headroom(memory.ceiling, memory.margin, memory.current, reserved)
        return msgspec.structs.replace(memory, reserved=reserved, headroom=room)

    def report(self) -> Report:
        return Report(
            0,
            self.reading(),
            EngineState("loopback", self.engine, running=len(self.reserved)),
            self.models,
            self.acked_seq,
        )


class LoopbackCluster:
    """Nodes, a dispatcher and an HTTP server for them.

    `front`: The product's own protocol class serves requests and answers some of them itself, in front of the ASGI
      application.
    `rest`: Seconds for which a connection may be idle.
    """

    front: ClassVar[bool] = True
    rest: float = 75.0

    def __init__(
        self, *nodes: LoopbackNode, settings: RouterSettings | None = None, control: App = serve_not_found
    ) -> None:
        self.settings = settings or RouterSettings()
        self.nodes = {node.id: node for node in nodes}
        self.limits: Callable[[str], KeyLimits | None] = lambda _: None
        self.dispatcher = Dispatcher(
            self.send, self.settings, numbers=self._numbers, quotas=RateLimits(lambda key: self.limits(key))
        )
        self.keys = KeyRing(PEPPER)
        self.clients = create_clients(self.settings.upstreams)
        forwarder = UpstreamForwarder(self.dispatcher, self.clients, self.settings)
        self.forwarder = forwarder if self.clients else None
        self.app: App = RouterApp(self.dispatcher, self.keys, self.settings, control, forwarder=self.forwarder)
        self.key = self.make_key("infer")
        self.base_url = ""
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.report()

    def make_key(self, *scopes: str, expires: float | None = None) -> str:
        key, text = new_key(PEPPER, "test", scopes, created=time.time(), expires=expires)
        self.keys.put(key)
        return text

    def _numbers(self) -> tuple[int, int]:
        self._number += 1
        return self._number, self._number

    def report(self) -> None:
        """Deliver a report of every node."""
        self.dispatcher.set_view(ClusterView(tuple(self._view(node) for node in self.nodes.values())))

    def _view(self, node: LoopbackNode) -> NodeView:
        return build_node_view(
            node.report(),
            node=node.id,
            name=node.name,
            state=node.state,
            reported_at=time.monotonic(),
            labels=node.labels,
            frames=frozenset(TAGS),
        )

    def send(self, node_id: NodeId, frame: Frame) -> bool:
        """Deliver a frame of the dispatcher to a node; return False without a link."""
        node = self.nodes[node_id]
        if not node.up:
            return False
        node.heard.append(frame)
        if isinstance(frame, Generate):
            task = asyncio.get_running_loop().create_task(self._answer(node, frame))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif isinstance(frame, Embed):
            asyncio.get_running_loop().call_soon(self._embed, node, frame)
        elif isinstance(frame, CountTokens):
            asyncio.get_running_loop().call_soon(self.say, node, _counted(node, frame))
        elif isinstance(frame, ClearCache):
            asyncio.get_running_loop().call_soon(self.say, node, Finished(frame.request, (), 0, 0))
        elif isinstance(frame, Cancel):
            node.cancelled.add(frame.request)
            node.reserved.pop(frame.request, None)
        return True

    async def wait_answers(self) -> None:
        """Wait until the nodes have answered, or dropped, all frames that were sent to them."""
        await asyncio.sleep(0)
        await asyncio.gather(*self._tasks)

    async def _answer(self, node: LoopbackNode, asked: Generate) -> None:
        tokens = _tokens(asked)
        node.acked_seq = max(node.acked_seq, asked.seq)
        refused = self._gate(node, asked, tokens)
        if refused is not None:
            self.say(node, Refusal(asked.request, refused, tokens))
            return
        self.say(node, Admitted(asked.request, tokens, 0, b"kept" if node.keeps else b""))
        if node.mute:
            return
        steps, reason = _steps(node, asked)
        for step in steps:
            await asyncio.sleep(node.step_seconds)
            if asked.request in node.cancelled or not node.up:
                return
            self.say(node, Deltas(step))
        node.reserved.pop(asked.request, None)
        written = sum(map(len, steps)) + sum(map(len, asked.resume))
        stops = (node.stop,) * asked.params.n if node.stop else ()
        self.say(
            node,
            Finished(
                asked.request, (reason,) * asked.params.n, tokens, written, stops=stops, reasoning_tokens=node.thought
            ),
        )

    def _embed(self, node: LoopbackNode, asked: Embed) -> None:
        """Answer a request for embeddings or scores, the last text first."""
        node.acked_seq = max(node.acked_seq, asked.seq)
        if node.silent:
            return
        if node.refuse:
            node.refuse -= 1
            self.say(node, Refusal(asked.request, node.refusal or Refused(RefusalCode.NO_ROOM, "a spike")))
            return
        tokens = sum(map(len, asked.ids)) + sum(len(text) // 4 + 1 for text in asked.texts)
        self.say(node, Admitted(asked.request, tokens))
        vectors = [vector(one, asked.dimensions or 8) for one in asked.ids or asked.texts]
        if asked.query:
            vectors = [score(asked.query, text) for text in asked.texts]
        for place in () if node.mute else reversed(range(asked.count)):
            self.say(node, Vectors(asked.request, (place,), vectors[place]))
        self.say(node, Finished(asked.request, (), tokens, 0))

    def _gate(self, node: LoopbackNode, asked: Generate, tokens: int) -> Refused | None:
        model = next((model for model in node.models if model.name == asked.model), None)
        if model is None:
            return Refused(RefusalCode.NO_MODEL, f"this node does not serve {asked.model}")
        need = estimate_request_need(model, tokens, asked.expected, asked.params.n)
        verdict = judge(node.reading(), need, node=node.name)
        if node.refuse:
            node.refuse -= 1
            return node.refusal or Refused(RefusalCode.NO_ROOM, "a spike", None, None, node.name)
        if not isinstance(verdict, Fits):
            return verdict
        node.reserved[asked.request] = need
        return None

    def say(self, node: LoopbackNode, frame: Frame) -> None:
        """Deliver a frame of a node, if its link is up."""
        if node.up:
            node.sent.append(frame)
            self.dispatcher.receive(node.id, frame)

    def fail(self, node: LoopbackNode, code: str = "engine_crashed") -> None:
        """Crash a node's engine with all its requests."""
        for request in list(node.reserved):
            node.reserved.pop(request)
            node.cancelled.add(request)
            self.say(node, Failed(request, code, "the engine ended with signal 6"))

    def cut(self, node: LoopbackNode) -> None:
        """Cut a node's link."""
        node.up = False
        node.state = "lost"
        node.reserved.clear()
        self.dispatcher.handle_lost_node(node.id, "connection ended")
        self.report()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Serve the HTTP application on a free port of a real server, and yield the base URL without `/v1`."""
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        http: type[DeadlineProtocol] = DeadlineProtocol
        if self.front:
            door = FastPath(self.dispatcher, self.keys, self.settings, OriginCheck(self.app))
            http = create_protocol_class(door)
        config = uvicorn.Config(
            self.app,
            http=http,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=2,
            timeout_keep_alive=self.rest,  # pyright: ignore[reportArgumentType]  typed as whole seconds
        )
        server = Server(config, None, ConnectionSlots())
        running = asyncio.create_task(server.serve(sockets=[listener]))
        reporting = asyncio.create_task(self._report_for_ever())
        while not server.started:  # noqa: ASYNC110  the server has no event to wait for
            await asyncio.sleep(0)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            self.dispatcher.shutdown()
            reporting.cancel()
            server.stop()
            await running
            for client in self.clients.values():
                await client.close()

    async def _report_for_ever(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            self.report()


def vector(text: object, dimensions: int = 8) -> bytes:
    """Return the vector of a text or of token ids on a loopback node: numbers that need all digits of fp32."""
    raw = hashlib.shake_128(repr(text).encode()).digest(4 * dimensions)
    return struct.pack(f"<{dimensions}f", *(number / 2**31 for number in struct.unpack(f"<{dimensions}i", raw)))


def score(query: str, document: str) -> bytes:
    """Return the score of a document on a loopback node, as bytes. Equal pairs of texts have equal scores."""
    raw = hashlib.shake_128(f"{query}|{document}".encode()).digest(2)
    return struct.pack("<f", int.from_bytes(raw, "little") / 2**16)


def _counted(node: LoopbackNode, asked: CountTokens) -> Frame:
    if node.refusal is not None:
        return Refusal(asked.request, node.refusal)
    return Finished(asked.request, (), sum(len(one.content) for one in asked.messages) // 4 + 1, 0)


def _tokens(asked: Generate) -> int:
    """Return the tokens of a prompt: the number of its ids, or one for every four characters, plus one."""
    return len(asked.ids) or (sum(len(message.content) for message in asked.messages) + len(asked.text)) // 4 + 1


def _steps(node: LoopbackNode, asked: Generate) -> tuple[list[tuple[Delta, ...]], str]:
    """Return the deltas of each step, and the finish reason."""
    if node.play is not None:
        deltas, reason = node.play(asked)
        return [(delta,) for delta in deltas], reason
    spoken = node.text[: asked.params.max_tokens]
    choices = range(asked.params.n)
    steps = [
        tuple(
            Delta(asked.request, choice, (1,), ((0, text),))
            for choice in choices
            if at >= len(asked.get_known_ids(choice))
        )
        for at, text in enumerate(spoken)
    ]
    return steps, "length" if len(spoken) < len(node.text) else "stop"
