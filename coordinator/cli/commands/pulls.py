"""`cluster pull` and `cluster pulls`: get models from the hub onto the nodes, and list, follow or cancel pulls."""

import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Protocol
from urllib.parse import quote

import click

from coordinator.cli.commands.tokens_and_keys import format_minute
from coordinator.cli.group import CommandGroup
from coordinator.client.api_client import ApiSession, print_table, session_options
from coordinator.client.errors import REFUSED, CommandError
from coordinator.client.terminal_text import get_raw_stream, replace_control_characters
from wire.units import show_count, show_size

QUERY_TIMEOUT_SECONDS = 90.0
"""Timeout of the request for a plan, in seconds. The coordinator abandons a query of the hub after 75 s."""
POLL_INTERVAL_SECONDS = 0.5
LINE_INTERVAL_SECONDS = 10.0
"""Seconds between two lines about a pulling node, if standard error is not a terminal."""


@click.command()
@click.argument("repo", metavar="REPO")
@click.option("--revision", default="", help="Branch, tag or commit; default: main.")
@click.option("--node", "nodes", multiple=True, help="Node that gets the model; may be repeated.")
@click.option("--all", "everywhere", is_flag=True, help="All nodes with room, including offline nodes.")
@click.option("--auto", is_flag=True, help="All linked nodes with room on the disk and in memory (default).")
@click.option("--dry-run", is_flag=True, help="Print the plan and change nothing.")
@click.option("--detach", is_flag=True, help="Start the pull and do not wait.")
@session_options
def pull(
    session: ApiSession,
    repo: str,
    revision: str,
    nodes: tuple[str, ...],
    everywhere: bool,
    auto: bool,
    dry_run: bool,
    detach: bool,
) -> None:
    """Get a model from the Hugging Face hub onto the nodes, once over the internet.

    One node downloads. The other nodes get the files from that node over the local network, at the same time. After
    repeated faults, a node downloads the files from the hub itself. Every file is verified before the model can be
    used. Ctrl-C ends the wait, not the pull: `cluster pulls` shows it. --node, --all and --auto exclude each other.

    Exit code: 6 if a node did not get the model.
    """
    if sum((bool(nodes), everywhere, auto)) > 1:
        raise click.UsageError("--node, --all and --auto exclude each other")
    body = {"repo": repo, "revision": revision, "nodes": list(nodes), "all": everywhere, "dry_run": dry_run}
    answer = session.request_json("POST", "/api/v1/pulls", body, QUERY_TIMEOUT_SECONDS)
    if not session.json:
        _print_plan(answer)
    if dry_run or detach:
        session.print_answer(answer, _print_detached)
        return
    ended = _wait_for_pull(session, answer["pull"])
    session.print_answer({"schema": 1, "pull": ended}, _print_ended)
    _raise_if_failed(ended)


def _print_plan(answer: dict[str, Any]) -> None:
    model = answer["model"]
    quantization = f", {model['quantization']}" if model["quantization"] else ""
    sizes = f"{show_size(answer['size'])} in {show_count(answer['files'], 'file')}{quantization}"
    click.echo(f"{answer['repo']} at {answer['commit'][:8]}: {sizes}, context {model['context']:,} tokens")
    if answer["skipped"]["files"]:
        click.echo(
            f"not needed: {show_count(answer['skipped']['files'], 'file')}, {show_size(answer['skipped']['size'])}"
        )
    rows = [
        (
            node["name"],
            show_size(node["disk_free"]) if node["disk_free"] else "-",
            f"{node['max_context']:,}" if node["max_context"] else "-",
            ("yes" if node["chosen"] else "no") + (f": {node['reason']}" if node["reason"] else ""),
        )
        for node in answer["nodes"]
    ]
    print_table(("NODE", "DISK FREE", "MAX CONTEXT", "PULL"), rows, numbers=("DISK FREE", "MAX CONTEXT"))


def _print_detached(answer: dict[str, Any]) -> None:
    if "pull" in answer:
        click.echo(f"{answer['pull']['id']} started: `cluster pulls` shows its progress")


def _print_ended(answer: dict[str, Any]) -> None:
    for node in answer["pull"]["nodes"]:
        click.echo(describe_node(node))


def _raise_if_failed(ended: dict[str, Any]) -> None:
    failed = [node["name"] for node in ended["nodes"] if node["state"] != "completed"]
    if failed:
        raise CommandError(REFUSED, f"{ended['repo']} is not on {', '.join(failed)}: see the messages above")


def describe_node(node: dict[str, Any]) -> str:
    """Render a pull's progress on one node as a line of text. `node` is an element of the pull's `nodes` in the API."""
    name, message = node["name"], replace_control_characters(node["message"])
    match node["state"]:
        case "completed":
            source = "already had the files" if not node["fetched"] else f"{show_size(node['fetched'])} received"
            return f"{name}: completed, {source}"
        case "waiting" if not node["linked"]:
            return f"{name}: waits until the node is back" + (f" ({message})" if message else "")
        case "waiting":
            return f"{name}: waiting for a source" + (f" ({message})" if message else "")
        case "pulling" if not node["total"]:
            return f"{name}: starts"
        case "pulling":
            left = "" if node["seconds_left"] is None else f", {format_seconds(node['seconds_left'])} left"
            share = node["done"] / node["total"] if node["total"] else 0.0
            source = "another node" if node["source"] == "mirror" else "the hub"
            sizes = f"{show_size(node['done'])} of {show_size(node['total'])} ({share:.0%})"
            return f"{name}: {sizes} from {source}, {show_size(round(node['speed']))}/s{left}"
        case state:
            return f"{name}: {state}" + (f": {message}" if message else "")


def format_seconds(seconds: float) -> str:
    """Format a duration in seconds as `42 s`, `12 min` or `3.5 h`."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


@click.group(cls=CommandGroup, invoke_without_command=True)
@session_options
def pulls(session: ApiSession) -> None:
    """List, follow or cancel pulls.

    Without a command, list all open and the newest 50 ended pulls.
    """
    if click.get_current_context().invoked_subcommand is None:
        session.print_answer(session.request_json("GET", "/api/v1/pulls"), _print_pulls)


@pulls.command("list")
@session_options
def list_pulls(session: ApiSession) -> None:
    """List all open and the newest 50 ended pulls, newest first."""
    session.print_answer(session.request_json("GET", "/api/v1/pulls"), _print_pulls)


def _print_pulls(answer: dict[str, Any]) -> None:
    rows = [
        (
            pull["id"],
            pull["repo"],
            show_size(pull["size"]),
            pull["state"],
            f"{sum(node['state'] == 'completed' for node in pull['nodes'])}/{len(pull['nodes'])}",
            format_minute(pull["started"]),
        )
        for pull in answer["pulls"]
    ]
    print_table(("ID", "MODEL", "SIZE", "STATE", "NODES", "STARTED"), rows, alarming=("failed",), numbers=("SIZE",))
    for pull in answer["pulls"]:
        if pull["state"] == "pulling":
            for node in pull["nodes"]:
                click.echo(describe_node(node))


@pulls.command("wait")
@click.argument("pull", metavar="PULL")
@session_options
def wait_pull(session: ApiSession, pull: str) -> None:
    """Wait until a pull has ended, and show its progress. Exit code: 6 if a node did not get the model."""
    ended = _wait_for_pull(session, _fetch_pull(session, pull))
    session.print_answer({"schema": 1, "pull": ended}, _print_ended)
    _raise_if_failed(ended)


@pulls.command("cancel")
@click.argument("pull", metavar="PULL")
@session_options
def cancel_pull(session: ApiSession, pull: str) -> None:
    """Cancel a pull. Received parts stay on the disks, and a later pull reuses them."""
    answer = session.request_json("DELETE", _get_path(pull))
    session.print_answer(answer, lambda answer: click.echo(f"{answer['pull']['id']} {answer['pull']['state']}"))


def _fetch_pull(session: ApiSession, pull: str) -> dict[str, Any]:
    return session.request_json("GET", _get_path(pull))["pull"]


def _get_path(pull: str) -> str:
    return f"/api/v1/pulls/{quote(pull, safe='')}"


def _wait_for_pull(session: ApiSession, started: dict[str, Any]) -> dict[str, Any]:
    pull, pause = started, threading.Event()
    with _open_progress(session) as output:
        while pull["state"] == "pulling":
            output.show(pull)
            pause.wait(POLL_INTERVAL_SECONDS)
            pull = session.poll_json(_get_path(pull["id"]))["pull"]
        output.show(pull)
    return pull


class PullProgress(Protocol):
    """Output of the progress of a pull while a command waits for it. A pull is an object of `/api/v1/pulls`."""

    def show(self, pull: dict[str, Any]) -> None:
        """Show the progress of a pull on each of its nodes."""
        ...


class HiddenPullProgress:
    """Progress output for `-o json`, which shows nothing."""

    def show(self, pull: dict[str, Any]) -> None:
        """Do nothing."""


class PullProgressLines:
    """Progress output as lines on standard error: one for each change of a node, and regular ones during a pull."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[tuple[str, str], float]] = {}

    def show(self, pull: dict[str, Any]) -> None:
        """Print a line for each node whose state or message changed.

        A node that is pulling also gets a line every `LINE_INTERVAL_SECONDS`. Nodes that have completed the pull are
        omitted.
        """
        for node in pull["nodes"]:
            state, now = (node["state"], node["message"]), time.monotonic()
            former, at = self._shown.get(node["id"], (("", ""), 0.0))
            is_due = node["state"] == "pulling" and now - at >= LINE_INTERVAL_SECONDS
            if node["state"] != "completed" and (state != former or is_due):
                click.echo(describe_node(node), err=True)
                self._shown[node["id"]] = state, now


class PullProgressBars:
    """Progress output as bars on a terminal, one for each node."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(20),
            DownloadColumn(binary_units=True),
            TextColumn("{task.fields[note]}", markup=False),
        )
        console = Console(file=get_raw_stream(sys.stderr))
        self.progress = Progress(*columns, console=console, transient=True)
        """Display of the bars. The caller opens it as a context."""
        self._tasks: dict[str, Any] = {}

    def show(self, pull: dict[str, Any]) -> None:
        """Update bytes, speed and remaining time in the bar of each node. Add a bar for a new node."""
        for node in pull["nodes"]:
            if node["id"] not in self._tasks:
                self._tasks[node["id"]] = self.progress.add_task(node["name"], total=None, note="")
            note = node["state"]
            if node["state"] == "pulling":
                left = "" if node["seconds_left"] is None else f", {format_seconds(node['seconds_left'])}"
                note = f"{show_size(round(node['speed']))}/s{left}" if node["speed"] else node["phase"]
            self.progress.update(
                self._tasks[node["id"]], completed=node["done"], total=node["total"] or pull["size"], note=note
            )


@contextmanager
def _open_progress(session: ApiSession) -> Generator[PullProgress]:
    if session.json:
        yield HiddenPullProgress()
    elif sys.stderr.isatty():
        bars = PullProgressBars()
        with bars.progress:
            yield bars
    else:
        yield PullProgressLines()
