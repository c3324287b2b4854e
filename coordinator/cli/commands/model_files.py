"""`cluster model files`, `rm` and `verify`, added to the group of `coordinator.cli.commands.models`."""

import time
from typing import Any

import click

from coordinator.cli.commands.models import check_node_names, model
from coordinator.cli.commands.tokens_and_keys import Duration
from coordinator.cli.group import confirm, yes_option
from coordinator.cli.memory_breakdown import format_age
from coordinator.cli.spinner import show_spinner
from coordinator.client.api_client import ApiSession, print_table, session_options
from coordinator.client.errors import NOT_FOUND, REFUSED, CommandError
from coordinator.client.terminal_text import replace_control_characters
from wire.node_state import LINKED, NodeState
from wire.units import show_size

ORDER_TIMEOUT_SECONDS = 7 * 3600.0
"""Timeout of a verification or removal, in seconds. The coordinator abandons such an order after 6 hours."""
IDENTITY_TEXTS = {"content": "same content", "sampled": "same samples", "differs": "DIFFERS"}
"""Text for each `VersionGrade`, the comparison of a node's files with the version that new requests use."""

_PATHS = {"remove": "/api/v1/models/remove", "verify": "/api/v1/models/verify"}
Copy = dict[str, Any]
"""A model on a node: the row of the node in `/api/v1/models`, with the name of the model as `copy_of`."""


@model.command("files")
@click.option(
    "--unused-since", type=Duration(), help="Only copies without a request or a download for this time (30d)."
)
@session_options
def list_files(session: ApiSession, unused_since: float | None) -> None:
    """List the copies of models on the disks of the nodes.

    Columns: size, quantization, identity and last use.

    Same content: all bytes are equal on the nodes. Same samples: not all files are hashed yet. The free space of each
    disk is below the table.
    """
    answer = {
        "schema": 1,
        "copies": _fetch_copies(session, unused_since),
        "disks": [
            {"name": node["name"], **node["disk"]} for node in session.request_json("GET", "/api/v1/nodes")["nodes"]
        ],
    }
    session.print_answer(answer, _print_files)


def _fetch_copies(session: ApiSession, unused_since: float | None = None) -> list[Copy]:
    """Return all copies of models on members.

    With `unused_since`, return only copies without a use for these seconds that are neither loaded nor loading, and
    whose files are older as well. A model is thus kept for that time after its download.
    """
    answer = session.request_json("GET", "/api/v1/models")
    copies = [
        {"copy_of": model["name"], **node}
        for model in answer["models"]
        for node in model["nodes"]
        if node["state"] != NodeState.LEFT
    ]
    if unused_since is None:
        return copies
    limit = time.time() - unused_since
    return [
        copy
        for copy in copies
        if max(copy["used"], copy.get("written", 0.0)) < limit and copy["model"] not in ("loaded", "loading")
    ]


def _print_files(answer: dict[str, Any]) -> None:
    rows = [
        (
            copy["copy_of"],
            copy["name"],
            show_size(copy["stored"]) if copy["stored"] else "-",
            copy["quantization"] or "-",
            "cannot load" if copy["cause"] else IDENTITY_TEXTS[copy["identity"]],
            format_age(time.time() - copy["used"]) if copy["used"] else "never",
        )
        for copy in answer["copies"]
    ]
    header = ("MODEL", "NODE", "SIZE", "QUANTIZATION", "IDENTITY", "USED")
    print_table(header, rows, alarming=("DIFFERS", "cannot load"), numbers=("SIZE",), fold=("MODEL",))
    for copy in answer["copies"]:
        if copy["cause"]:
            click.echo(f"{copy['name']} cannot load {copy['copy_of']}: {replace_control_characters(copy['cause'])}")
    for disk in answer["disks"]:
        if disk["total"]:
            click.echo(f"{disk['name']}: {show_size(disk['free'])} of {show_size(disk['total'])} free")


@model.command("rm")
@click.argument("model", required=False)
@click.option("--node", "nodes", multiple=True, help="Only on this node; may be repeated. Default: all nodes.")
@click.option(
    "--unused-since", type=Duration(), help="All models without a request or a download for this time (30d), by node."
)
@yes_option
@session_options
def remove(
    session: ApiSession, model: str | None, nodes: tuple[str, ...], unused_since: float | None, yes: bool
) -> None:
    """Delete a model from the disks of the nodes.

    Name either MODEL or --unused-since, which deletes each model that a node has not used for this time. Models that
    were downloaded within this time are kept. A loaded model is not deleted: unload it first. Copies stay on absent
    nodes, and in folders where the node may not delete files. With MODEL and --node, the files of an incomplete
    download are deleted as well.
    """
    if (model is None) == (unused_since is None):
        raise click.UsageError("name a MODEL or give --unused-since")
    if model is None and nodes:
        existing = session.request_json("GET", "/api/v1/nodes")["nodes"]
        check_node_names(nodes, existing, "there is no such node")
    copies = [
        copy
        for copy in _fetch_copies(session, unused_since)
        if model in (None, copy["copy_of"]) and (not nodes or {copy["name"], copy["id"]} & set(nodes))
    ]
    chosen = [copy for copy in copies if copy["removable"] and copy["state"] in LINKED]
    for copy in copies:
        if copy not in chosen:
            reason = f"the node is {copy['state']}" if copy["removable"] else "the node may not delete these files"
            click.echo(f"{copy['copy_of']} stays on {copy['name']}: {reason}", err=True)
    listed_nodes = {str(copy[key]) for copy in copies for key in ("name", "id")}
    unlisted = sorted(set(nodes) - listed_nodes) if model is not None else []
    if not chosen and not unlisted:
        hint = "; name the node of an incomplete download with --node" if not nodes else ""
        raise CommandError(NOT_FOUND, f"there is no copy of {model or 'an unused model'} to delete{hint}")
    listed = [f"{copy['copy_of']} on {copy['name']} ({show_size(copy['stored'])})" for copy in chosen]
    listed += [f"an incomplete download of {model} on {name}" for name in unlisted]
    confirm(f"Delete {', '.join(listed)}?", yes=yes)
    chosen += [{"copy_of": model, "name": name, "id": name} for name in unlisted]
    _run_orders(session, "remove", chosen)


@model.command("verify")
@click.argument("model")
@click.option("--node", "nodes", multiple=True, help="Only on this node; may be repeated. Default: all nodes.")
@session_options
def verify(session: ApiSession, model: str, nodes: tuple[str, ...]) -> None:
    """Compute the digests of a model's files again.

    Each linked node that has the model reads all files, one node after the other.
    """
    copies = [copy for copy in _fetch_copies(session) if copy["copy_of"] == model and copy["state"] in LINKED]
    if not copies:
        raise CommandError(NOT_FOUND, f"no linked node has the model {model}: look at `cluster model files`")
    check_node_names(nodes, copies, f"no linked node of this name has the model {model}")
    _run_orders(session, "verify", [c for c in copies if not nodes or {c["name"], c["id"]} & set(nodes)])


def _run_orders(session: ApiSession, verb: str, copies: list[Copy]) -> None:
    """Run an order for each copy, one after the other. Continue after a failure, and raise it at the end."""
    done: list[dict[str, Any]] = []
    failures: list[str] = []
    for copy in copies:
        body = {"model": copy["copy_of"], "node": copy["id"]}
        try:
            with show_spinner(f"{verb} {copy['copy_of']} on {copy['name']}"):
                done.append(session.request_json("POST", _PATHS[verb], body, timeout=ORDER_TIMEOUT_SECONDS))
        except CommandError as error:
            failures.append(error.message)
    session.print_answer({"schema": 1, "done": done, "failures": failures}, _print_done)
    if failures:
        raise CommandError(REFUSED, "; ".join(failures))


def _print_done(answer: dict[str, Any]) -> None:
    for step in answer["done"]:
        name = step["node"]["name"]
        if step["content"]:
            click.echo(f"{step['model']} on {name}: all files read, content {step['content'][:12]}")
        else:
            click.echo(f"{step['model']} deleted on {name}, {show_size(step['freed'])} freed")
