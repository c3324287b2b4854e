"""If the router says "fits", the node's gate agrees on the same reading, through a live engine's encoded report."""

import time

import pytest

from node.engine.memory.footprint import clear_buffers
from router.placement.candidate import NoPlacement, Placement, ResourceDemand
from router.placement.cluster_view import ClusterView
from router.placement.place import place
from router.placement.reservations import ReservationLedger
from router.placement.sanitize_report import build_node_view
from tests import models
from tests.support.engine.text_engine import ONE_TOKEN, Driver
from wire.capacity.arithmetic import estimate_tokenize_bytes
from wire.codec import Splitter, decode, encode
from wire.frames import Admitted, GenerationParams, MemoryLimits, Message, Refusal, Report
from wire.identity import NodeId
from wire.refusals import RefusalCode
from wire.report import EngineState
from wire.units import KIB, MIB

ENDLESS = GenerationParams(temperature=0.0, max_tokens=400, stop=("\0",))


def reported(driver: Driver) -> ClusterView:
    """Return the router's view of the engine, from an encoded report."""
    snapshot = driver.engine.report(time.monotonic())
    report = Report(1, snapshot.memory, EngineState("mlx", "ready"), snapshot.models, snapshot.acked_seq)
    ((tag, body),) = Splitter().feed(encode(report))
    arrived = decode(tag, body)
    assert isinstance(arrived, Report)
    view = build_node_view(arrived, node=NodeId("n1"), name="studio", state="ready", reported_at=100.0)
    return ClusterView((view,))


def placed(driver: Driver, content: str, params: GenerationParams) -> Placement | NoPlacement:
    demand = ResourceDemand(
        driver.default, len(content), tokens_of(driver, content), max_tokens=params.max_tokens, choices=params.n
    )
    return place(reported(driver), demand, ReservationLedger(), now=100.0, draw=lambda: 0.0)


def tokens_of(driver: Driver, content: str) -> int:
    """Count a prompt as the engine does."""
    from wire.frames import Generate

    asked = Generate(10**6, 0, "r", driver.default, (Message("user", content),), GenerationParams(), 0)
    prepared = driver.engine.parts.preparer.prepare(asked)
    return len(prepared.ids)


@pytest.fixture(scope="module", params=["batched", "alone"])
def driver(request: pytest.FixtureRequest) -> Driver:
    """Return the engine with a model whose rows decode together, or alone as those of AFM do."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "alone":
            patch.setattr("node.engine.models.loaded_model.WRONG_TOGETHER", frozenset({"llama"}))
        made = Driver(models.path("llama"), max_batch_size=8, prefix_cache_size="off")
        made.answer("Hello!", ONE_TOKEN)
    assert made.resident().ledger.alone == (request.param == "alone")
    return made


@pytest.fixture(scope="module")
def caching() -> Driver:
    return Driver(models.path("llama"), max_batch_size=8)


@pytest.mark.parametrize(
    ("room", "words", "choices"),
    [
        (-10 * MIB, 1, 1),
        (-8 * MIB, 100, 3),
        (-8 * MIB, 400, 1),
        (-4 * MIB, 100, 1),
        (-4 * MIB, 900, 3),
        (1 * MIB, 1, 3),
    ],
)
def test_where_the_router_counts_on_the_prefix_cache_the_gate_gives_it_back(
    caching: Driver, room: int, words: int, choices: int
):
    """The report has the reusable part of the reading. The engine admits a request that the router placed on it."""
    driver = caching
    driver.take(MemoryLimits(2**33, 2**33, 0, "static"))
    while driver.engine.report(time.monotonic()).cache.entries < 12:  # an earlier case may have evicted some
        driver.answer(f"{driver.number} " + "word " * 120, GenerationParams(temperature=0.0, max_tokens=1))
    clear_buffers()
    report = driver.engine.report(time.monotonic())
    assert report.memory.current is not None
    assert report.memory.reusable > 5 * MIB
    assert report.memory.reusable <= report.cache.nbytes, (
        "the report counts no more bytes as reusable than the cache holds"
    )
    driver.engine.gate.set_limits(MemoryLimits(2**33, report.memory.current + room, 0, "dynamic"))
    params = GenerationParams(temperature=0.0, max_tokens=30, n=choices)
    content = "fresh " * words
    verdict = placed(driver, content, params)
    if isinstance(verdict, Placement):
        number = driver.ask(content, params, expected=verdict.chosen.output_tokens)
        assert isinstance(driver.said[number][0], Admitted), driver.said[number][0]
        driver.cancel(number)
    else:
        assert room < 1 * MIB or words > 1, "with all of the cache it fits"


@pytest.mark.parametrize("choices", [1, 3])
def test_the_gate_agrees_with_the_router(driver: Driver, choices: int):
    """One long row and two short ones decode. Then requests arrive that the router has judged by the report."""
    driver.take(MemoryLimits(2**33, 2**33, 0, "static"))
    running = [driver.ask("word " * size, ENDLESS) for size in (300, 1, 2)]
    driver.until(lambda: all(driver.ids[number, 0] for number in running))
    params = GenerationParams(temperature=0.0, max_tokens=30, n=choices)
    verdicts = list[bool]()
    for words in (1, 100, 400, 900):
        content = "word " * words
        tokens = tokens_of(driver, content)
        needed = 0
        for room in (256 * KIB, -512 * KIB, 512 * KIB, 8 * MIB):  # first alone, then around its need
            clear_buffers()  # else the gate would evict pooled buffers for a request that the router did not place
            memory = driver.engine.report(time.monotonic()).memory
            assert memory.current is not None
            driver.take(MemoryLimits(2**33, memory.current + memory.reserved + needed + room, 0, "dynamic"))
            verdict = placed(driver, content, params)
            verdicts.append(isinstance(verdict, Placement))
            expected = verdict.chosen.output_tokens if isinstance(verdict, Placement) else 30
            number = driver.ask(content, params, expected=expected)
            answer = driver.said[number][0]
            if isinstance(verdict, Placement):
                assert isinstance(answer, Admitted), (words, room, answer)
                assert answer.prompt_tokens == tokens
                driver.cancel(number)
                driver.turn()
            else:
                assert isinstance(answer, Refusal), (words, room)
                assert answer.refused.code is verdict.refused.code is RefusalCode.NO_ROOM
                assert answer.refused.numbers is not None
                assert verdict.refused.numbers is not None
                asked = (
                    verdict.refused.numbers.estimate,
                    estimate_tokenize_bytes(len(content)),
                )  # before or at tokenization
                assert answer.refused.numbers.estimate in asked, "the same arithmetic"
                needed = needed or verdict.refused.numbers.estimate
    assert verdicts == [False, False, True, True] * 4
    for one in running:
        driver.cancel(one)
