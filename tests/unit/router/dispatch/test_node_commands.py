"""Orders to engines: the sender of an order gets its end once, for any state of the node."""

import asyncio
from collections.abc import Callable

import pytest

from router.dispatch import node_commands as module
from router.dispatch.node_commands import MAX_COUNTS_PER_KEY, MAX_OPEN_COMMANDS, CommandResult, Kind, NodeCommands
from router.dispatch.request import RequestFailure
from wire.capacity.fairness import WeightedKey
from wire.frames import (
    Admitted,
    Cancel,
    CountTokens,
    Failed,
    Finished,
    Frame,
    LoadModel,
    Message,
    ProfileModel,
    Refusal,
    UnloadModel,
)
from wire.identity import NodeId
from wire.refusals import MemoryNumbers, RefusalCode, Refused

A, B = NodeId("a"), NodeId("b")


class Nodes:
    """Receives the orders; a test sends the answers."""

    def __init__(self) -> None:
        self.sent: list[tuple[NodeId, Frame]] = []
        self.up = True
        self.number = 0
        self.orders = NodeCommands(self._send, self._next)

    def _send(self, node: NodeId, frame: Frame) -> bool:
        if self.up:
            self.sent.append((node, frame))
        return self.up

    def _next(self) -> int:
        self.number += 1
        return self.number

    async def give(self, kind: Kind = LoadModel, node: NodeId = A) -> asyncio.Task[CommandResult]:
        task = asyncio.create_task(self.orders.send(kind, node, f"node-{node}", "tiny"))
        await asyncio.sleep(0)
        return task

    async def count(self, key: str) -> asyncio.Task[CommandResult]:
        asked = CountTokens(0, "tiny", (Message("user", "x"),), 5, weighted_key=WeightedKey(key))
        task = asyncio.create_task(self.orders.count_tokens(A, "node-a", asked))
        await asyncio.sleep(0)
        return task


@pytest.fixture
def nodes() -> Nodes:
    return Nodes()


@pytest.mark.parametrize("kind", [LoadModel, UnloadModel, ProfileModel])
async def test_command_is_sent_and_returns_its_end(nodes: Nodes, kind: Kind):
    task = await nodes.give(kind)
    assert nodes.sent == [(A, kind(1, "tiny"))]
    assert len(nodes.orders) == 1
    finished = Finished(1, (), 0, 0)
    nodes.orders.receive(A, finished)
    nodes.orders.receive(A, Refusal(1, Refused(RefusalCode.IN_USE, "too late to matter")))
    assert await task == finished
    assert len(nodes.orders) == 0
    assert nodes.sent == [(A, kind(1, "tiny"))], "what has ended is not cancelled"


async def test_refusal_of_a_command_has_numbers_and_node(nodes: Nodes):
    task = await nodes.give()
    nodes.orders.receive(
        A, Refusal(1, Refused(RefusalCode.NO_ROOM, "needs 5 GiB, headroom is 1 GiB", MemoryNumbers(headroom=1)))
    )
    ended = await task
    assert ended == Refused(
        RefusalCode.NO_ROOM, "node-a: needs 5 GiB, headroom is 1 GiB", MemoryNumbers(headroom=1), None, "node-a"
    )


ENDS: list[tuple[Callable[[NodeCommands], None], RequestFailure]] = [
    (
        lambda orders: orders.receive(A, Failed(1, "engine_lost", "it ended by SIGKILL")),
        RequestFailure("engine_crashed", "the engine of node-a died while it loaded tiny: it ended by SIGKILL"),
    ),
    (
        lambda orders: orders.receive(A, Failed(1, "link_lost", "older link")),
        RequestFailure("link_lost", "node-a failed while it loaded tiny: older link"),
    ),
    (
        lambda orders: orders.handle_lost_node(A, "connection ended"),
        RequestFailure("node_lost", "node-a was lost while it loaded tiny (connection ended)"),
    ),
    (lambda orders: orders.shutdown("stopping"), RequestFailure("shutting_down", "stopping")),
]


@pytest.mark.parametrize(("happen", "ended"), ENDS)
async def test_failed_command_has_a_cause(nodes: Nodes, happen: Callable[[NodeCommands], None], ended: RequestFailure):
    task = await nodes.give()
    happen(nodes.orders)
    assert await task == ended
    assert len(nodes.orders) == 0


async def test_command_ignores_frames_and_losses_of_other_nodes(nodes: Nodes):
    task = await nodes.give()
    nodes.orders.receive(B, Finished(1, (), 0, 0))
    nodes.orders.receive(A, Finished(7, (), 0, 0))
    nodes.orders.receive(A, Admitted(1, 5))
    nodes.orders.handle_lost_node(B, "gone")
    await asyncio.sleep(0)
    assert not task.done()
    nodes.orders.shutdown("")
    await task


async def test_a_node_without_a_link_is_a_refusal(nodes: Nodes):
    nodes.up = False
    ended = await (await nodes.give())
    assert ended == Refused(
        RefusalCode.NOT_READY, "node-a is not connected: retry when it is back", None, 2.0, "node-a"
    )


async def test_orders_are_bounded_and_end_with_the_coordinator(nodes: Nodes):
    tasks = [await nodes.give() for _ in range(MAX_OPEN_COMMANDS)]
    ended = await (await nodes.give())
    assert ended == Refused(
        RefusalCode.QUEUE_FULL, "64 model commands are open, which is the limit: wait for one to end"
    )
    assert len(nodes.sent) == MAX_OPEN_COMMANDS
    nodes.orders.shutdown("stopping")
    assert {await task for task in tasks} == {RequestFailure("shutting_down", "stopping")}
    assert await (await nodes.give()) == RequestFailure("shutting_down", "stopping")


async def test_counts_have_places_of_their_own(nodes: Nodes):
    loads = [await nodes.give() for _ in range(MAX_OPEN_COMMANDS)]
    count = asyncio.create_task(
        nodes.orders.count_tokens(A, "node-a", CountTokens(0, "tiny", (Message("user", "x"),), 5))
    )
    await asyncio.sleep(0)
    number = MAX_OPEN_COMMANDS + 1
    assert nodes.sent[-1] == (A, CountTokens(number, "tiny", (Message("user", "x"),), 5))
    nodes.orders.receive(A, Finished(number, (), 12, 0))
    assert await count == Finished(number, (), 12, 0)
    nodes.orders.shutdown("stopping")
    await asyncio.gather(*loads)


async def test_counts_are_bounded_by_key_and_in_all(nodes: Nodes):
    keys = MAX_OPEN_COMMANDS // MAX_COUNTS_PER_KEY
    counts = [await nodes.count(f"key-{number % keys}") for number in range(MAX_OPEN_COMMANDS - 1)]
    full = await nodes.count("key-0")
    text = "16 token counts of this API key are open, which is the limit: wait for one to end"
    assert await full == Refused(RefusalCode.OVER_SHARE, text, None, 1.0)
    counts.append(await nodes.count("another"))
    assert not counts[-1].done(), "other keys are not limited by it"
    last = await nodes.count("yet another")
    assert await last == Refused(
        RefusalCode.QUEUE_FULL, "64 token counts are open, which is the limit: wait for one to end"
    )
    nodes.orders.shutdown("stopping")
    await asyncio.gather(*counts)


async def test_cancelled_command_leaves_nothing_open(nodes: Nodes):
    task = await nodes.give()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert len(nodes.orders) == 0
    assert nodes.sent[-1] == (A, Cancel(1))


async def test_silent_engine_ends_a_command_with_a_timeout(nodes: Nodes, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "COMMAND_TIMEOUT_SECONDS", 0.01)
    ended = await (await nodes.give())
    assert isinstance(ended, RequestFailure)
    assert ended.code == "command_timeout"
    assert ended.message.startswith("node-a did not answer within 0 s while it ")
    assert ended.message.endswith(": read its log (`cluster logs node-a`)")
    assert nodes.sent[-1] == (A, Cancel(1))
