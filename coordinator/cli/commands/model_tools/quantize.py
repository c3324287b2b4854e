"""`cluster model quantize` and `quantizations`, added to the group of `coordinator.cli.commands.models`."""

import sys
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from urllib.parse import quote

import click

from coordinator.cli.commands.model_files import model
from coordinator.cli.commands.pulls import format_seconds
from coordinator.cli.group import CommandGroup
from coordinator.client.api_client import ApiSession, print_table, session_options
from coordinator.client.errors import REFUSED, CommandError
from coordinator.client.terminal_text import get_raw_stream, replace_control_characters
from wire.units import show_size

POLL_INTERVAL_SECONDS = 0.5
BITS = ("2", "3", "4", "5", "6", "8")
_PATH = "/api/v1/quantizations"


@model.command("quantize")
@click.argument("name", metavar="MODEL")
@click.option("--bits", type=click.Choice(BITS), default="4", show_default=True, help="Bits per weight.")
@click.option("--node", help="On this node; default: the one that has the model and the most free memory.")
@click.option(
    "--name", "result", metavar="NEW", help="Name of the result; default: MODEL with the bits, such as MODEL-4bit."
)
@click.option("--detach", is_flag=True, help="Do not wait for the end.")
@session_options
def quantize(session: ApiSession, name: str, bits: str, node: str | None, result: str | None, detach: bool) -> None:
    """Quantize a model on a node.

    The result is another model on the disk of the same node. The quantization leases memory: requests on the node have
    less memory meanwhile. Ctrl-C ends the wait, not the quantization.

    Exit code: 6 if the quantization failed or was cancelled.
    """
    body = {"model": name, "bits": int(bits), "node": node, "name": result}
    started = session.request_json("POST", _PATH, body)["quantization"]
    if detach:
        session.print_answer(
            {"schema": 1, "quantization": started},
            lambda answer: click.echo(
                f"{answer['quantization']['id']} started: `cluster model quantizations` shows its progress"
            ),
        )
        return
    ended = _wait_for_end(session, started)
    if ended["state"] != "completed":
        where = ended["node"]["name"]
        raise CommandError(REFUSED, f"{where}: {ended['message'] or 'the quantization was cancelled'}")
    session.print_answer(
        {"schema": 1, "quantization": ended}, lambda answer: click.echo(describe(answer["quantization"]))
    )


def _wait_for_end(session: ApiSession, started: dict[str, Any]) -> dict[str, Any]:
    row, pause = started, threading.Event()
    with _show_progress(session) as show:
        while row["state"] == "running":
            show(row)
            pause.wait(POLL_INTERVAL_SECONDS)
            row = session.poll_json(f"{_PATH}/{quote(row['id'], safe='')}")["quantization"]
    return row


@contextmanager
def _show_progress(session: ApiSession) -> Generator[Callable[[dict[str, Any]], None]]:
    """Show a bar while the context is open. Do nothing if standard error is not a terminal, or with `-o json`."""
    if session.json or not sys.stderr.isatty():
        yield lambda row: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    console = Console(file=get_raw_stream(sys.stderr))
    with Progress(text, BarColumn(20), TimeElapsedColumn(), console=console, transient=True) as progress:
        task = progress.add_task("starts", total=None)
        yield lambda row: progress.update(
            task, description=describe(row), completed=row["done"], total=row["total"] or None
        )


def describe(row: dict[str, Any]) -> str:
    """Render the state of a quantization (object of `/api/v1/quantizations`) as a line of text."""
    node = row["node"]["name"]
    match row["state"]:
        case "completed":
            sizes = f"{show_size(row['stored'])} of weights, {show_size(row['peak'])} of memory at most"
            return f"{row['name']} on {node}: {row['bits']} bits, {sizes}"
        case "running" if not row["node"]["linked"]:
            return f"{node}: the link is lost, the quantization continues there"
        case "running" if row["phase"] == "quantizing":
            left = "" if row["seconds_left"] is None else f", {format_seconds(row['seconds_left'])} left"
            return f"{node}: {show_size(row['done'])} of {show_size(row['total'])}{left}"
        case "running":
            return f"{node}: makes room" if row["phase"] else f"{node}: starts"
        case state:
            return f"{node}: {state}" + (f": {replace_control_characters(row['message'])}" if row["message"] else "")


@model.group("quantizations", cls=CommandGroup, invoke_without_command=True)
@session_options
def quantizations(session: ApiSession) -> None:
    """List or cancel quantizations.

    Without a command, list all open and the newest 50 ended quantizations.
    """
    if click.get_current_context().invoked_subcommand is None:
        session.print_answer(session.request_json("GET", _PATH), _print_quantizations)


def _print_quantizations(answer: dict[str, Any]) -> None:
    rows = [
        (quantization["id"], quantization["name"], quantization["node"]["name"], quantization["state"])
        for quantization in answer["quantizations"]
    ]
    print_table(("ID", "RESULT", "NODE", "STATE"), rows, alarming=("failed",), fold=("RESULT",))
    for quantization in answer["quantizations"]:
        if quantization["state"] in ("running", "failed"):
            click.echo(describe(quantization))


@quantizations.command("cancel")
@click.argument("quantization", metavar="ID")
@session_options
def cancel_quantization(session: ApiSession, quantization: str) -> None:
    """Order the node to cancel a quantization. The node deletes the incomplete result.

    The command does not wait for the end. It fails if the quantization has ended or its node is not linked.
    """
    answer = session.request_json("DELETE", f"{_PATH}/{quote(quantization, safe='')}")
    session.print_answer(answer, lambda answer: click.echo(f"{answer['quantization']['id']} is being cancelled"))
