"""The table of live requests: holds on models, the queue of prefills, preempted requests, and the times of ends."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.engine.kv.kv_cache import Layers
from node.engine.models.loaded_model import LoadedModel
from node.engine.models.model_stats import ModelUsage
from node.engine.requests.sequence import Sequence
from node.engine.scheduling.prefill import Prefill
from node.engine.scheduling.request_table import RequestTable
from tests.unit.node.engine.requests.test_sequence import make_sequence


def make_model(name: str = "m") -> LoadedModel:
    """Return the part of a loaded model that the table uses, because weights take seconds to load."""
    return cast("LoadedModel", SimpleNamespace(name=name, usage=ModelUsage()))


def make_prefill(sequence: Sequence) -> Prefill:
    """Return a prefill with arrays."""
    return Prefill(make_model(), sequence, [], [1, 2], cache=Layers(), logits=cast("Any", object()))


def has_arrays(prefill: Prefill) -> bool:
    return prefill.cache is not None or prefill.logits is not None


def test_a_live_request_holds_its_model_until_its_end():
    table, models = RequestTable(), [make_model(), make_model("other")]
    first, second, third = (make_sequence(number=number) for number in (1, 2, 3))
    for model, sequence in ((models[0], first), (models[0], second), (models[1], third)):
        table.add(model, sequence)
    assert dict(table.live) == {1: first, 2: second, 3: third}
    assert [model.usage.users for model in models] == [2, 1]
    table.remove(models[0], first)
    assert (first in table, second in table) == (False, True)
    assert dict(table.live) == {2: second, 3: third}
    assert [model.usage.users for model in models] == [1, 1]
    with pytest.raises(KeyError):
        table.remove(models[0], first)


def test_the_last_use_of_a_model_is_the_time_at_which_ends_are_recorded():
    table, model, idle = RequestTable(), make_model(), make_model("idle")
    first, second = make_sequence(number=1), make_sequence(number=2)
    table.add(model, first)
    table.add(idle, second)
    table.record_ends(5.0)
    assert (model.usage.used_at, table.crowded_at) == (0.0, -math.inf), "no request has ended"
    table.remove(model, first)
    assert model.usage.used_at == 0.0
    table.record_ends(6.0)
    table.record_ends(7.0)
    assert (model.usage.used_at, idle.usage.used_at) == (6.0, 0.0)


def test_an_end_while_others_are_live_is_a_crowd_and_one_alone_is_none():
    table, model = RequestTable(), make_model()
    first, second, third = (make_sequence(number=number) for number in (1, 2, 3))
    table.add(model, first)
    table.remove(model, first)
    table.record_ends(1.0)
    assert table.crowded_at == -math.inf
    table.add(model, first)
    table.add(model, second)
    table.remove(model, first)
    table.remove(model, second)
    table.record_ends(2.0)
    assert table.crowded_at == 2.0, "both ended in one turn"
    table.add(model, third)
    table.remove(model, third)
    table.record_ends(3.0)
    assert (table.crowded_at, model.usage.used_at) == (2.0, 3.0)


def test_running_requests_are_those_that_are_not_preempted_from_the_oldest_on():
    table, model = RequestTable(), make_model()
    newest, oldest, middle = (
        make_sequence(number=number, arrived=arrived) for number, arrived in ((1, 9.0), (2, 7.0), (3, 8.0))
    )
    for sequence in (newest, oldest, middle):
        table.add(model, sequence)
    assert table.list_running() == [oldest, middle, newest]
    table.add_preempted(middle)
    table.add_preempted(newest)
    assert (table.list_running(), table.preempted) == ([oldest], [middle, newest])
    assert [table.end_preemption(middle), table.end_preemption(middle), table.end_preemption(oldest)] == [
        True,
        False,
        False,
    ]
    assert (table.list_running(), table.preempted) == ([oldest, middle], [newest])


def test_the_queue_of_prefills_has_an_order():
    table, sequence = RequestTable(), make_sequence()
    first, second, third = (make_prefill(sequence) for _ in range(3))
    table.enqueue(second)
    table.enqueue(third)
    table.enqueue(first, first=True)
    assert table.prefills == [first, second, third]
    table.dequeue(second)
    assert table.prefills == [first, third]
    assert has_arrays(second), "its rows have joined with its cache"


def test_the_prefills_of_a_request_are_removed_with_their_arrays():
    table, ended, other = RequestTable(), make_sequence(number=1), make_sequence(number=2)
    prefills = [make_prefill(sequence) for sequence in (ended, other, ended)]
    for prefill in prefills:
        table.enqueue(prefill)
    table.clear_prefills(ended)
    assert table.prefills == [prefills[1]]
    assert [has_arrays(prefill) for prefill in prefills] == [False, True, False]


def test_the_end_of_the_process_releases_all():
    table, model = RequestTable(), make_model()
    running, preempted = make_sequence(number=1), make_sequence(number=2)
    for sequence in (running, preempted):
        table.add(model, sequence)
    table.add_preempted(preempted)
    prefill = make_prefill(running)
    table.enqueue(prefill)
    table.close()
    assert (dict(table.live), table.preempted, table.prefills, model.usage.users) == ({}, [], [], 0)
    assert not has_arrays(prefill)
    table.close()
