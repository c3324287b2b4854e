"""The scripted engine and the text engine serve the same arrivals in the same order.

Both get the same frames and the same refusals of their gates. Their times differ: the text engine runs a small model on
MLX, the scripted one has the costs of a chip in virtual time. The orders of admissions, first tokens, preemptions and
ends are equal.
"""

import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import pytest

from node.engine.memory.gate import GateSite
from node.engine.process.crash_recorder import CrashRecorder
from node.engine.scripted.engine import ScriptedEngine
from node.settings import ScriptedSettings
from simulation.mac.hardware import CHIPS, ChipCosts
from tests import models
from tests.effort import thin_cases
from tests.support.engine.text_engine import ROOMY, Driver, ScriptedGate
from wire.capacity.fairness import WeightedKey
from wire.frames import Admitted, Cancel, Deltas, Failed, Finished, Frame, Generate, GenerationParams, Refusal

BATCH = 4
FOLDER = models.path("llama")
BIAS = ((json.loads((FOLDER / "config.json").read_text())["eos_token_id"], -100.0),)
"""No answer ends before its limit."""


@dataclass
class Orders:
    """Orders in which one engine served the requests of a pattern, by their numbers."""

    admitted: list[int] = field(default_factory=list)
    begun: list[int] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
    ended: list[tuple[str, int]] = field(default_factory=list)


class EngineUnderTest(Protocol):
    """An engine under test."""

    gate: ScriptedGate

    def handle(self, frame: Frame) -> Sequence[Frame]:
        """Pass a frame; return the immediate answers."""
        ...

    def turn(self) -> Sequence[Frame]:
        """Run the next turn; return its frames."""
        ...

    def preempted(self) -> Collection[int]:
        """Return the numbers of the preempted requests."""
        ...

    def holding(self) -> int:
        """Return the number of live requests that are not preempted."""
        ...


class Text:
    """The text engine with a small model. Its turns take real time; the clock of its waits is virtual, so that the
    order does not depend on the load of the machine."""

    def __init__(self, rows: int) -> None:
        self.driver = Driver(FOLDER, max_batch_size=rows, prefix_cache_size="off")
        self.driver.answer("hello", GenerationParams(max_tokens=2, temperature=0.0))
        self.gate = self.driver.gate
        self.now = time.monotonic()

    def handle(self, frame: Frame) -> Sequence[Frame]:
        work = self.driver.engine.prepare(frame)
        return [] if work is None else list(self.driver.engine.handle(work, self.now))  # type: ignore[arg-type]

    def turn(self) -> Sequence[Frame]:
        due = self.driver.engine.next_step_at(self.now)
        assert due is not None, "the engine rests"
        self.now = max(self.now, due)
        return [frame for frames in self.driver.engine.step(self.now) for frame in frames]

    def preempted(self) -> Collection[int]:
        return [one.number for one in self.driver.engine.parts.scheduler.preempted]

    def holding(self) -> int:
        return len(self.driver.engine.parts.scheduler.live) - len(self.preempted())


class Scripted:
    """The scripted engine with the costs of a chip, in virtual time."""

    def __init__(self, rows: int) -> None:
        self.gate = ScriptedGate()
        settings = ScriptedSettings(model=FOLDER.name, max_batch_size=rows, weights="1GiB", kv_per_token=1024)
        costs = ChipCosts(CHIPS["M4 Max"], {FOLDER.name: (1.0, 1024)})
        self.engine = ScriptedEngine(settings, CrashRecorder(), costs, self.gate)
        self.now = 100.0
        self.handle(ROOMY)

    def handle(self, frame: Frame) -> Sequence[Frame]:
        return self.engine.handle(frame, self.now)

    def turn(self) -> Sequence[Frame]:
        due = self.engine.next_step_at(self.now)
        assert due is not None, "the engine rests"
        self.now = max(self.now, due)
        return [frame for frames in self.engine.step(self.now) for frame in frames]

    def preempted(self) -> Collection[int]:
        return [one.number for one in self.engine.table.preempted]

    def holding(self) -> int:
        return len(self.engine.table) - len(self.preempted())


class Play:
    """One engine that serves a pattern, and its orders."""

    def __init__(self, engine: EngineUnderTest) -> None:
        self.engine = engine
        self.orders = Orders()
        self.tokens: dict[int, int] = {}

    def ask(self, number: int, prompt: int, tokens: int, *, expected: int = 200, key: str = "ada") -> None:
        params = GenerationParams(max_tokens=tokens, temperature=0.0, logit_bias=BIAS)
        ids = tuple(5 + (number + place) % 40 for place in range(prompt))
        frame = Generate(
            number,
            number,
            f"r{number}",
            FOLDER.name,
            (),
            params,
            0,
            expected=expected,
            weighted_key=WeightedKey(key),
            ids=ids,
            stream=True,
        )
        self.keep(self.engine.handle(frame))

    def cancel(self, number: int) -> None:
        self.keep(self.engine.handle(Cancel(number)))

    def ends(self) -> list[int]:
        return [number for _, number in self.orders.ended]

    def until(self, wanted: Callable[[], object]) -> None:
        for _ in range(5000):
            if wanted():
                return
            before = set(self.engine.preempted())
            frames = self.engine.turn()
            self.orders.preempted += [one for one in self.engine.preempted() if one not in before]
            self.keep(frames)
        raise AssertionError("it did not come true")

    def until_ended(self, count: int) -> None:
        self.until(lambda: len(self.orders.ended) >= count)

    def until_tokens(self, number: int, count: int) -> None:
        self.until(lambda: self.tokens.get(number, 0) >= count)

    def keep(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            if isinstance(frame, Admitted):
                self.orders.admitted.append(frame.request)
            elif isinstance(frame, Deltas):
                for delta in frame.deltas:
                    if delta.request not in self.tokens:
                        self.orders.begun.append(delta.request)
                    self.tokens[delta.request] = self.tokens.get(delta.request, 0) + len(delta.ids)
            elif isinstance(frame, Finished | Refusal | Failed):
                self.orders.ended.append((type(frame).__name__, frame.request))


def two_length_groups(play: Play) -> None:
    """Eight requests at once, short and long ones in turn, on four rows."""
    for number in range(1, 9):
        play.ask(number, 20 if number % 2 else 220, 12 * number)
    play.until_ended(8)


def arrivals_while_others_decode(play: Play) -> None:
    """Requests that arrive one after the other, while those before them decode."""
    for number, (prompt, tokens) in enumerate([(300, 90), (30, 40), (150, 70), (10, 10), (80, 55), (40, 20)], 1):
        play.ask(number, prompt, tokens)
        play.until_tokens(number, 2) if number <= BATCH else None
    play.until_ended(6)


def prompts_wait_for_memory(play: Play) -> None:
    """Two prompts have no room while an older answer is generated."""
    play.ask(1, 30, 60)
    play.until_tokens(1, 5)
    play.engine.gate.refuses = lambda site, _: site is GateSite.PREFILL and 1 not in play.ends()
    play.ask(2, 40, 30)
    play.ask(3, 40, 10)
    play.until_ended(3)


def growth_preempts(play: Play) -> None:
    """An answer that outgrows its commitment preempts the newest request, which returns last."""
    play.ask(1, 30, 120)
    play.until_tokens(1, 3)
    play.ask(2, 30, 90, expected=4)
    play.until_tokens(2, 1)
    play.ask(3, 30, 100)
    play.until_tokens(3, 1)
    play.engine.gate.refuses = lambda site, _: (
        (site is GateSite.GROW and not (play.orders.preempted or play.engine.preempted()))
        or (site is GateSite.PREFLIGHT and len(play.ends()) < 2)
    )
    play.until_ended(3)


def growth_refuses_a_waiting_request(play: Play) -> None:
    """Two requests that wait for a row lose their memory first, because they lose no work; then the newest one does.
    The gate refuses growth until three requests hold memory."""
    for number in range(1, BATCH + 1):
        play.ask(number, 30, 60 + 10 * number, expected=30 if number == 2 else 200)
        play.until_tokens(number, 1)
    play.ask(8, 30, 20)
    play.ask(9, 30, 20)
    play.engine.gate.refuses = lambda site, _: (
        (site is GateSite.GROW and play.engine.holding() > 3) or (site is GateSite.PREFLIGHT and 1 not in play.ends())
    )
    play.until_ended(BATCH + 2)


def cancelled_requests(play: Play) -> None:
    """A decoding and a queued request are cancelled."""
    for number in range(1, 8):
        play.ask(number, 30, 10 + 9 * number)
    play.until_tokens(2, 3)
    play.cancel(2)
    play.cancel(6)
    play.until_ended(5)


def keys_share_rows(play: Play) -> None:
    """A second key gets a row of the key that holds all of them. The request without a row returns while rows are
    free."""
    for number in range(1, BATCH + 1):
        play.ask(number, 30, 40 + 10 * number)
    play.until_tokens(BATCH, 2)
    play.ask(5, 30, 25, key="bob")
    play.until_ended(5)


PATTERNS = [
    two_length_groups,
    arrivals_while_others_decode,
    prompts_wait_for_memory,
    growth_preempts,
    growth_refuses_a_waiting_request,
    cancelled_requests,
    keys_share_rows,
]


@pytest.mark.parametrize("pattern", thin_cases(PATTERNS, 2), ids=lambda one: one.__name__)
def test_both_engines_serve_the_same_arrivals_in_the_same_order(pattern: Callable[[Play], None]):
    """The text engine sizes its chunks by its measured pace. A forward that the machine interrupts lowers the pace, and
    can change the order. The orders must therefore be equal in one of three plays."""
    scripted, real = play(pattern, Scripted(BATCH)), play(pattern, Text(BATCH))
    for _ in range(2):
        real = real if real == scripted else play(pattern, Text(BATCH))
    assert scripted == real


def play(pattern: Callable[[Play], None], engine: EngineUnderTest) -> Orders:
    """Play a pattern on an engine; return its orders."""
    made = Play(engine)
    pattern(made)
    return made.orders
