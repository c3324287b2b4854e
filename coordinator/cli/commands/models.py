"""`cluster models`, and most commands of `cluster model`: list, show, want, load, unload and measure models."""

import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click

from coordinator.cli.commands.tokens_and_keys import Duration
from coordinator.cli.group import CommandGroup
from coordinator.cli.spinner import show_spinner
from coordinator.client.api_client import ApiSession, print_table, session_options, wide_session_options
from coordinator.client.errors import NOT_FOUND, CommandError
from wire.models.kind import ModelKind
from wire.models.version import ModelVersion
from wire.node_state import NodeState
from wire.units import show_count, show_size

LOAD_TIMEOUT_SECONDS = 3700.0
"""Timeout of a load, unload or measurement, in seconds. The coordinator abandons a load after 1 hour."""
_PURPOSES = {ModelKind.EMBED: "for embeddings", ModelKind.RERANK: "for rerank"}
_WISH_PATH = "/api/v1/models/wishes/"


@click.command()
@wide_session_options
def models(session: ApiSession) -> None:
    """List the models and the nodes that have them.

    For each model: where it is loaded, how many nodes have it, and why a node cannot load it. Models for embeddings and
    for rerank are listed below the table, then aliases with their candidates. `-o wide` names every node, with the
    speeds and sizes that were measured there.
    """
    session.print_answer(
        session.request_json("GET", "/api/v1/models"), lambda answer: print_models(answer, wide=session.wide)
    )


@click.group(cls=CommandGroup)
def model() -> None:
    """List, load, keep loaded, measure, verify, quantize or delete models."""


model.add_command(models, "list")


@model.command("show")
@click.argument("name", metavar="MODEL")
@session_options
def show_model(session: ApiSession, name: str) -> None:
    """Show one model, with its sizes and speeds on each node."""
    answer = session.request_json("GET", "/api/v1/models")
    matches = [entry for entry in answer["models"] if entry["name"].casefold() == name.casefold()]
    if not matches:
        known = ", ".join(entry["name"] for entry in answer["models"]) or "none"
        raise CommandError(NOT_FOUND, f"no node has the model {name}; models: {known}")
    session.print_answer(
        {"schema": 1, "model": matches[0]}, lambda answer: print_models({"models": [answer["model"]]}, wide=True)
    )


def print_models(answer: dict[str, Any], *, wide: bool) -> None:
    """Print the models of a response of `/api/v1/models` as a table, with aliases, conflicts and causes below.

    With `wide`, name every node, and add measured speeds and sizes.
    """
    if wide:
        rows = [
            (
                m["name"],
                ", ".join(_format_place(member) for member in m["nodes"]),
                show_size(m["weights"]),
                str(m["context"]),
            )
            for m in answer["models"]
        ]
        print_table(("MODEL", "NODES", "WEIGHTS", "CONTEXT"), rows, full_width=True)
    else:
        rows = [
            (m["name"], _format_loaded_on(m), str(_count_holders(m)), show_size(m["weights"]), str(m["context"]))
            for m in answer["models"]
        ]
        print_table(
            ("MODEL", "LOADED ON", "NODES", "WEIGHTS", "CONTEXT"), rows, numbers=("NODES", "WEIGHTS", "CONTEXT")
        )
    for kind, purpose in _PURPOSES.items():
        names = [m["name"] for m in answer["models"] if m.get("kind") == kind]
        if names:
            click.echo(f"{purpose}: {', '.join(names)}")
    for alias in answer.get("aliases", ()):
        click.echo(_describe_alias(alias))
    for model in answer["models"]:
        if model.get("conflict"):
            click.echo(_describe_conflict(model))
        for node in model["nodes"]:
            if node["cause"]:
                click.echo(f"{node['name']} cannot load {model['name']}: {node['cause']}")
            if not wide:
                continue
            speeds = [_format_speeds(node)] if node["model"] == "loaded" and node.get("decode_speed") else []
            speeds += [_format_measured(node["measured"])] if node.get("measured") else []
            speeds += [format_benchmark(node["benchmark"])] if node.get("benchmark") else []
            if speeds:
                click.echo(f"{model['name']} on {node['name']}: {'; '.join(speeds)}")


def _describe_alias(alias: dict[str, Any]) -> str:
    """Describe an alias: its candidates in order, its upstream, and the first candidate that a node can serve."""
    served, upstream = alias["served"], alias.get("upstream")
    candidates = [*alias["candidates"], *([f"upstream {upstream}"] if upstream else [])]
    note = "no node can serve any of them" if served is None else f"first one on a node: {served}"
    return f"alias {alias['name']}: {', then '.join(candidates)} ({note})"


def _format_loaded_on(model: dict[str, Any]) -> str:
    """Return the nodes that have a model in memory, or load it now."""
    loading = [
        node for node in model["nodes"] if node["model"] in ("loaded", "loading") and node["state"] != NodeState.LEFT
    ]
    return ", ".join(_format_place(node) for node in loading) or "-"


def _count_holders(model: dict[str, Any]) -> int:
    """Return how many nodes have a model on their disk."""
    return sum(node["state"] != NodeState.LEFT for node in model["nodes"])


def _describe_conflict(model: dict[str, Any]) -> str:
    """Describe which nodes have which model under one name, with the next step."""
    served = ModelVersion(model["fingerprint"], model.get("content", ""))
    holders: dict[ModelVersion, list[str]] = {}
    for node in model["nodes"]:
        if not node["cause"] and node["state"] != NodeState.LEFT:
            version = ModelVersion(node["fingerprint"], node.get("content", ""))
            holders.setdefault(served if version.is_same(served) else version, []).append(node["name"])
    sides = [
        f"{_format_version(version)}{' (served)' if version == served else ''} on {', '.join(sorted(holders[version]))}"
        for version in sorted(holders, key=lambda version: (version != served, version))
    ]
    return (
        f"{model['name']} is not the same model everywhere: {'; '.join(sides)}. New requests go to the served one "
        "only: pull it again where it differs, or rename its folder there"
    )


def _format_version(version: ModelVersion) -> str:
    content = f" with content {version.content[:8]}" if version.content else ""
    return f"{version.fingerprint[:8] or 'unknown'}{content}"


def _format_speeds(node: dict[str, Any]) -> str:
    """Format the speeds of prefill and decode of a model on a node."""
    return f"prefill {node['prefill_speed']:,.0f} tokens/s, decode {node['decode_speed']:,.0f} tokens/s for one request"


def format_benchmark(benchmark: dict[str, Any]) -> str:
    """Format a benchmark (object of `/api/v1/benchmarks`) with its date, the speeds of its first run, and longest
    prompt."""
    run = benchmark["runs"][0]
    speeds = f"{run['prefill_speed']:,.0f} / {run['decode_speed']:,.0f} tokens/s" if not run["skipped"] else "skipped"
    day = time.strftime("%Y-%m-%d", time.localtime(benchmark["measured"]))
    return f"bench of {day}: prefill / decode {speeds}, longest prompt {benchmark['max_prompt']} tokens"


def _format_measured(measured: dict[str, Any]) -> str:
    """Format the measured memory of a model."""
    sizes = {name: show_size(measured[name]) for name in ("kv_per_token", "transient", "residual")}
    return (
        f"rows of up to {measured['max_context']} tokens, {measured['max_batch']} typical rows at once; "
        f"{sizes['kv_per_token']} per token, {sizes['transient']} per forward pass, residual {sizes['residual']}"
    )


def _format_place(node: dict[str, Any]) -> str:
    return format_model_label(node["name"], node) + ("" if node["state"] == NodeState.READY else f" {node['state']}")


def check_node_names(names: Sequence[str], rows: Sequence[Mapping[str, Any]], problem: str) -> None:
    """Raise `CommandError` unless each of `names` is the name or id of a row.

    The error text consists of the first unknown name, `problem`, and the names of all rows.
    """
    known = {row[key] for row in rows for key in ("name", "id")}
    for name in names:
        if name not in known:
            listed = ", ".join(sorted({row["name"] for row in rows})) or "none"
            raise CommandError(NOT_FOUND, f"{name}: {problem}; nodes: {listed}")


def format_model_label(name: str, row: dict[str, Any]) -> str:
    """Format `name` with the state of a model, or alone if the model is loaded.

    `name` is the name of the model or of a node. `row` is the row of the model on a node in `/api/v1/models`. Its field
    `model` is the state: loaded, loading, known or failed.
    """
    reading = f" (loading, {row.get('progress', 0.0):.0%})"
    words = {"loaded": "", "loading": reading, "known": " (not loaded)", "failed": " (cannot load)"}
    return name + words[row["model"]]


@model.command()
@click.argument("model")
@click.option("--node", help="Load on this node; default: the node with enough memory that would answer first.")
@session_options
def load(session: ApiSession, model: str, node: str | None) -> None:
    """Load a model into the memory of a node and wait for it. Ctrl-C ends the wait, not the load.

    Without --node, if a node refuses, the next best node is tried.
    """
    with show_spinner(f"loading {model}"):
        answer = session.request_json(
            "POST", "/api/v1/models/load", {"model": model, "node": node}, LOAD_TIMEOUT_SECONDS
        )
    session.print_answer(answer, _print_load)


def _print_load(answer: dict[str, Any]) -> None:
    node = answer["node"]
    if node["already"]:
        click.echo(f"{answer['model']} is loaded on {node['name']} already")
    else:
        click.echo(f"{answer['model']} loaded on {node['name']} in {node['seconds']:.1f} s")


@model.command()
@click.argument("model")
@click.option("--node", help="Only on this node; default: all nodes where it is loaded.")
@session_options
def unload(session: ApiSession, model: str, node: str | None) -> None:
    """Unload a model and free its memory. A model in use is not unloaded. The next request loads the model again.

    If one node fails, the other nodes still unload the model.
    """
    with show_spinner(f"unloading {model}"):
        answer = session.request_json(
            "POST", "/api/v1/models/unload", {"model": model, "node": node}, LOAD_TIMEOUT_SECONDS
        )
    session.print_answer(answer, _print_unload)


def _print_unload(answer: dict[str, Any]) -> None:
    for node in answer["nodes"]:
        click.echo(f"{answer['model']} unloaded on {node['name']} in {node['seconds']:.1f} s")


@model.command()
@click.argument("model")
@click.option("--node", help="Only on this node; default: where it is loaded, else where it would be loaded.")
@session_options
def profile(session: ApiSession, model: str, node: str | None) -> None:
    """Measure the memory that a model needs on a node.

    The node measures prompts up to the longest that fits, and stores the result. The measurement takes up to 10 minutes
    and uses free memory; only its last check may evict cached prompts. Requests are slower during the measurement.
    Ctrl-C ends the measurement.
    """
    with show_spinner(f"measuring {model}"):
        answer = session.request_json(
            "POST", "/api/v1/models/profile", {"model": model, "node": node}, LOAD_TIMEOUT_SECONDS
        )
    session.print_answer(answer, _print_profile)


def _print_profile(answer: dict[str, Any]) -> None:
    for node in answer["nodes"]:
        summary = _format_measured(node["measured"]) if node.get("measured") else "done"
        click.echo(f"{answer['model']} measured on {node['name']} in {node['seconds']:.1f} s: {summary}")


@model.command()
@click.argument("name", metavar="MODEL")
@click.option(
    "--replicas",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of nodes that keep the model loaded.",
)
@click.option("--label", "labels", multiple=True, help="Only nodes with this label; may be repeated.")
@click.option("--allow", multiple=True, metavar="NODE", help="Only on this node; may be repeated.")
@click.option("--deny", multiple=True, metavar="NODE", help="Never on this node; may be repeated.")
@click.option(
    "--idle-unload", type=Duration(), help="Unload after this time without a request, such as 30m; default: never."
)
@click.option(
    "--cost",
    type=click.IntRange(1),
    default=10,
    show_default=True,
    help="Eviction cost. Another wish unloads these replicas only if its cost is higher.",
)
@click.option("--on-first-request", is_flag=True, help="Load only after the first request since the pool started.")
@session_options
def want(
    session: ApiSession,
    name: str,
    replicas: int,
    labels: tuple[str, ...],
    allow: tuple[str, ...],
    deny: tuple[str, ...],
    idle_unload: float | None,
    cost: int,
    on_first_request: bool,
) -> None:
    """Keep a model loaded, on one node or several.

    The pool loads the replicas where they fit, and loads them again after a restart. The new wish replaces an earlier
    wish for the model.
    """
    body = {
        "replicas": replicas,
        "labels": labels,
        "allow": allow,
        "deny": deny,
        "idle_unload_seconds": idle_unload,
        "eviction_cost": cost,
        "load_at_boot": not on_first_request,
    }
    answer = session.request_json("PUT", _WISH_PATH + quote(name, safe="/"), body)
    session.print_answer(answer, _print_wish)


def _print_wish(answer: dict[str, Any]) -> None:
    wish = answer["wish"]
    click.echo(
        f"{wish['model']}: {show_count(wish['replicas'], 'replica')} wanted; `cluster model plan` shows the progress"
    )


@model.command()
@click.argument("name", metavar="MODEL")
@session_options
def unwant(session: ApiSession, name: str) -> None:
    """End the wish for a model. Loaded replicas stay loaded."""
    answer = session.request_json("DELETE", _WISH_PATH + quote(name, safe="/"))
    session.print_answer(answer, lambda ended: click.echo(f"{ended['model']} is not wanted any more"))


@model.command()
@session_options
def plan(session: ApiSession) -> None:
    """Show wanted models, next actions and unmet wishes.

    Each wanted model is shown with its nodes. An unmet wish is shown with the missing memory or nodes, and the next
    step.
    """
    session.print_answer(session.request_json("GET", "/api/v1/models/plan"), print_plan)


def print_plan(answer: dict[str, Any]) -> None:
    """Print a response of `/api/v1/models/plan`: a table of the wishes, then actions and shortfalls as lines."""
    if not answer["wishes"]:
        click.echo("no model is wanted: `cluster model want MODEL` keeps one loaded")
        return
    print_table(
        ("MODEL", "WANTED", "READY", "NODES"),
        [(row["model"], str(row["wanted"]), str(len(row["ready"])), _format_replicas(row)) for row in answer["wishes"]],
        numbers=("WANTED", "READY"),
    )
    for action in answer["running"]:
        click.echo(f"now: {_format_action(action)}")
    for action in answer["next"]:
        click.echo(f"next: {_format_action(action)}")
    for row in answer["wishes"]:
        if row["missing"]:
            click.echo(f"{row['model']}: {row['missing']}")


def _format_replicas(row: dict[str, Any]) -> str:
    nodes = [*row["ready"], *(f"{name} (loading)" for name in row["loading"])]
    nodes += [f"{name} (away)" for name in row["away"]]
    return ", ".join(nodes) or ("-" if row["wanted"] else "at rest until a request")


def _format_action(action: dict[str, Any]) -> str:
    if action["action"] == "load":
        return f"load {action['model']} on {action['name']}"
    return f"unload {action['model']} from {action['name']} ({action['why']})"
