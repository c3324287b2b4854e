"""Play the scenarios and compare their logs with the stored ones.

`MACPOOL_REWRITE=1` writes the logs again; review the difference.
"""

from pathlib import Path

from simulation.cluster import SimulatedPool
from simulation.run import load, run_scenario

STORIES = sorted((Path(__file__).parent / "stories").glob("*.toml"))


def told(path: Path, policy: str = "balanced") -> str:
    """Return the log of a scenario, with its figures at the end."""
    return play(path, policy)[0]


def play(path: Path, policy: str) -> tuple[str, SimulatedPool]:
    """Play a scenario; return its log, with its figures at the end, and the pool after it."""
    scenario, folder = load(str(path))
    lines = [f"# {scenario.about}"]
    figures, pool = run_scenario(scenario, policy, scenario.seed, folder, lines.append)
    lines.append(
        f"= {figures.served} of {figures.requests} served, {figures.refused} refused, {figures.failed} failed, "
        f"TTFT p50 {figures.ttft_p50:.2f} s, p95 {figures.ttft_p95:.2f} s, {figures.loads} loads, "
        f"{pool.reports} reports"
    )
    return "\n".join(lines) + "\n", pool
