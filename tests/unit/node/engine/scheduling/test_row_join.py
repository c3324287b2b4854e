"""The join of prompts with their decode batch: the room that it keeps free, and a join that raises."""

import pytest

from node.engine.kv.prefix_memory import PrefixMemory
from node.engine.scheduling.decode_batch import DecodeBatch
from node.engine.scheduling.prefix_cache import PrefixCacheManager
from tests import models
from tests.support.engine.text_engine import GREEDY, ONE_TOKEN, Driver
from tests.unit.node.engine.scheduling.test_packed_prefill import SHORT, Steady
from wire.frames import Channel, Failed, Finished

JOIN_BYTES = 12_345


@pytest.fixture
def driver() -> Driver:
    driver = Driver(models.path("llama"), max_batch_size=8, prefill_step_size=512)
    driver.answer("Hello!", ONE_TOKEN)
    driver.resident().stats.pace = Steady(each=1e-6)
    return driver


def test_a_prompt_is_stored_only_beside_the_room_for_its_join(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    transients, packed = list[int](), list[int]()
    make_room, store_packed = PrefixMemory.make_room, PrefixCacheManager.store_packed

    def recorded_room(memory: PrefixMemory, size: int, transient: int = 0) -> bool:
        transients.append(transient)
        return make_room(memory, size, transient)

    def recorded_store(manager: PrefixCacheManager, prefill, row, transient, view) -> None:
        packed.append(transient)
        store_packed(manager, prefill, row, transient, view)

    monkeypatch.setattr(driver.resident().estimator, "estimate_join", lambda *_: JOIN_BYTES)
    monkeypatch.setattr(PrefixMemory, "make_room", recorded_room)
    monkeypatch.setattr(PrefixCacheManager, "store_packed", recorded_store)
    numbers = [driver.ask(one["prompt"], GREEDY) for one in SHORT[:3]]
    for number, one in zip(numbers, SHORT, strict=False):
        driver.end(number)
        assert driver.text[number, 0, Channel.CONTENT] == one["answer"]
    assert len(packed) >= 2
    assert set(packed) == {JOIN_BYTES}
    assert transients.count(JOIN_BYTES) >= len(packed)


def test_a_join_that_raises_fails_its_request_and_others_answer_the_same(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
):
    running = driver.ask(SHORT[0]["prompt"], GREEDY)
    driver.until(lambda: driver.ids[running, 0])
    with monkeypatch.context() as patch:

        def raise_error(*_: object) -> None:
            raise RuntimeError("broken")

        patch.setattr(DecodeBatch, "join", raise_error)
        failing = driver.ask("word " * 100, GREEDY)
        end = driver.end(failing)
    assert isinstance(end, Failed)
    assert end.message.startswith("the prefill of its prompt failed: ")
    assert "broken" in end.message
    assert isinstance(driver.end(running), Finished)
    assert driver.text[running, 0, Channel.CONTENT] == SHORT[0]["answer"]
    report = driver.engine.report(0.0)
    assert (report.running, report.waiting, report.memory.reserved) == (0, 0, 0)
