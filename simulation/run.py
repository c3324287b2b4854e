"""Run a scenario under each policy in turn, and compare the results with those of the clairvoyant router."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

from simulation.clock import VirtualLoop
from simulation.cluster import SimulatedPool
from simulation.report import RunStatistics, compute_statistics
from simulation.routers import CLAIRVOYANT, NAMES, create_router
from simulation.scenario import Scenario, ScenarioError, read_scenario
from simulation.workload import draw_conversations


def load_scenario_texts() -> dict[str, str]:
    """Return the TOML text of every scenario that the package contains, by name."""
    folder = resources.files("simulation") / "scenarios"
    return {
        file.name.removesuffix(".toml"): file.read_text("utf-8")
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".toml")
    }


def load(name: str) -> tuple[Scenario, Path]:
    """Read a scenario by its name in the package, or from a file. Return the scenario and the folder of its traces.

    Raise `ScenarioError` if there is no such scenario and no such file, or if the scenario is invalid.
    """
    known = load_scenario_texts()
    if name in known:
        return read_scenario(known[name]), Path()
    path = Path(name)
    if not path.is_file():
        raise ScenarioError(f"{name} is neither a file nor one of {', '.join(known)}")
    try:
        return read_scenario(path.read_text("utf-8")), path.parent
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{name} cannot be read: {error}") from None
    except ScenarioError as error:
        raise ScenarioError(f"{name}: {error}") from None


def select_policies(scenario: Scenario, chosen: Sequence[str]) -> list[str]:
    """Return the names of the policies to run, beginning with the clairvoyant router.

    They are the `chosen` names; without any, those of the scenario; without any there, all names. A name may have
    underscores in place of hyphens, as in the setting `router.policy`. Raise `ScenarioError` for an unknown policy.
    """
    wanted = [name.replace("_", "-") for name in chosen or scenario.policies or NAMES]
    unknown = [name for name in wanted if name not in NAMES and name != CLAIRVOYANT]
    if unknown:
        raise ScenarioError(f"there is no policy {unknown[0]!r}; there are {', '.join(NAMES)}")
    return [CLAIRVOYANT, *(name for name in dict.fromkeys(wanted) if name != CLAIRVOYANT)]


def run_scenario(
    scenario: Scenario, policy: str, seed: int, folder: Path, log: Callable[[str], None] | None = None
) -> tuple[RunStatistics, SimulatedPool]:
    """Run a scenario once under a policy, in virtual time. Return the statistics, and the pool after the run.

    `folder` is the folder of the scenario's traces. `log` receives one line for each notable event. Raise
    `ScenarioError` if a trace cannot be read, `LookupError` for an unknown policy, and `LedgerError` if the router's
    reservations are inconsistent at the end.
    """
    loop = VirtualLoop()
    try:
        pool = SimulatedPool(scenario, draw_conversations(scenario, seed, folder), loop, seed, log)
        loop.run_until_complete(pool.run(create_router(policy, pool, seed)))
        return compute_statistics(policy, pool, scenario.seconds), pool
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def compare(scenario: Scenario, policies: Sequence[str], seed: int, folder: Path) -> Iterator[RunStatistics]:
    """Run a scenario under all policies in turn, and yield each result when it is complete.

    The ratios of a result compare it with the first of `policies`, which must be the clairvoyant router
    (`select_policies`). `folder` is the folder of the scenario's traces. Raise the errors of `run_scenario`.
    """
    best: RunStatistics | None = None
    for policy in policies:
        row, _ = run_scenario(scenario, policy, seed, folder)
        best = best or row
        yield replace(
            row,
            ratio_p50=row.ttft_p50 / best.ttft_p50,
            ratio_p95=row.ttft_p95 / best.ttft_p95,
            ratio_p99=row.ttft_p99 / best.ttft_p99,
        )
