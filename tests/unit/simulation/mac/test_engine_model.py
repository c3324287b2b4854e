"""A simulated node serves arrivals as the scripted engine does.

The order of ends is equal, and times are within 5 %.
"""

import asyncio
from collections import deque
from itertools import chain

import pytest

from node.engine.process.crash_recorder import CrashRecorder
from node.engine.scripted.engine import ScriptedEngine
from node.settings import ScriptedSettings
from simulation.clock import VirtualLoop
from simulation.mac.hardware import CHIPS, ChipCosts
from simulation.mac.simulated_node import SimulatedNode
from simulation.scenario import ModelSpec, NodeSpec
from simulation.workload import ConversationTurn
from wire.capacity.fairness import WeightedKey
from wire.frames import Cancel, Failed, Finished, Frame, Generate, GenerationParams, MemoryLimits, Refusal
from wire.units import parse_size

MODEL = ModelSpec(name="chat", weights="1GiB", kv_per_token="64KiB", active=1.0, transient="0")
NODE = NodeSpec(name="mac", chip="M1 Pro", memory="16GiB", loaded=("chat",), batch=4)
ROWS = 4
Arrival = tuple[float, Frame]
Ends = list[tuple[float, str, int]]


def ask(number: int, prompt: int, output: int, key: str = "ada", expected: int = 300) -> Generate:
    params = GenerationParams(max_tokens=output)
    ids = tuple(range(prompt))
    return Generate(
        number, number, f"r{number}", "chat", (), params, 0, expected=expected, weighted_key=WeightedKey(key), ids=ids
    )


MIXED: list[Arrival] = [
    (0.05, ask(1, 400, 150)),
    (0.25, ask(2, 1500, 40)),
    (0.26, ask(3, 30, 110)),
    (0.27, ask(4, 30, 60, "bob")),
    (0.60, ask(5, 200, 30, "bob")),
    (0.90, ask(6, 900, 12)),
    (1.10, Cancel(3)),
    (1.40, ask(7, 50, 25)),
]
"""Long and short prompts on four rows, a queue, two keys, and a cancelled request."""
GROWING: list[Arrival] = [
    (0.05, ask(1, 300, 230, expected=20)),
    (0.10, ask(2, 100, 140, "bob", expected=5)),
    (0.15, ask(3, 20, 90, expected=30)),
]
"""Answers that outgrow their commitments."""


def record(ends: Ends, frame: Frame, now: float) -> None:
    if isinstance(frame, Finished | Refusal | Failed):
        ends.append((now, type(frame).__name__, frame.request))


def simulated(arrivals: list[Arrival]) -> Ends:
    loop, ends = VirtualLoop(), Ends()
    turns = {
        frame.request_id: ConversationTurn(
            frame.request_id, "k", "chat", len(frame.ids), frame.params.max_tokens or 0, 0, None, 0.0
        )
        for _, frame in arrivals
        if isinstance(frame, Generate)
    }
    node = SimulatedNode(
        "mac",
        NODE,
        (MODEL,),
        loop,
        send=lambda frame: record(ends, frame, loop.time()),
        turn_of=turns.__getitem__,
    )
    for at, frame in arrivals:
        loop.call_at(at, node.take, frame)
    loop.run_until_complete(asyncio.sleep(60))
    node.stop()
    loop.close()
    return ends


def scripted(arrivals: list[Arrival]) -> Ends:
    """Drive the scripted engine as its loop does, with the times at which work is due instead of a clock."""
    settings = ScriptedSettings(model="chat", weights=MODEL.weights, kv_per_token=65536, max_batch_size=ROWS)
    costs = ChipCosts(CHIPS[NODE.chip], {"chat": (MODEL.active, parse_size(MODEL.kv_per_token))})
    engine, ends, waiting, now = ScriptedEngine(settings, CrashRecorder(), costs), Ends(), deque(arrivals), 0.0
    engine.handle(MemoryLimits(10**11, 10**11, 10**9, "metal"), now)
    while now < 60:
        arrival = waiting[0][0] if waiting else None
        now = min((at for at in (engine.next_step_at(now), arrival) if at is not None), default=60.0)
        frames = engine.handle(waiting.popleft()[1], now) if now == arrival else []
        due = engine.next_step_at(now)
        parts = [frames, *(engine.step(now) if due is not None and due <= now else [])]
        for frame in chain.from_iterable(parts):
            record(ends, frame, now)
    return ends


@pytest.mark.parametrize("arrivals", [MIXED, GROWING], ids=["mixed", "growing"])
def test_the_simulated_node_serves_as_the_scripted_engine_does(arrivals: list[Arrival]):
    virtual, direct = simulated(arrivals), scripted(arrivals)
    assert [(kind, number) for _, kind, number in virtual] == [(kind, number) for _, kind, number in direct]
    assert [at for at, *_ in virtual] == pytest.approx([at for at, *_ in direct], rel=0.05)


def test_the_times_are_those_of_the_chip():
    """A prompt of 400 tokens on an idle M1 Pro, then 149 steps of one row with 550 committed tokens."""
    ((end, *_),) = simulated([(0.0, ask(1, 400, 150))])
    step = (1.0 / 6.74 + 550 * 65536 / 3.83e9) / 36
    assert end == pytest.approx(400 * 1.0 / 6.74 / 266 + 149 * step, rel=0.01)
