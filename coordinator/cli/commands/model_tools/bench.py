"""`cluster model bench`, added to the group of `coordinator.cli.commands.models`."""

import time
from typing import Any
from urllib.parse import quote

import click

from coordinator.cli.commands.model_tools.quantize import model
from coordinator.cli.spinner import show_spinner
from coordinator.client.api_client import ApiSession, print_table, session_options
from coordinator.client.errors import NOT_FOUND, REFUSED, CommandError
from wire.node_state import LINKED

BENCHMARK_TIMEOUT_SECONDS = 3700.0
"""Timeout of the measurement of one node, in seconds, with the load of the model."""
_BENCHMARKS = "/api/v1/benchmarks"


@model.command("bench")
@click.argument("name", metavar="MODEL", required=False)
@click.option("--node", "nodes", multiple=True, help="Only on this node; may be repeated. Default: all that have it.")
@click.option("--force", is_flag=True, help="Also measure a node that is busy with other requests.")
@click.option("--show", is_flag=True, help="Print the stored speeds; measure nothing.")
@session_options
def bench(session: ApiSession, name: str | None, nodes: tuple[str, ...], force: bool, show: bool) -> None:
    """Measure the speeds of a model on its nodes.

    Measure on each linked node that can load the model. Send prompts of 512 and 2,048 tokens with answers of 128
    tokens: first one request, then four at once. The requests have low priority. Stored results of the same model
    version, node and software are replaced.

    With --show, print the stored speeds of MODEL, or of all models; --node limits them. Exit code: 6 if a node was not
    measured.
    """
    if name is None and not show:
        raise click.UsageError("name a MODEL, or give --show")
    wanted = {node["id"]: node["name"] for node in (_read_node(session, node) for node in nodes)}
    if show:
        answer = session.request_json("GET", _BENCHMARKS + (f"?model={quote(name, safe='')}" if name else ""))
        if nodes:
            answer["benchmarks"] = [row for row in answer["benchmarks"] if row["node"]["id"] in wanted]
        session.print_answer(answer, _print_benchmarks)
        return
    models = [model for model in session.request_json("GET", "/api/v1/models")["models"] if model["name"] == name]
    places = [
        node
        for node in (models[0]["nodes"] if models else ())
        if node["state"] in LINKED and not node["cause"] and (not nodes or node["id"] in wanted)
    ]
    if not places:
        raise CommandError(NOT_FOUND, f"no linked node can load the model {name}: look at `cluster model files`")
    done: list[dict[str, Any]] = []
    missing = wanted.keys() - {place["id"] for place in places}
    failures = [f"{wanted[node]} cannot load {name} now" for node in sorted(missing)]
    for place in places:
        body = {"model": name, "node": place["id"], "force": force}
        try:
            with show_spinner(f"measuring {name} on {place['name']}"):
                answer = session.request_json("POST", _BENCHMARKS, body, BENCHMARK_TIMEOUT_SECONDS)
            done.append(answer["benchmark"])
        except CommandError as error:
            failures.append(error.message)
    session.print_answer({"schema": 1, "benchmarks": done, "failures": failures}, _print_benchmarks)
    if failures:
        raise CommandError(REFUSED, "; ".join(failures))


def _read_node(session: ApiSession, node: str) -> dict[str, Any]:
    """Return a node by name or id, as the API describes it. Raise `CommandError` if there is none."""
    return session.request_json("GET", f"/api/v1/nodes/{quote(node, safe='')}")["node"]


def _print_benchmarks(answer: dict[str, Any]) -> None:
    header = ("NODE", "PROMPT", "AT ONCE", "PREFILL", "DECODE")
    for benchmark in answer["benchmarks"]:
        date = time.strftime("%Y-%m-%d %H:%M", time.localtime(benchmark["measured"]))
        click.echo(
            f"{benchmark['model']} on {benchmark['node']['name']}, {date}: "
            f"longest prompt {benchmark['max_prompt']} tokens"
        )
        rows = [
            (benchmark["node"]["name"], str(run["prompt_tokens"]), str(run["parallel"]), *_format_run(run))
            for run in benchmark["runs"]
        ]
        print_table(header, rows, numbers=header[1:])
        for run in benchmark["runs"]:
            if run["skipped"]:
                click.echo(f"{run['parallel']} x {run['prompt_tokens']} tokens skipped: {run['skipped']}")


def _format_run(run: dict[str, Any]) -> tuple[str, str]:
    if run["skipped"]:
        return "-", "-"
    decode = f"{run['decode_speed']:,.0f} tok/s" if run["decode_speed"] else "-"
    return f"{run['prefill_speed']:,.0f} tok/s", decode
