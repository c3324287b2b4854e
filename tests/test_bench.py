"""The benchmarks' plan, their documentation, and the bound with which the torture test is compared."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.state.settings import CoordinatorSettings
from host.settings_loader import list_settings
from node.settings import NodeSettings
from node.video.worker import worker
from tests.bench.__main__ import BUDGETS, GROUPS, main, plan
from tests.bench.engine.torture import KINDS, OFFERED_LOAD, Asked, Cost, Seen, arrival_rate, arrivals, filled, oracle
from tests.bench.video import BARE
from tests.support.processes import ROOT

HOUR = 3600
KEYS = {setting.key for kind in (NodeSettings, CoordinatorSettings) for setting in list_settings(kind)}


def test_the_plan_names_a_budget_for_every_group_and_ends_within_an_hour():
    assert BUDGETS.keys() == GROUPS.keys()
    assert sum(BUDGETS[name] for name in plan()) <= HOUR


def test_an_unknown_group_is_refused_with_the_names_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("sys.argv", ["bench", "strem"])
    with pytest.raises(SystemExit):
        main()
    error = capsys.readouterr().err
    assert "no group strem" in error
    assert all(name in error for name in GROUPS)


def test_every_group_is_described_and_every_row_names_its_command():
    groups, _, seen = (ROOT / "docs" / "benchmarks.md").read_text().partition("## Results")
    described = re.findall(r"`(\w+)`", "".join(row.split(" | ")[0] for row in _table(groups)))
    assert sorted(described) == sorted(GROUPS)
    for row in _table(seen):
        command = row.split(" | ")[-1].strip(" |`")
        assert command in GROUPS or (ROOT / command).is_file(), row


def list_used_settings(tree: ast.Module) -> Iterator[str]:
    """Yield the keys of the settings that a module of the benchmarks gives to processes.

    `two_nodes` takes settings of the scripted engine without their prefix. Keywords have two underscores for a dot.
    """
    short = {id(one) for node in ast.walk(tree) if isinstance(node, ast.Call) for one in _get_short_settings(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and "__" in (node.arg or ""):
            yield (node.arg or "").replace("__", ".")
        text = node.values[0] if isinstance(node, ast.JoinedStr) else node
        if isinstance(text, ast.Constant) and isinstance(text.value, str):
            key, equals, _ = text.value.partition("=")
            if equals and id(node) in short:
                yield f"engine.scripted.{key}"
            elif equals and re.fullmatch(r"[a-z_]+(\.[a-z_]+)+", key):
                yield key


def _get_short_settings(call: ast.Call) -> list[ast.expr]:
    return call.args[1:] if isinstance(call.func, ast.Name) and call.func.id == "two_nodes" else []


def test_settings_and_names_that_benchmarks_use_exist():
    used = {
        (key, file.name)
        for file in sorted((ROOT / "tests" / "bench").rglob("*.py"))
        for key in list_used_settings(ast.parse(file.read_text()))
    }
    assert {"engine.scripted.max_batch_size", "engine.scripted.refuse", "memory.cap"} <= {key for key, _ in used}
    assert [one for one in sorted(used) if one[0] not in KEYS] == []
    assert [name for name in re.findall(r'ours\["(\w+)"\]', BARE) if not hasattr(worker, name)] == []


def _table(text: str) -> list[str]:
    """Return the rows of all tables, without their headings."""
    lines = text.splitlines()
    return [line for line, below in pairwise([*lines, ""]) if line.startswith("| ") and not below.startswith("|---")]


SMALL, LARGE = KINDS[0], KINDS[3]
COSTS = {SMALL: Cost(10, 10.0, 1.0), LARGE: Cost(100, 1000.0, 2.0)}


def seen(*asked: Asked, leases: list[tuple[float, float, int]] | None = None) -> Seen:
    return Seen(asked=list(asked), leases=leases or [])


def test_the_oracle_counts_no_more_than_arrived_in_time_and_fits():
    early = [Asked(SMALL, 1.0), Asked(LARGE, 2.0)]
    late = Asked(SMALL, 101.0)
    assert oracle(seen(*early, late), COSTS, 1000, 100.0) == SMALL.tokens + LARGE.tokens
    assert oracle(seen(*early, late), COSTS, 99, 100.0) == SMALL.tokens, "the large one fits nowhere"


@pytest.mark.parametrize(
    ("room", "until", "leases", "share"),
    [
        (100, 5.0, [], 0.5),
        (100, 20.0, [(0.0, 30.0, 50)], 1.0),
        (100, 20.0, [(0.0, 30.0, 75)], 0.5),
        (1000, 1.0, [], 0.5),
    ],
    ids=["bytes x seconds", "a lease that leaves enough", "a lease", "seconds of the engine"],
)
def test_the_oracle_is_bound_by_the_room_and_by_the_engine(
    room: int, until: float, leases: list[tuple[float, float, int]], share: float
):
    assert oracle(seen(Asked(LARGE, 0.0), leases=leases), COSTS, room, until) == pytest.approx(share * LARGE.tokens)


REQUESTS = st.lists(st.tuples(st.integers(1, 100), st.floats(0.1, 10)), max_size=8)


@given(requests=REQUESTS, budget=st.floats(0, 30), chosen=st.lists(st.booleans(), min_size=8, max_size=8))
def test_no_choice_of_requests_within_a_budget_has_more_tokens_than_the_bound(
    requests: list[tuple[int, float]], budget: float, chosen: list[bool]
):
    taken = [one for one, wanted in zip(requests, chosen, strict=False) if wanted]
    if sum(cost for _, cost in taken) <= budget:
        assert sum(tokens for tokens, _ in taken) <= filled(requests, budget) + 1e-6


def test_arrivals_are_the_same_in_every_run_and_wait_for_no_answer():
    assert arrivals(30.0, 3.0) == arrivals(30.0, 3.0)
    times = [one.at for one in arrivals(30.0, 3.0)]
    assert times == sorted(times)
    assert times[-1] < 30.0
    assert [one.at for one in arrivals(60.0, 3.0)][: len(times)] == times


def test_a_machine_that_computes_half_as_fast_gets_half_as_many_requests():
    fast, slow = ({kind: Cost(1, 1.0, seconds) for kind in KINDS[:-1]} for seconds in (0.1, 0.2))
    assert arrival_rate(slow) == pytest.approx(arrival_rate(fast) / 2)
    offered = sum(fast[one.kind].computed for one in arrivals(3000.0, arrival_rate(fast)) if one.kind in fast)
    assert offered == pytest.approx(3000.0 * OFFERED_LOAD, rel=0.05)
