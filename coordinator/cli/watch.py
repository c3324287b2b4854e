"""Looking on: logs, events, the pool as it is now, and what Prometheus needs to look on by itself."""

import codecs
import json
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPResponse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coordinator.cli.arithmetic import ago, breaker_of, guard_of
from coordinator.cli.harmless import harmless, raw_output
from coordinator.cli.models import standing
from coordinator.cli.session import Problem, Session, options, raise_for
from wire.units import show_size

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

FOR_EVER = 86400.0
"""Seconds without a word after which a follower gives up."""
BAR = 24
"""Letters of a node's bar."""


def pour(response: HTTPResponse) -> None:
    """Print an answer's text as it comes."""
    if response.status >= 400:
        raise_for(response.status, response.read())
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    while piece := response.read1(65536):
        click.echo(decoder.decode(piece), nl=False)


@click.command()
@click.argument("node", required=False)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is added.")
@click.option("--bytes", "size", type=click.IntRange(1, 2**30), default=65536, show_default=True, help="How much.")
@options
def logs(session: Session, node: str | None, follow: bool, size: int) -> None:
    """Print the newest part of a NODE's log, fetched over its link; without NODE, of the coordinator's own."""
    query = f"bytes={size}" + ("&follow=true" if follow else "")
    path = f"/api/v1/logs?{query}" if node is None else f"/api/v1/nodes/{node}/logs?{query}"
    pour(session.request("GET", path, timeout=FOR_EVER if follow else 30.0))


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on with what happens.")
@click.option("--last", type=click.IntRange(0, 500), default=50, show_default=True, help="How many of the newest.")
@options
def events(session: Session, follow: bool, last: int) -> None:
    """Tell what happens in the pool: nodes that come and go, conditions, joins. With -o json one event a line."""
    path = f"/api/v1/events?last={last}" + ("&follow=true" if follow else "")
    response = session.request("GET", path, timeout=FOR_EVER if follow else 30.0)
    if response.status >= 400:
        raise_for(response.status, response.read())
    for event in _events(response):
        click.echo(json.dumps(event) if session.json else _line(event))


def _events(response: HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data: "):
            yield json.loads(line[6:])


def _line(event: dict[str, Any]) -> str:
    """Write an event for a person, safe to print."""
    known = ("timestamp", "level", "logger", "event")
    when, level, _, what = (str(event.get(name, "")) for name in known)
    rest = "  ".join(f"{name}={value}" for name, value in event.items() if name not in known)
    return harmless(f"{when[:19].replace('T', ' ')}  {level:<8} {what}  {rest}".replace("\n", " ").rstrip())


# -- the pool as it is now ------------------------------------------------------------------------


@click.command()
@click.option("--once", is_flag=True, help="Print it once.")
@click.option("--every", type=click.FloatRange(0.2, 60), default=1.0, show_default=True, help="Seconds between looks.")
@options
def top(session: Session, once: bool, every: float) -> None:
    """Show the pool as it is, again and again: a bar for each node, its gate, its requests, and what needs a person."""
    from rich.console import Console

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    if session.json:
        click.echo(json.dumps({**session.call("GET", "/api/v1/status"), **session.call("GET", "/api/v1/nodes")}))
        return
    if once or not sys.stdout.isatty():
        console.print(_picture(session))
        return
    from rich.live import Live

    console.file = raw_output(sys.stdout)
    pause = threading.Event()
    with Live(_picture(session), console=console, screen=True, auto_refresh=False) as live:
        while True:
            pause.wait(every)
            live.update(_picture(session), refresh=True)


def _picture(session: Session) -> "Group":
    from rich.console import Group
    from rich.text import Text

    status, nodes = session.call("GET", "/api/v1/status"), session.call("GET", "/api/v1/nodes")["nodes"]
    states = ", ".join(f"{count} {state}" for state, count in status["nodes"].items() if count) or "no nodes"
    head = Text(
        f"{harmless(status['cluster']['name'])}  up {ago(status['uptime_seconds'])}  {states}  "
        f"{status['in_flight']} in flight  {status['queued']} in line"
    )
    found: list[RenderableType] = [head, Text()]
    found += [Text(harmless(f"{one['name']}: {one['summary']}"), "bold red" if one["severity"] == "critical" else
                   "yellow") for one in status["conditions"]]  # fmt: skip
    return Group(*found, _table(nodes), Text("█ current  ▒ reserved  ░ margin  · free", "dim"))


def _table(nodes: list[dict[str, Any]]) -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("NODE", "STATE", "MEMORY", "CURRENT", "CEILING", "HEADROOM", "GATE", "RUN", "WAIT", "IN FLIGHT",
                   "MODELS", "HEARD"):  # fmt: skip
        grid.add_column(column, no_wrap=True)
    for node in nodes:
        state = node["state"] + (" cordoned" if node["cordoned"] else "") + (" failing" if breaker_of(node) else "")
        loaded = [standing(model["name"], model) for model in node["models"] if model["model"] != "known"]
        cells = (
            node["name"], state, bar(node), show_size(node["current"]), show_size(node["ceiling"] or None),
            show_size(node["headroom"]), guard_of(node), str(node["running"]), str(node["waiting"]),
            str(node["in_flight"]), ", ".join(loaded) or "-", ago(node["heard_seconds"]),
        )  # fmt: skip
        lost = node["state"] in ("lost", "suspect")
        grid.add_row(*(Text(harmless(cell), "red" if lost else "") for cell in cells))  # never markup
    return grid


def bar(node: dict[str, Any]) -> str:
    """Draw a node's ceiling as a bar: what is used, promised, kept back, and free."""
    ceiling = node["ceiling"] or 0
    if not ceiling or node["current"] is None:
        return "?" * BAR
    drawn = ""
    for letter, size in (("█", node["current"]), ("▒", node["reserved"]), ("░", node["margin"])):
        drawn += letter * round(max(0, size) / ceiling * BAR)
    return drawn[:BAR].ljust(BAR, "·")


# -- Prometheus -------------------------------------------------------------------------------------


@click.command("metrics-config")
@click.option(
    "--folder", type=click.Path(path_type=Path, file_okay=False), help="Where; STATE/prometheus unless given."
)
@click.option("--renew", is_flag=True, help="Make a new token, though there is one.")
@options
def metrics_config(session: Session, folder: Path | None, renew: bool) -> None:
    """Write what Prometheus needs to scrape this pool, and print its configuration.

    A folder with prometheus.yml, rules.yml, the scrape token (a key of the scope `metrics`, mode 0600), and the
    authority of the endpoint where that is our own.
    """
    from coordinator.conditions.rules import rules_file
    from coordinator.metrics.prometheus import configuration
    from machine.private import private_folder, write_private

    try:
        place = private_folder((folder or session.state / "prometheus").absolute())
        token, authority = place / "macpool.token", place / "macpool-ca.pem"
        ca = session.authority()
        if ca:
            authority.write_text(ca)
        if renew or not token.exists():
            body = {"name": "prometheus", "scopes": ["metrics"]}
            write_private(token, session.call("POST", "/api/v1/keys", body)["key"].encode())
        text = configuration(session.target()[0], str(token), str(authority) if ca else "")
        (place / "prometheus.yml").write_text(text)
        (place / "rules.yml").write_text(rules_file())
    except OSError as error:
        raise Problem(1, f"{error.filename} cannot be written: {error.strerror}") from None
    answer = {"schema": 1, "folder": str(place), "config": str(place / "prometheus.yml"), "token_file": str(token)}
    session.show(answer, lambda made: click.echo(f"# {made['config']}\n{text}", nl=False))
