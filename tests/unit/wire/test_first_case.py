"""The incident that the project began with, replayed with its readings.

A mixture of experts of 85 GiB ran on a machine of 128 GiB under a hard cap of 107.52 GiB. Four long prompts took it
over the cap. Small prompts must still be admitted.
"""

import pytest

from node.engine.kv.commitments import CommitmentLedger
from node.engine.memory.gate import GateSite, MemoryGate, MlxCounters
from node.engine.requests import preflight
from node.memory.reading import MemoryReading
from wire.capacity.arithmetic import Fits, compute_default_margin, estimate_request_transient
from wire.frames import Generate, GenerationParams, MemoryLimits, Message
from wire.refusals import RefusalCode, Refused
from wire.report import KvParameters, Memory, Model
from wire.units import GIB

NOW = 100.0


def of(gib: float) -> int:
    return round(gib * GIB)


CAP, MARGIN, SPIKED, RESTING = of(107.52), of(12.0), of(97.655), of(88.0)
KV = KvParameters(per_token=46 * 2 * 8 * 128 * 2, step=256)
"""46 layers, 8 heads of 128 for keys and the same for values, two bytes each."""
MODEL = Model("air", "f", True, of(85.0), KV.per_token, context=131072, kv_step=KV.step)


def gate() -> MemoryGate:
    made = MemoryGate()
    made.set_limits(MemoryLimits(CAP, CAP, MARGIN, "static"))
    return made


def reading(judge: MemoryGate, phys: int, reserved: int = 0) -> Memory:
    return judge.build_memory(
        MlxCounters(of(85.0), phys, reserved), MemoryReading(phys, "phys_footprint", NOW), of(128.0), NOW
    )


def admit(judge: MemoryGate, ledger: CommitmentLedger, prompt: int, phys: int = RESTING) -> Fits | Refused | None:
    """Check a request as the engine does at admission, and commit its memory."""
    request = Generate(1, 1, "r", "air", (Message("user", "x"),), GenerationParams(max_tokens=128), 0, 128)
    shape = preflight.compute_shape(request, prompt, 128, MODEL.context)
    cost = ledger.compute_cost(shape.length, 1) + estimate_request_transient(MODEL, prompt, shape.answer_tokens)
    refused = preflight.refuse_without_room(
        shape, reading(judge, phys, ledger.compute_reserved_bytes()), MODEL, cost, judge
    )
    if refused is None:
        ledger.commit(shape.length, 1)
    return refused


def test_the_margin_of_the_case_is_the_default():
    assert abs(compute_default_margin(CAP) - MARGIN) <= 16


@pytest.mark.parametrize("site", [GateSite.PREFILL, GateSite.JOIN, GateSite.GROW, GateSite.PREFLIGHT, GateSite.LOAD])
def test_97_655_and_12_against_107_52_refuses_with_all_numbers(site: GateSite):
    judge = gate()
    refused = judge.check(site, reading(judge, SPIKED), 0)
    assert isinstance(refused, Refused)
    assert refused.code is RefusalCode.NO_ROOM
    numbers = refused.numbers
    assert numbers is not None
    assert numbers.predicted == of(97.655) + of(12.0) == pytest.approx(of(109.655), abs=1)
    assert (numbers.current, numbers.margin, numbers.ceiling, numbers.cap) == (SPIKED, MARGIN, CAP, CAP)
    assert (numbers.estimate, numbers.reserved, numbers.bound_by) == (0, 0, "static")
    for words in ("97.7 GiB", "12.0 GiB", "107.5 GiB", "-2.1 GiB", "needs 0"):
        assert words in refused.message
    assert judge.refusals[site] == 1


def test_at_the_same_reading_one_byte_decides():
    judge = gate()
    room = CAP - MARGIN - RESTING
    assert isinstance(judge.check(GateSite.PREFILL, reading(judge, RESTING), room), Fits)
    assert isinstance(judge.check(GateSite.PREFILL, reading(judge, RESTING), room + 1), Refused)


@pytest.mark.parametrize("prompt", [148, 3338])
def test_short_and_moderate_requests_pass(prompt: int):
    assert admit(gate(), CommitmentLedger(KV), prompt) is None


def test_two_at_once_pass():
    judge, ledger = gate(), CommitmentLedger(KV)
    assert admit(judge, ledger, 148) is None
    assert admit(judge, ledger, 3338) is None
    assert ledger.compute_reserved_bytes() >= (148 + 3338) * KV.per_token


def test_four_long_prompts_reserve_room_for_one():
    judge, ledger = gate(), CommitmentLedger(KV)
    answers = [admit(judge, ledger, 22_000) for _ in range(4)]
    assert [answer is None for answer in answers] == [True, False, False, False]
    assert all(isinstance(answer, Refused) and answer.code is RefusalCode.NO_ROOM for answer in answers[1:])
    assert RESTING + ledger.compute_reserved_bytes() + MARGIN <= CAP
    assert admit(judge, ledger, 148) is None, "small requests are admitted meanwhile"
