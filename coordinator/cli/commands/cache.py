"""`cluster cache`: show and delete the cached prompts of the nodes."""

from collections.abc import Iterator
from typing import Any

import click

from coordinator.cli.group import CommandGroup, confirm, yes_option
from coordinator.client.api_client import ApiSession, print_table, session_options
from coordinator.client.errors import NOT_FOUND, CommandError
from wire.units import show_size

CLEAR_TIMEOUT_SECONDS = 120.0

Entry = dict[str, Any]
"""JSON object of an answer of the API."""


@click.group(cls=CommandGroup)
def cache() -> None:
    """Show or delete cached prompts, in memory and on the disk.

    A request whose prompt starts like an earlier one reuses the cached tokens of that prompt.
    """


@cache.command("status")
@click.option("--node", help="Only this node.")
@click.option("--model", help="Only this model.")
@session_options
def status(session: ApiSession, node: str | None, model: str | None) -> None:
    """Show the cached prompts of each node and model.

    Sizes and hits are shown for memory and for the disk, and for the disk also the quota and the write budget. For a
    node without a disk cache, the command shows the number of prompts that were evicted from memory.
    """
    nodes = _select_nodes(session.request_json("GET", "/api/v1/nodes")["nodes"], node, model)
    session.print_answer({"schema": 1, "nodes": nodes}, _print_status)


def _select_nodes(rows: list[Entry], node: str | None, model: str | None) -> list[Entry]:
    """Return the prefix caches of the rows of nodes; with `node`, only that node; with `model`, only that model.

    Raise `CommandError` if there is no such node.
    """
    present = [row for row in rows if row["state"] != "left" and node in (None, row["name"], row["id"])]
    if node is not None and not present:
        raise CommandError(NOT_FOUND, f"there is no node {node}: look at `cluster nodes`")
    return [
        {
            "id": row["id"],
            "name": row["name"],
            "state": row["state"],
            "cache": {
                **row["engine"]["cache"],
                "models": [entry for entry in row["engine"]["cache"]["models"] if model in (None, entry["model"])],
            },
        }
        for row in present
    ]


def _print_status(answer: Entry) -> None:
    rows = [row for node in answer["nodes"] for row in _list_rows(node)]
    if rows:
        heads = ("NODE", "MODEL", "MEMORY", "PROMPTS", "HITS", "DISK", "FILES", "DISK HITS")
        print_table(heads, rows, numbers=("PROMPTS", "HITS", "FILES", "DISK HITS"))
    else:
        click.echo("no cached prompts")
    for node in answer["nodes"]:
        click.echo(_describe_disk(node["name"], node["cache"]))


def _list_rows(node: Entry) -> Iterator[tuple[str, ...]]:
    for entry in node["cache"]["models"]:
        yield (
            node["name"],
            entry["model"],
            show_size(entry["nbytes"]),
            str(entry["entries"]),
            str(entry["hits"]),
            show_size(entry["disk_bytes"]),
            str(entry["disk_files"]),
            str(entry["disk_hits"]),
        )


def _describe_disk(name: str, state: Entry) -> str:
    """Return a line about the disk cache of a node."""
    if not state["store"]:
        return (
            f"{name}: no disk cache; {state['evictions']} prompts were evicted since its engine started. "
            "engine.mlx.disk_cache_size=auto stores prompts on that Mac's disk. Their text can be recovered from it"
        )
    if not state["disk_quota"]:
        return f"{name}: {show_size(state['disk_bytes'])} on the disk; without quota or lock, nothing is written"
    return (
        f"{name}: {show_size(state['disk_bytes'])} of {show_size(state['disk_quota'])} on the disk; "
        f"{show_size(state['disk_budget'])} may be written now, {state['disk_waiting']} wait"
    )


@cache.command("clear")
@click.option("--node", help="Only on this node; default: all nodes.")
@click.option(
    "--model", help="Only of this model; default: all models. A model that is gone has its fingerprint as name."
)
@yes_option
@session_options
def clear(session: ApiSession, node: str | None, model: str | None, yes: bool) -> None:
    """Delete cached prompts from memory and from the disk.

    The next requests prefill their whole prompts. Files are deleted even on nodes whose disk cache is off. An absent
    node may have such files and counts as failed; the other nodes still delete their files.
    """
    confirm(f"Delete the cached prompts of {model or 'all models'} on {node or 'all nodes'}?", yes=yes)
    answer = session.request_json("POST", "/api/v1/cache/clear", {"model": model, "node": node}, CLEAR_TIMEOUT_SECONDS)
    session.print_answer(answer, _print_clear)


def _print_clear(answer: Entry) -> None:
    for node in answer["nodes"]:
        click.echo(f"cached prompts of {answer['model'] or 'all models'} deleted on {node['name']}")
