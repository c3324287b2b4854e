"""The turns of the scripted engine: equal turns at once are the same as single ones."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.engine.kv.commitments import CommitmentLedger
from node.engine.memory.gate import GateSite
from node.engine.requests.preflight import compute_shape
from node.engine.scripted.build import build_turns
from node.engine.scripted.sequence import ScriptedRow, ScriptedSequence
from simulation.mac.hardware import CHIPS, ChipCosts
from wire.capacity.fairness import WeightedKey
from wire.frames import Deltas, Failed, Finished, Frame, Generate, GenerationParams, Refusal
from wire.refusals import RefusalCode, Refused
from wire.report import KvParameters

MODELS = {"small": (2.0, 30_000), "large": (9.0, 120_000)}


@dataclass(frozen=True)
class Ask:
    """A request of a test, `pause` seconds after the one before it."""

    pause: float
    prompt: int
    expected: int
    output: int
    model: str
    key: str
    cancel_after: float | None


class Pot:
    """A memory of a fixed number of bytes."""

    def __init__(self, size: int, ledgers: dict[str, CommitmentLedger]) -> None:
        self.size = size
        self.ledgers = ledgers

    def check(self, site: GateSite, now: float, estimate: int = 0) -> Refused | None:
        left = self.size - sum(one.compute_committed_bytes() for one in self.ledgers.values())
        return None if estimate <= left else Refused(RefusalCode.NO_ROOM, "no room")

    def observe(self, now: float) -> None:
        pass

    def compute_peak_expiry(self, now: float) -> float | None:
        return None


class Played:
    """Requests that are played in virtual time, and the times of all frames."""

    def __init__(self, size: int, rows: int, *, leap: bool) -> None:
        self.ledgers = {name: CommitmentLedger(KvParameters(kv)) for name, (_, kv) in MODELS.items()}
        self.memory = Pot(size, self.ledgers)
        self.parts = build_turns(self.memory, ChipCosts(CHIPS["M2"], MODELS), rows, leap=leap)
        self.frames: list[tuple[float, Frame]] = []
        self.steps = 0

    def until(self, time: float | None) -> None:
        """Run all turns before this time; None: all."""
        while (due := self.parts.turns.next_at(self.now)) is not None and (time is None or due <= time):
            self.steps += 1
            assert self.steps < 100_000
            self.now = due
            self.frames += [(due, frame) for frame in self.parts.turns.step(due)]

    def play(self, asks: list[Ask]) -> None:
        self.now = 1.0
        events: list[tuple[float, int, Ask, bool]] = []
        at = 1.0
        for number, ask in enumerate(asks, 1):
            at += ask.pause
            events.append((at, number, ask, False))
            if ask.cancel_after is not None:
                events.append((at + ask.cancel_after, number, ask, True))
        for time, number, ask, cancel in sorted(events, key=lambda one: (one[0], one[1], one[3])):
            self.until(time)
            self.now = time
            self.frames += [(time, frame) for frame in self.parts.turns.interrupt(time)]
            sequence = self.parts.table.find(number)
            if cancel and sequence is not None:
                self.parts.preemptor.drop(sequence, time)
            elif not cancel:
                self.add(number, ask, time)
        self.until(None)

    def add(self, number: int, ask: Ask, now: float) -> None:
        params = GenerationParams(max_tokens=ask.output)
        frame = Generate(
            number,
            number,
            f"r{number}",
            ask.model,
            (),
            params,
            0,
            expected=ask.expected,
            weighted_key=WeightedKey(ask.key),
        )
        shape, ledger = compute_shape(frame, ask.prompt, ask.output, 100_000), self.ledgers[ask.model]
        if self.memory.check(GateSite.PREFLIGHT, now, ledger.compute_cost(shape.length, 1)) is not None:
            self.frames.append((now, Refusal(number, Refused(RefusalCode.NO_ROOM, "no room"))))
            return
        (commitment,) = ledger.commit(shape.length, 1)
        row = ScriptedRow(choice=0, commitment=commitment)
        self.parts.table.enqueue(
            ScriptedSequence(request=frame, shape=shape, ledger=ledger, ends=ask.output, arrived=now, rows=[row])
        )

    def story(self) -> list[tuple[float, str, int, int]]:
        """Return time, kind, request and number of tokens of all frames."""
        story: list[tuple[float, str, int, int]] = []
        for time, frame in self.frames:
            if isinstance(frame, Deltas):
                story += [(time, "tokens", one.request, len(one.ids)) for one in frame.deltas]
            elif isinstance(frame, Finished | Failed | Refusal):
                story.append((time, type(frame).__name__, frame.request, 0))
        return story


asks = st.builds(
    Ask,
    pause=st.sampled_from([0.0, 0.0, 0.003, 0.2, 1.7, 9.0]),
    prompt=st.sampled_from([3, 40, 300, 301, 1500, 4000]),
    expected=st.sampled_from([1, 10, 64, 200]),
    output=st.sampled_from([1, 2, 30, 90, 260]),
    model=st.sampled_from(sorted(MODELS)),
    key=st.sampled_from(["ada", "bob"]),
    cancel_after=st.sampled_from([None, None, None, 0.5, 4.0]),
)


@given(st.lists(asks, min_size=1, max_size=24), st.sampled_from([3, 6, 40]), st.sampled_from([2, 5, 32]))
def test_equal_turns_at_once_are_the_same_as_single_turns(requests: list[Ask], hundred_mb: int, rows: int):
    single, leaping = (Played(hundred_mb * 10**8, rows, leap=leap) for leap in (False, True))
    for one in (single, leaping):
        one.play(requests)
        assert not len(one.parts.table)
        assert not any(len(ledger) for ledger in one.ledgers.values())
    alone, at_once = single.story(), leaping.story()
    assert [(kind, number, tokens) for _, kind, number, tokens in at_once] == [
        (kind, number, tokens) for _, kind, number, tokens in alone
    ]
    assert [time for time, *_ in at_once] == pytest.approx([time for time, *_ in alone], rel=1e-6)
    assert single.parts.preemptor.preemptions == leaping.parts.preemptor.preemptions
    assert single.parts.batch.steps == leaping.parts.batch.steps
    assert single.parts.batch.prefill_tokens == leaping.parts.batch.prefill_tokens


def test_a_long_answer_is_computed_in_few_turns():
    played = Played(40 * 10**8, 4, leap=True)
    played.play([Ask(0.0, 100, 2000, 2000, "small", "ada", None)])
    assert played.story()[-1][1:3] == ("Finished", 1)
    assert played.steps < 10
    assert (played.parts.batch.steps, played.parts.batch.prefill_tokens) == (1999, 100)


def test_the_tokens_of_a_long_prompt_are_counted_once():
    played = Played(40 * 10**8, 4, leap=False)
    played.play([Ask(0.0, 4000, 2, 2, "small", "ada", None)])
    assert played.parts.batch.prefill_tokens == 4000


def test_an_engine_whose_only_request_is_preempted_waits_until_it_may_return():
    played = Played(40 * 10**8, 4, leap=False)
    played.now = 1.0
    played.add(1, Ask(0.0, 300, 200, 100, "small", "ada", None), 1.0)
    played.until(2.0)
    sequence = played.parts.table.find(1)
    assert sequence is not None
    played.parts.turns.interrupt(2.0)
    played.parts.preemptor.preempt(sequence, for_key=False)
    played.parts.preemptor.return_at = 7.0
    played.until(3.0)
    assert played.parts.turns.next_at(3.0) == 7.0
    assert played.parts.turns.next_at(8.0) == 8.0
    played.until(None)
    assert played.story()[-1][1:3] == ("Finished", 1)


def test_a_turn_lasts_as_long_as_its_forwards():
    """A prompt of 300 tokens, then 99 steps: the first token comes with the prefill."""
    costs = ChipCosts(CHIPS["M2"], MODELS)
    played = Played(40 * 10**8, 4, leap=False)
    played.play([Ask(0.0, 300, 200, 100, "small", "ada", None)])
    (first, *_), *_, (end, *_) = played.story()
    assert first - 1.0 == pytest.approx(300 * costs.get_pace("small").each)
    step = CHIPS["M2"].decode * (6.74 / 2.0)
    assert (end - first) * step / 99 == pytest.approx(1.0, rel=0.02)
