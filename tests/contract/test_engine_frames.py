"""The text engine, the scripted engine and the node of the tests' loopback cluster answer frames by the same rules."""

import asyncio
import json
from collections.abc import Callable, Iterator
from typing import Protocol

import pytest

from node.engine.process.crash_recorder import CrashRecorder
from node.engine.scripted.engine import ScriptedEngine
from node.settings import ScriptedSettings
from tests import models
from tests.support.cluster.loopback_cluster import LoopbackCluster, LoopbackNode, a_memory
from tests.support.engine.text_engine import ROOMY, Driver
from wire.frames import (
    Admitted,
    Cancel,
    ClearCache,
    CountTokens,
    Deltas,
    Finished,
    Frame,
    Generate,
    GenerationParams,
    MemoryLimits,
    Message,
    Refusal,
)
from wire.refusals import RefusalCode
from wire.units import MIB

FOLDER = models.path("llama")
BIAS = ((json.loads((FOLDER / "config.json").read_text())["eos_token_id"], -100.0),)
"""No answer ends before its limit."""
TOKENS = 4
PARAMS = GenerationParams(max_tokens=TOKENS, temperature=0.0, logit_bias=BIAS)
MESSAGES = (Message("user", "How much memory has a Mac?"),)
FULL = MemoryLimits(2 * MIB, 2 * MIB, MIB, "static")
ENDS = (Finished, Refusal)


class EngineUnderTest(Protocol):
    """An engine, and the name of its model."""

    model: str

    def pass_frame(self, frame: Frame) -> None:
        """Pass a frame of the coordinator."""
        ...

    def run(self) -> list[Frame]:
        """Run until all requests have ended; return all frames that were sent."""
        ...

    def fill(self) -> None:
        """Leave no memory for a request."""
        ...


class Text:
    """The text engine with a small model on MLX."""

    def __init__(self) -> None:
        self.driver = Driver(FOLDER, preload=(FOLDER.name,))
        self.driver.until(lambda: FOLDER.name in self.driver.engine.parts.models.loaded)
        self.model = FOLDER.name
        self.sent: list[Frame] = []

    def pass_frame(self, frame: Frame) -> None:
        self.driver.take(frame)

    def run(self) -> list[Frame]:
        while self.driver.engine.parts.scheduler.live:
            self.driver.turn()
        return [
            *(frame for frames in self.driver.said.values() for frame in frames if not isinstance(frame, ENDS)),
            *(Deltas(tuple(deltas)) for deltas in self.driver.deltas.values()),
            *(frame for frames in self.driver.said.values() for frame in frames if isinstance(frame, ENDS)),
        ]

    def fill(self) -> None:
        self.driver.take(FULL)


class Scripted:
    """The scripted engine, in virtual time."""

    model = "m"

    def __init__(self) -> None:
        self.engine = ScriptedEngine(ScriptedSettings(model=self.model), CrashRecorder())
        self.sent: list[Frame] = []
        self.now = 100.0
        self.pass_frame(ROOMY)

    def pass_frame(self, frame: Frame) -> None:
        self.sent += self.engine.handle(frame, self.now)

    def run(self) -> list[Frame]:
        while len(self.engine.table):
            due = self.engine.next_step_at(self.now)
            assert due is not None, "the engine rests"
            self.now = max(self.now, due)
            for frames in self.engine.step(self.now):
                self.sent += frames
        return self.sent

    def fill(self) -> None:
        self.pass_frame(FULL)


class Loopback:
    """The node of the loopback cluster."""

    model = "tiny"

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.node = LoopbackNode("a")
        self.cluster = LoopbackCluster(self.node)

    def pass_frame(self, frame: Frame) -> None:
        async def send() -> None:
            assert self.cluster.send(self.node.id, frame)

        self.loop.run_until_complete(send())

    def run(self) -> list[Frame]:
        self.loop.run_until_complete(self.cluster.wait_answers())
        return self.node.sent

    def fill(self) -> None:
        self.node.memory = a_memory(MIB)


@pytest.fixture(params=[Text, Scripted, Loopback], ids=lambda one: one.__name__)
def engine(request: pytest.FixtureRequest) -> Iterator[EngineUnderTest]:
    make: Callable[[], EngineUnderTest] = request.param
    made = make()
    yield made
    if isinstance(made, Loopback):
        made.loop.close()


def generate(engine: EngineUnderTest, **fields: object) -> Generate:
    facts = {"model": engine.model, "messages": MESSAGES, "params": PARAMS} | fields
    return Generate(request=1, seq=1, request_id="r1", created=0, expected=TOKENS, **facts)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("choices", [1, 2])
def test_an_answer_is_admitted_sent_and_finished_with_its_counts(engine: EngineUnderTest, choices: int):
    params = GenerationParams(max_tokens=TOKENS, temperature=0.0, logit_bias=BIAS, n=choices)
    engine.pass_frame(generate(engine, params=params))
    first, *parts, last = engine.run()
    assert isinstance(first, Admitted)
    assert isinstance(last, Finished)
    assert first.prompt_tokens == last.prompt_tokens > 0
    assert last.reasons == ("length",) * choices
    assert last.completion_tokens == choices * TOKENS
    deltas = [delta for part in parts if isinstance(part, Deltas) for delta in part.deltas]
    counts = [sum(len(delta.ids) for delta in deltas if delta.choice == choice) for choice in range(choices)]
    assert counts == [TOKENS] * choices


def test_a_continued_answer_counts_known_tokens_and_sends_the_others(engine: EngineUnderTest):
    engine.pass_frame(generate(engine, resume=((5, 6, 7),)))
    *parts, last = engine.run()
    assert isinstance(last, Finished)
    assert last.completion_tokens == TOKENS
    deltas = [delta for part in parts if isinstance(part, Deltas) for delta in part.deltas]
    assert sum(len(delta.ids) for delta in deltas) == TOKENS - 3


def test_a_request_without_room_is_refused_with_numbers(engine: EngineUnderTest):
    engine.fill()
    engine.pass_frame(generate(engine))
    (answer,) = engine.run()
    assert isinstance(answer, Refusal)
    assert answer.refused.code in (RefusalCode.NO_ROOM, RefusalCode.TOO_LARGE)
    numbers = answer.refused.numbers
    assert numbers is not None
    assert numbers.headroom is not None
    assert numbers.estimate > numbers.headroom


def test_an_unknown_model_is_refused(engine: EngineUnderTest):
    engine.pass_frame(generate(engine, model="gone"))
    (answer,) = engine.run()
    assert isinstance(answer, Refusal)
    assert answer.refused.code is RefusalCode.NO_MODEL


def test_a_cancelled_request_gets_no_end(engine: EngineUnderTest):
    engine.pass_frame(generate(engine))
    engine.pass_frame(Cancel(1))
    assert not [frame for frame in engine.run() if isinstance(frame, ENDS)]


def test_tokens_are_counted_as_for_the_answer_without_generation(engine: EngineUnderTest):
    engine.pass_frame(CountTokens(2, engine.model, MESSAGES, 0))
    (count,) = [frame for frame in engine.run() if isinstance(frame, Finished)]
    engine.pass_frame(generate(engine))
    (answer,) = [frame for frame in engine.run() if isinstance(frame, Finished) and frame.request == 1]
    assert (count.request, count.prompt_tokens, count.completion_tokens) == (2, answer.prompt_tokens, 0)


def test_a_cache_without_entries_is_cleared(engine: EngineUnderTest):
    engine.pass_frame(ClearCache(3, ""))
    assert engine.run() == [Finished(3, (), 0, 0)]
