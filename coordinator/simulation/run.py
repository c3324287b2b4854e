"""Runs a scenario for each policy in turn and compares the results with the clairvoyant router."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

from coordinator.simulation.clock import VirtualLoop
from coordinator.simulation.cluster import SimulatedPool
from coordinator.simulation.report import RunStatistics, figures_of
from coordinator.simulation.routers import CLAIRVOYANT, NAMES, make
from coordinator.simulation.scenario import Scenario, ScenarioError, read
from coordinator.simulation.workload import draw


def shipped() -> dict[str, str]:
    """Return the text of every scenario in the package, by name."""
    folder = resources.files("coordinator.simulation") / "scenarios"
    return {
        file.name.removesuffix(".toml"): file.read_text("utf-8")
        for file in sorted(folder.iterdir(), key=lambda file: file.name)
        if file.name.endswith(".toml")
    }


def load(name: str) -> tuple[Scenario, Path]:
    """Read a scenario by its name or from a file. Return it and the folder of its traces.

    Raise `ScenarioError` if it is neither, or cannot be simulated.
    """
    known = shipped()
    if name in known:
        return read(known[name]), Path()
    path = Path(name)
    if not path.is_file():
        raise ScenarioError(f"{name} is neither a file nor one of {', '.join(known)}")
    try:
        return read(path.read_text("utf-8")), path.parent
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{name} cannot be read: {error}") from None
    except ScenarioError as error:
        raise ScenarioError(f"{name}: {error}") from None


def policies_of(scenario: Scenario, chosen: Sequence[str]) -> list[str]:
    """Return the names of the policies to run, the clairvoyant first: the chosen ones, else the scenario's, else all.

    Raise `ScenarioError` for an unknown policy.
    """
    wanted = list(chosen or scenario.policies or NAMES)
    unknown = [name for name in wanted if name not in NAMES and name != CLAIRVOYANT]
    if unknown:
        raise ScenarioError(f"there is no policy {unknown[0]!r}; there are {', '.join(NAMES)}")
    return [CLAIRVOYANT, *(name for name in dict.fromkeys(wanted) if name != CLAIRVOYANT)]


def play(
    scenario: Scenario, policy: str, seed: int, folder: Path, log: Callable[[str], None] | None = None
) -> tuple[RunStatistics, SimulatedPool]:
    """Run a scenario once, in virtual time."""
    loop = VirtualLoop()
    try:
        pool = SimulatedPool(scenario, draw(scenario, seed, folder), loop, seed, log)
        loop.run_until_complete(pool.run(make(policy, pool, seed)))
        return figures_of(policy, pool, scenario.seconds), pool
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def compare(scenario: Scenario, policies: Sequence[str], seed: int, folder: Path) -> Iterator[RunStatistics]:
    """Run all policies in turn. Yield each result when it is complete, with its ratios to the clairvoyant, which is
    first."""
    best: RunStatistics | None = None
    for policy in policies:
        row, _ = play(scenario, policy, seed, folder)
        best = best or row
        yield replace(
            row,
            ratio_p50=row.ttft_p50 / best.ttft_p50,
            ratio_p95=row.ttft_p95 / best.ttft_p95,
            ratio_p99=row.ttft_p99 / best.ttft_p99,
        )
