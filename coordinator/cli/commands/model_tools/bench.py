"""`cluster model bench`, added to the group of `coordinator.cli.commands.models`."""

import time
from typing import Any
from urllib.parse import quote

import click

from coordinator.cli.commands.model_tools.quantize import model
from coordinator.cli.commands.models import check_node_names
from coordinator.cli.spinner import show_spinner
from coordinator.client.api_client import ApiSession, print_table, session_options
from coordinator.client.errors import NOT_FOUND, REFUSED, CommandError
from wire.node_state import LINKED

BENCHMARK_TIMEOUT_SECONDS = 3700.0
"""Timeout of the measurement of one node, including the load of the model, in seconds."""
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
    tokens: first one request, then four at the same time. The requests have low priority. Earlier results of the same
    model version, node and software are replaced.

    With --show, print the stored speeds of MODEL, or of all models; --node limits the output to nodes. Exit code: 6 if
    a node was not measured.
    """
    if show:
        answer = session.request_json("GET", _BENCHMARKS + (f"?model={quote(name, safe='')}" if name else ""))
        if nodes:
            stored = answer["benchmarks"]
            existing = session.request_json("GET", "/api/v1/nodes")["nodes"]
            check_node_names(nodes, [*existing, *(row["node"] for row in stored)], "there is no such node")
            answer["benchmarks"] = [row for row in stored if {row["node"]["name"], row["node"]["id"]} & set(nodes)]
        session.print_answer(answer, _print_benchmarks)
        return
    if name is None:
        raise click.UsageError("name a MODEL, or give --show")
    models = [model for model in session.request_json("GET", "/api/v1/models")["models"] if model["name"] == name]
    places = [node for node in (models[0]["nodes"] if models else ()) if node["state"] in LINKED and not node["cause"]]
    if not places:
        raise CommandError(NOT_FOUND, f"no linked node can load the model {name}: look at `cluster model files`")
    check_node_names(nodes, places, f"no linked node of this name can load the model {name}")
    places = [node for node in places if not nodes or {node["name"], node["id"]} & set(nodes)]
    done: list[dict[str, Any]] = []
    failures: list[str] = []
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
