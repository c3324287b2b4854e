"""`cluster logs`, `events`, `top` and `metrics-config`: observation of the pool."""

import codecs
import itertools
import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote, urlsplit

import click

from coordinator.cli.memory_breakdown import format_age, get_guard_state
from coordinator.cli.node_table import format_headroom, format_memory, format_model_count, format_state, render_bar
from coordinator.client.api_client import ApiSession, session_options
from coordinator.client.connection import send_request, split_lines
from coordinator.client.errors import REFUSED, TIMED_OUT, UNREACHABLE, CommandError
from coordinator.client.terminal_text import get_raw_stream, replace_control_characters
from wire.node_state import NodeState

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

EVENTS_TIMEOUT_SECONDS = 60.0
"""Seconds without data after which `events --follow` ends. The coordinator sends a comment after 15 s without events.
"""
TRANSIENT_ERRORS = (UNREACHABLE, TIMED_OUT, REFUSED)
"""Exit codes of errors after which the live view retries."""
BAR_COLUMNS, NARROW_BAR_COLUMNS = 24, 8
"""Characters of a node's bar on a wide screen, and on one of 80 characters."""
WIDE_SCREEN_COLUMNS = 132
"""Minimum screen width, in characters, for all columns of the live view."""


def print_log(session: ApiSession, pieces: Iterable[bytes]) -> None:
    """Print the pieces of a log as they arrive: unchanged with `-o json`, otherwise formatted for people."""
    decoder, rest = codecs.getincrementaldecoder("utf-8")(errors="replace"), ""
    try:
        for piece in pieces:
            text = decoder.decode(piece)
            if session.json:
                click.echo(text, nl=False)
                continue
            *lines, rest = (rest + text).split("\n")
            for line in lines:
                click.echo(format_log_line(line))
    finally:
        if rest:
            click.echo(format_log_line(rest))


def format_log_line(line: str) -> str:
    """Format a log line for people: time, level, event and fields. A line that is not a JSON object is unchanged."""
    try:
        event = json.loads(line)
    except ValueError:
        return line
    return _format_event(cast("dict[str, Any]", event)) if isinstance(event, dict) else line


@click.command()
@click.argument("node", required=False)
@click.option("-f", "--follow", is_flag=True, help="Print new lines as they arrive.")
@click.option(
    "--bytes",
    "size",
    type=click.IntRange(1, 2**30),
    default=65536,
    show_default=True,
    help="Maximum number of bytes from the end of the log.",
)
@session_options
def logs(session: ApiSession, node: str | None, follow: bool, size: int) -> None:
    """Print the newest lines of a NODE's log, fetched over its link; without NODE, of the coordinator's log.

    `-o json` prints the lines as they are in the file. With --follow, new lines are printed until Ctrl-C. The command
    fails when the log can no longer be read, for example because the node is absent.
    """
    query = f"bytes={size}" + ("&follow=true" if follow else "")
    path = f"/api/v1/logs?{query}" if node is None else f"/api/v1/nodes/{quote(node, safe='')}/logs?{query}"
    print_log(session, session.follow(path) if follow else session.stream(path))


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Print new events as they arrive.")
@click.option("--last", type=click.IntRange(0, 500), default=50, show_default=True, help="Number of newest events.")
@session_options
def events(session: ApiSession, follow: bool, last: int) -> None:
    """Print the newest events of the pool: nodes, conditions, joins. With -o json, one event per line.

    With --follow, new events are printed until Ctrl-C. The command fails when the coordinator ends the stream.
    """
    path = f"/api/v1/events?last={last}" + ("&follow=true" if follow else "")
    for event in _iterate_events(session.follow(path, EVENTS_TIMEOUT_SECONDS) if follow else session.stream(path)):
        click.echo(json.dumps(event) if session.json else _format_event(event))


def _iterate_events(pieces: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in split_lines(pieces):
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def _format_event(event: dict[str, Any]) -> str:
    """Render an event for a person, without control characters."""
    known = ("timestamp", "level", "logger", "event")
    when, level, _, message = (str(event.get(name, "")) for name in known)
    rest = "  ".join(f"{name}={value}" for name, value in event.items() if name not in known)
    return replace_control_characters(
        f"{_format_local_time(when)}  {level:<8} {message}  {rest}".replace("\n", " ").rstrip()
    )


def _format_local_time(when: str) -> str:
    """Return a time stamp in local time, to the second. Of an invalid one, return the first 19 characters."""
    try:
        return datetime.fromisoformat(when).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return when[:19].replace("T", " ")


# -- live view --------------------------------------------------------------------------------------


@click.command()
@click.option("--once", is_flag=True, help="Print the view once and exit.")
@click.option(
    "--every", type=click.FloatRange(0.2, 60), default=1.0, show_default=True, help="Seconds between updates."
)
@session_options
def top(session: ApiSession, once: bool, every: float) -> None:
    """Show the pool live: a memory bar for each node, requests, and conditions.

    While the coordinator cannot be reached, for example during a restart, the error is shown above the latest state.

    With --once, with `-o json`, or without a terminal, the state is printed once.
    """
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    if session.json:
        click.echo(
            json.dumps(
                {**session.request_json("GET", "/api/v1/status"), **session.request_json("GET", "/api/v1/nodes")}
            )
        )
        return
    if once or not sys.stdout.isatty():
        console.print(_render_pool(session, console.width))
        return
    from rich.live import Live

    console = Console(highlight=False, file=get_raw_stream(sys.stdout))
    pause, view = threading.Event(), LiveView(session)
    with Live(view.render(console.width), console=console, screen=True, auto_refresh=False) as live:
        while True:
            pause.wait(every)
            live.update(view.render(console.width), refresh=True)


class LiveView:
    """State of the pool as shown on a screen, even while the coordinator restarts or cannot be reached."""

    def __init__(self, session: ApiSession) -> None:
        self._session = session
        self._latest: Group | None = None
        self._received = 0.0

    def render(self, screen_columns: int) -> "Group":
        """Render the current state of the pool for a screen of `screen_columns` characters.

        If a request fails, render its error above the latest state. Raise `CommandError` if the first request fails, or
        for a permanent error, such as a refused key.
        """
        from rich.console import Group
        from rich.text import Text

        try:
            self._latest = _render_pool(self._session, screen_columns)
        except CommandError as error:
            if self._latest is None or error.exit_code not in TRANSIENT_ERRORS:
                raise
            age = format_age(time.monotonic() - self._received)
            head = Text(f"{error.message}\nTrying again. The state below is {age} old.", "bold red")
            return Group(head, self._latest)
        self._received = time.monotonic()
        return self._latest


def _render_pool(session: ApiSession, width: int) -> "Group":
    from rich.console import Group
    from rich.text import Text

    status, nodes = session.request_json("GET", "/api/v1/status"), session.request_json("GET", "/api/v1/nodes")["nodes"]
    states = ", ".join(f"{count} {state}" for state, count in status["nodes"].items() if count) or "no nodes"
    head = Text(
        f"{replace_control_characters(status['cluster']['name'])}  up {format_age(status['uptime_seconds'])}  "
        f"{states}  "
        f"{status['in_flight']} in flight  {status['queued']} queued"
    )
    parts: list[RenderableType] = [head, Text()]
    parts += [
        Text(
            replace_control_characters(f"{condition['name']}: {condition['summary']}"),
            "bold red" if condition["severity"] == "critical" else "yellow",
        )
        for condition in status["conditions"]
    ]
    return Group(*parts, render_node_table(nodes, width), Text("█ current  ▒ reserved  ░ margin  · free", "dim"))


def render_node_table(nodes: list[dict[str, Any]], screen_columns: int) -> "RenderableType":
    """Render nodes (objects of `/api/v1/nodes`) as a table for a screen of `screen_columns` characters.

    Below `WIDE_SCREEN_COLUMNS`, the last four columns are omitted.
    """
    from rich.table import Table
    from rich.text import Text

    wide = screen_columns >= WIDE_SCREEN_COLUMNS
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("NODE", "STATE", "MEMORY", "USED", "HEADROOM", "RUN", "QUEUE"):
        grid.add_column(
            column,
            no_wrap=column != "NODE",
            overflow="fold",
            justify="right" if column in ("HEADROOM", "RUN", "QUEUE") else "left",
        )
    for column in ("GATE", "IN FLIGHT", "MODELS", "LAST REPORT") if wide else ():
        grid.add_column(column, no_wrap=True)
    letters = max(NARROW_BAR_COLUMNS, min(BAR_COLUMNS, screen_columns - 80 + NARROW_BAR_COLUMNS))
    for node in nodes:
        cells = [
            node["name"],
            format_state(node),
            render_bar(node, letters),
            format_memory(node),
            format_headroom(node),
            str(node["running"]),
            str(node["waiting"]),
        ]
        if wide:
            cells += [
                get_guard_state(node),
                str(node["in_flight"]),
                format_model_count(node),
                format_age(node["heard_seconds"]),
            ]
        lost = node["state"] in (NodeState.LOST, NodeState.SUSPECT)
        grid.add_row(*(Text(replace_control_characters(cell), "red" if lost else "") for cell in cells))  # never markup
    return grid


# -- Prometheus -------------------------------------------------------------------------------------


@click.command("metrics-config")
@click.option(
    "--folder", type=click.Path(path_type=Path, file_okay=False), help="Target folder; default STATE/prometheus."
)
@click.option(
    "--host", help="Name or address at which Prometheus reaches the coordinator; default: that of the endpoint."
)
@click.option("--renew", is_flag=True, help="Create a new token and revoke the existing one.")
@session_options
def metrics_config(session: ApiSession, folder: Path | None, host: str | None, renew: bool) -> None:
    """Write the files with which Prometheus scrapes this pool, and print the configuration.

    The folder gets prometheus.yml, rules.yml and the scrape token (a key of the scope `metrics`, mode 0600). If the
    endpoint has its own authority, the folder also gets its certificate. A token that the coordinator no longer accepts
    is replaced. The files refer to each other without a path: the folder can be moved, or mounted into a container. A
    new folder has mode 0700; the mode of an existing one does not change.
    """
    from coordinator.alerts.rules import render_rules_file
    from coordinator.metrics.scrape_config import render_configuration
    from host.private_files import create_private_folder, write_private

    try:
        place = (folder or session.state / "prometheus").absolute()
        if not place.is_dir():
            create_private_folder(place)
        token, authority = place / "macpool.token", place / "macpool-ca.pem"
        ca = session.get_authority()
        if ca:
            authority.write_text(ca)
        keys = session.request_json("GET", "/api/v1/keys")["keys"]
        stored = _find_scrape_key(keys, token)
        if renew or stored is None or not _is_accepted(session, token):
            write_private(token, _create_scrape_token(session, keys, stored).encode())
        page = session.request_json("GET", "/api/v1/status")["base_url"].removesuffix("/v1")
        text = render_configuration(_replace_host(page, host), token.name, authority.name if ca else "")
        (place / "prometheus.yml").write_text(text)
        (place / "rules.yml").write_text(render_rules_file(page))
    except OSError as error:
        raise CommandError(1, f"{error.filename} cannot be written: {error.strerror}") from None
    answer = {"schema": 1, "folder": str(place), "config": str(place / "prometheus.yml"), "token_file": str(token)}
    session.print_answer(answer, lambda answer: click.echo(f"# {answer['config']}\n{text}", nl=False))


def _replace_host(base: str, host: str | None) -> str:
    """Return a base URL with another host, if one is given."""
    where = urlsplit(base)
    named = f"[{host}]" if host and ":" in host else host
    return base if named is None else f"{where.scheme}://{named}:{where.port}"


def _find_scrape_key(keys: list[dict[str, Any]], token: Path) -> dict[str, Any] | None:
    """Return the row of `keys` for the key in the file `token`; None if there is no file or no such row.

    The key in the file may have been revoked, or may belong to another pool.
    """
    name = token.read_text(errors="replace").partition("_")[2].partition("_")[0] if token.exists() else ""
    return next((key for key in keys if key["id"] == name), None)


def _is_accepted(session: ApiSession, token: Path) -> bool:
    """Return whether the coordinator accepts the key in the file `token`.

    It does not after the key has expired or its secret was replaced.
    """
    key = token.read_text(errors="replace").strip()
    if not key.isascii():
        return False
    with send_request(replace(session.select_coordinator(), key=key), "GET", "/api/v1/status") as response:
        response.read()
        return response.status < 400


def _create_scrape_token(session: ApiSession, keys: list[dict[str, Any]], stored: dict[str, Any] | None) -> str:
    """Create the key with which Prometheus scrapes, and return its text. Revoke the key `stored`, if any."""
    if stored is not None:
        session.request_json("DELETE", f"/api/v1/keys/{quote(stored['id'], safe='')}")
    taken = {key["name"].casefold() for key in keys if key is not stored}
    names = ("prometheus" if number == 1 else f"prometheus-{number}" for number in itertools.count(1))
    name = next(name for name in names if name not in taken)
    return str(session.request_json("POST", "/api/v1/keys", {"name": name, "scopes": ["metrics"]})["key"])
