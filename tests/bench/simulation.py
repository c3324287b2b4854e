"""Targets of the router under load, in virtual time. The scenarios were committed before any tuning.

`ratio` rows are means over SEEDS. A run has only some hundred requests, and a few more or fewer long prompts move the
95th percentile by a third.
"""

import random
import statistics
import time
from pathlib import Path

from router.placement.candidate import ResourceDemand
from router.placement.cluster_view import ClusterView
from router.placement.place import place
from router.placement.policies import POLICIES
from router.placement.reservations import ReservationLedger
from simulation.clock import VirtualLoop
from simulation.cluster import SimulatedPool
from simulation.report import RunStatistics, render_table
from simulation.routers import CLAIRVOYANT, ProductionRouter
from simulation.run import compare, load, run_scenario, select_policies
from tests.bench.row import Row, commit

SCENARIOS = Path(__file__).parents[1] / "sim" / "scenarios"
OURS = "balanced"
SEEDS = (1, 2, 3)
DECISIONS = 2_000
DECISION_NODES = 64
"""Number of nodes of a large pool (docs/decisions/0037-one-way-of-placement.md)."""


def bench_small(_: Path) -> list[Row]:
    """Compare the household and the lab with the clairvoyant policy."""
    rows: list[Row] = []
    for name in ("household", "lab"):
        scenario, folder = load(name)
        runs = [list(compare(scenario, [CLAIRVOYANT, OURS], seed, folder))[1] for seed in SEEDS]
        ratio = statistics.mean(run.ratio_p95 for run in runs)
        each = ", ".join(f"{run.ratio_p95:.2f}" for run in runs)
        refused = sum(run.refused + run.failed for run in runs)
        figure = f"{ratio:.2f} x the clairvoyant's ({each})"
        rows += [
            Row(f"{name}: TTFT p95", "<= 1.15 x a clairvoyant's", figure, ratio <= 1.15, commit()),
            Row(f"{name}: refused or failed though it fits somewhere", "0", str(refused), refused == 0, commit()),
        ]
    return rows


def bench_large(_: Path) -> list[Row]:
    """Simulate a thousand mixed nodes, the same with little memory, and five thousand."""
    rows: list[Row] = []
    for name, limit in (("thousand", 0.005), ("tight", 0.02)):
        runs = _all(name)
        ours, others = runs[OURS], [run for key, run in runs.items() if key not in (OURS, CLAIRVOYANT)]
        failed = ours.failed + ours.refused
        first = ours.first_refused
        rows += [
            Row(f"{name}: first-try refusals", f"< {limit:.1%}", f"{first:.2%}", first < limit, commit()),
            Row(f"{name}: failed though it fits somewhere", "0", str(failed), failed == 0, commit()),
        ]
        for word in ("p50", "p99"):
            best = min(others, key=lambda run: getattr(run, f"ttft_{word}"))
            mine, theirs = getattr(ours, f"ttft_{word}"), getattr(best, f"ttft_{word}")
            figure = f"{mine:.2f} s, {best.policy} {theirs:.2f} s"
            target = "best of all policies, or within 5 %"
            rows.append(Row(f"{name}: TTFT {word}", target, figure, mine <= 1.05 * theirs, commit()))
    scenario, folder = load(str(SCENARIOS / "five-thousand.toml"))
    begun = time.monotonic()
    run, _pool = run_scenario(scenario, OURS, scenario.seed, folder)
    figure = f"{run.served} of {run.fit} served, TTFT p50 {run.ttft_p50:.2f} s, in {time.monotonic() - begun:.0f} s"
    return [*rows, Row("5,000 nodes", "all that fit are served", figure, run.served == run.fit, commit())]


def bench_scarce(_: Path) -> list[Row]:
    """Run the scenarios of scarcity.

    Six models on memory for three.
    A greedy key among five, with long and with short prompts.
    A day with lost machines.
    A machine that joins in a batch.
    """
    six, greedy, chatty, death = _all("six-models"), _all("greedy"), _all("chatty"), _all("death")
    joining = _all("joining")
    late = joining[OURS].ttft_p95 / joining[CLAIRVOYANT].ttft_p95
    ours, fewest = six[OURS], min(run.loads for run in six.values() if run.served == run.fit)
    jain, lost = greedy[OURS].jain, death[OURS].refused + death[OURS].failed
    return [
        Row(
            "six models: loads",
            "<= 1.2 x the best plan's",
            f"{ours.loads}, best {fewest}",
            ours.loads <= 1.2 * fewest,
            commit(),
        ),
        Row(
            "six models: no request starved",
            "0 not served",
            str(ours.fit - ours.served),
            ours.served == ours.fit,
            commit(),
        ),
        Row("one greedy key of five: Jain's index", ">= 0.9", f"{jain:.3f}", jain >= 0.9, commit()),
        Row(
            "one key with many short requests: Jain's index",
            ">= 0.9",
            f"{chatty[OURS].jain:.3f}",
            chatty[OURS].jain >= 0.9,
            commit(),
        ),
        Row(
            "a machine joins in a batch: TTFT p95",
            "<= 1.15 x a clairvoyant's, which moves nothing",
            f"{late:.2f} x",
            late <= 1.15,
            commit(),
        ),
        Row("nodes are lost and return: not served", "0", str(lost), lost == 0, commit()),
    ]


def bench_decision(_: Path) -> list[Row]:
    """Measure one decision among `DECISION_NODES` nodes of the scenario with a thousand."""
    scenario, _folder = load(str(SCENARIOS / "thousand.toml"))
    loop = VirtualLoop()
    pool = SimulatedPool(scenario, [], loop, 1)
    ours = ProductionRouter(pool, 1, POLICIES[OURS])
    loop.run_until_complete(pool.run(ours))
    view, draw = ClusterView(ours.dispatcher.view.nodes[:DECISION_NODES]), random.Random(1).random
    loop.close()
    ledger = ReservationLedger()
    demands = [ResourceDemand("chat-8b", size) for size in range(400, 40_400, 400)]
    begun = time.thread_time()
    for number in range(DECISIONS):
        place(view, demands[number % len(demands)], ledger, now=0.0, draw=draw)
    micros = (time.thread_time() - begun) / DECISIONS * 1e6
    row = f"a decision among {DECISION_NODES} nodes"
    return [Row(row, "<= 1000 us", f"{micros:.1f} us of CPU", micros <= 1000, commit())]


def _all(name: str) -> dict[str, RunStatistics]:
    """Play a scenario under all its policies and print the table."""
    scenario, folder = load(str(SCENARIOS / f"{name}.toml"))
    rows = list(compare(scenario, select_policies(scenario, ()), scenario.seed, folder))
    print(f"{name}: {scenario.about}\n{render_table(rows)}\n", flush=True)
    return {row.policy: row for row in rows}


def bench_simulation(folder: Path) -> list[Row]:
    """Run all simulations in a quarter of an hour. Most of the time goes to the peers' policies with a thousand
    nodes."""
    return [*bench_decision(folder), *bench_small(folder), *bench_scarce(folder), *bench_large(folder)]
