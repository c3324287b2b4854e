"""The tokens of a prompt that are not among its ids (images): counted wherever a prompt is, and once."""

import time
from dataclasses import replace

import pytest

from node.engine.prompt import IMAGE_TOKENS, Prepared
from tests import models
from tests.support.text_engine import Driver
from wire.frames import Admitted, Finished, Generate, Limits, Message, Params, Refusal
from wire.refusals import Code
from wire.units import MIB
from wire.verdict import request_transient, row_bytes

ANSWER = Params(temperature=0.0, max_tokens=8)


@pytest.fixture
def driver() -> Driver:
    driver = Driver(models.path("llama"), chunk=256, prefix_cache="off")
    driver.answer("Hello!", Params(max_tokens=4))
    return driver


def prepared(driver: Driver, number: int, images: int = 0) -> Prepared:
    request = Generate(number, number, "r", driver.default, (Message("user", "What is this?"),), ANSWER, 0, 8)
    made = driver.engine.prepare(request)
    assert isinstance(made, Prepared)
    return replace(made, budget=images * IMAGE_TOKENS)


def hand_in(driver: Driver, work: Prepared) -> Admitted | Refusal:
    (said,) = driver.engine.take(work, time.monotonic())
    assert isinstance(said, Admitted | Refusal)
    return said


def test_an_image_is_1280_tokens():
    assert IMAGE_TOKENS == 1280


@pytest.mark.parametrize("images", [0, 1, 3])
def test_a_budget_is_promised_once_and_told_as_prompt_tokens(driver: Driver, images: int):
    work = prepared(driver, 100, images)
    tokens = len(work.ids) + images * 1280
    before = driver.engine.report(0.0).memory.reserved
    admitted = hand_in(driver, work)
    assert isinstance(admitted, Admitted)
    assert admitted.prompt_tokens == tokens
    resident = driver.engine._shelf.residents[driver.default]
    assert driver.engine.report(0.0).memory.reserved - before == row_bytes(resident.kv, tokens + 8)
    end = driver.end(100)
    assert isinstance(end, Finished)
    assert end.prompt_tokens == tokens
    assert driver.engine.report(0.0).memory.reserved == before


def test_preflight_counts_a_budget_once(driver: Driver):
    plain, seeing = prepared(driver, 100), prepared(driver, 101, 4)
    memory = driver.engine.report(0.0).memory
    model = driver.engine.report(0.0).models[0]
    assert memory.current is not None

    def need(tokens: int) -> int:
        return row_bytes(model.kv, tokens + 8) + request_transient(model, tokens, 8)

    def room_for(size: int) -> Limits:
        current = driver.engine._memory().current or 0
        return Limits(2**34, current + size + MIB // 4, 0, "dynamic")

    once, twice = need(seeing.tokens), need(seeing.tokens + 4 * IMAGE_TOKENS)
    assert need(plain.tokens) + MIB < once < twice - MIB
    driver.take(room_for(need(plain.tokens)))
    refusal = hand_in(driver, seeing)
    assert isinstance(refusal, Refusal)
    assert refusal.refused.code is Code.NO_ROOM
    assert refusal.refused.numbers is not None
    assert refusal.refused.numbers.estimate == once
    assert refusal.prompt_tokens == seeing.tokens
    driver.take(room_for(once))
    assert isinstance(hand_in(driver, prepared(driver, 102, 4)), Admitted), "not counted twice"


def test_the_context_holds_the_budget_too(driver: Driver):
    work = prepared(driver, 100)
    context = driver.engine.report(0.0).models[0].context
    refusal = hand_in(driver, replace(work, budget=context))
    assert isinstance(refusal, Refusal)
    assert refusal.refused.code is Code.CONTEXT
    assert str(work.tokens + context) in refusal.refused.message
