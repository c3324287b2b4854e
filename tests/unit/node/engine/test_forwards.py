"""How long a native call is expected to take, and that none begins once the process ends."""

import time
from pathlib import Path

import pytest

from node.engine.footprint import Footprint
from node.engine.forwards import REST, Forwards
from node.engine.kinds import Doing, Halted
from node.engine.load_times import LOAD_SPEED
from node.engine.recorder import Recorder
from node.supervise import Patience
from tests import models
from tests.support.readings import Later
from tests.support.text_engine import GREEDY, Driver
from wire.frames import Load
from wire.units import GIB

WEIGHTS = {"large": 85 * GIB, "small": GIB}


def new_forwards() -> Forwards:
    """Make forwards of an engine that holds both models and gives nothing back."""
    return Forwards(
        Recorder(), Footprint(GIB, lambda: 0), lambda: 0, lambda site, need: False, lambda refused: False,
        read=WEIGHTS.__getitem__,
    )  # fmt: skip


@pytest.fixture
def forwards() -> Forwards:
    made = new_forwards()
    made._clock = Later()
    return made


def ahead(forwards: Forwards, seconds: float) -> None:
    assert isinstance(forwards._clock, Later)
    forwards._clock.by += seconds


def expected(forwards: Forwards, doing: Doing, model: str = "large", own: float = 0.5) -> float:
    """Make a call; give what it was expected to take beside its own time."""
    with forwards.native(doing, model, 1, own) as call:
        assert forwards.call is call
        return call.expected - own


READ_AGAIN = WEIGHTS["large"] / LOAD_SPEED


def test_the_first_forward_after_a_load_may_read_the_weights_again_and_the_next_may_not(forwards: Forwards):
    assert expected(forwards, Doing.LOAD) == READ_AGAIN, "with its last piece it runs for the first time"
    assert expected(forwards, Doing.PREFILL) == READ_AGAIN
    assert expected(forwards, Doing.PREFILL) == 0.0
    expected(forwards, Doing.LOAD)
    assert expected(forwards, Doing.PREFILL) == READ_AGAIN, "loaded again, however soon"


def test_the_first_forward_after_a_rest_may_read_the_weights_again(forwards: Forwards):
    for _ in range(2):
        expected(forwards, Doing.PREFILL)
    ahead(forwards, REST / 2)
    assert expected(forwards, Doing.DECODE) == 0.0
    ahead(forwards, REST)
    assert expected(forwards, Doing.PREFILL) == READ_AGAIN
    assert expected(forwards, Doing.JOIN) == expected(forwards, Doing.DECODE) == 0.0


def test_a_decode_step_is_waited_for_in_the_call_after_it(forwards: Forwards):
    assert [expected(forwards, Doing.DECODE) for _ in range(3)] == [READ_AGAIN, READ_AGAIN, 0.0]
    ahead(forwards, 2 * REST)
    expected(forwards, Doing.DECODE)
    with forwards.waits(Doing.DECODE, "large", 0.0) as call:
        assert call.expected == READ_AGAIN


def test_each_model_rests_for_itself(forwards: Forwards):
    expected(forwards, Doing.PREFILL, "small")
    ahead(forwards, 2 * REST)
    expected(forwards, Doing.PREFILL, "large")
    assert expected(forwards, Doing.PREFILL, "large") == 0.0
    assert expected(forwards, Doing.PREFILL, "small") == WEIGHTS["small"] / LOAD_SPEED


def test_a_rest_goes_on_while_the_machine_sleeps(monkeypatch: pytest.MonkeyPatch):
    """The clock of all deadlines stands still then, another one does not."""
    made = new_forwards()
    expected(made, Doing.PREFILL)
    read, goes_on = time.clock_gettime, getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: read(clock) + 8 * 3600 * (clock == goes_on))
    assert expected(made, Doing.DECODE) == READ_AGAIN


def test_the_hang_rule_leaves_time_to_read_the_weights_again(forwards: Forwards):
    with forwards.native(Doing.PREFILL, "large", 1, 0.5) as call:
        assert not Patience().hung(READ_AGAIN, call.expected)
    with forwards.native(Doing.PREFILL, "large", 1, 0.5) as call:
        assert Patience().hung(10.1, call.expected)


def test_once_halted_no_call_begins(forwards: Forwards):
    forwards.halted = True
    with pytest.raises(Halted), forwards.native(Doing.PREFILL, "large", 1, 0.5):
        raise AssertionError("it began")
    assert forwards.counts().forwards == 0


def test_an_engine_counts_the_weights_that_it_has(tmp_path: Path):
    (tmp_path / "a").symlink_to(models.path("llama"))
    driver = Driver(tmp_path)
    forwards = driver.engine._forwards
    seen: list[float] = []
    driver.take(Load(7, "a"))
    while not driver.said[7]:
        driver.turn()
        seen.append(forwards._rewiring("a"))
    weights = driver.engine._shelf.residents["a"].weights
    assert seen[-1] == weights / LOAD_SPEED
    assert seen[0] < seen[-1]
    driver.answer("Hello!", GREEDY)
    assert forwards._rewiring("a") == 0.0
    assert forwards._rewiring("b") == 0.0, "nothing of it is here"
