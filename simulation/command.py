"""`cluster simulate`: run a scenario in virtual time under each policy, and print the results."""

import json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from simulation.report import RunStatistics


@click.command()
@click.argument("scenario")
@click.option("--policy", "policies", multiple=True, help="Only this policy; may be repeated.")
@click.option("--seed", type=int, help="Seed for the drawn requests; default: that of the scenario.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "--log", is_flag=True, help="Print the events under the first policy but the clairvoyant, instead of the table."
)
def simulate(scenario: str, policies: tuple[str, ...], seed: int | None, as_json: bool, log: bool) -> None:
    """Run a SCENARIO in virtual time under every policy and compare the results with a clairvoyant policy.

    SCENARIO is household, lab, or a TOML file (docs/simulation.md). No process is started and no pool is used.
    """
    from simulation.report import render_table
    from simulation.run import compare, load, run_scenario, select_policies
    from simulation.scenario import ScenarioError

    try:
        scenario_name, folder = load(scenario)
        names = select_policies(scenario_name, policies)
        seed = scenario_name.seed if seed is None else seed
        if log:
            run_scenario(scenario_name, names[min(1, len(names) - 1)], seed, folder, click.echo)
            return
        rows: list[RunStatistics] = []
        for row in compare(scenario_name, names, seed, folder):
            rows.append(row)
            click.echo(f"{row.policy}: {row.served} of {row.requests}", err=True)
    except ScenarioError as error:
        raise click.UsageError(str(error)) from None
    if as_json:
        click.echo(
            json.dumps({"schema": 1, "scenario": scenario, "seed": seed, "rows": [_convert_row(row) for row in rows]})
        )
        return
    click.echo(
        f"{scenario_name.about}\n{rows[0].requests} requests, {rows[0].fit} of them fit on some node; seed {seed}\n"
    )
    click.echo(render_table(rows))


def _convert_row(row: "RunStatistics") -> dict[str, object]:
    """Convert a row for JSON. Infinity (never) and NaN (no value) become null."""
    return {
        name: value if not isinstance(value, float) or math.isfinite(value) else None
        for name, value in asdict(row).items()
    }
