"""`cluster status`, `nodes`, `node` and `approve`: state of the pool, and administration of nodes."""

import re
from typing import Any
from urllib.parse import quote

import click

from coordinator.cli.commands.pause import describe_sharing
from coordinator.cli.commands.tokens_and_keys import Duration
from coordinator.cli.group import CommandGroup, confirm, yes_option
from coordinator.cli.memory_breakdown import ALARMING, describe_breaker, format_age, get_guard_state, render_breakdown
from coordinator.cli.node_description import MODEL_COLUMNS, build_model_rows, describe_member, describe_work
from coordinator.cli.node_table import NARROW, WIDE, build_narrow_row, build_wide_row
from coordinator.cli.spinner import show_spinner
from coordinator.client.api_client import ApiSession, print_table, session_options, wide_session_options
from coordinator.client.errors import REFUSED, CommandError
from wire.node_state import NodeState
from wire.units import show_count

LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,62}")
"""Pattern of a valid label of a node: 1 to 63 letters, digits or characters of `._=-`, the first a letter or digit."""
MAX_MODELS_SHOWN = 6
"""Maximum names of models that `status` prints."""


@click.command()
@session_options
def status(session: ApiSession) -> None:
    """Print the state of the pool and its conditions in a few lines."""
    session.print_answer(session.request_json("GET", "/api/v1/status"), print_status)


def print_status(answer: dict[str, Any]) -> None:
    """Print a response of `/api/v1/status`: cluster, endpoint, nodes, models, requests, conditions and warnings."""
    states = ", ".join(f"{count} {state}" for state, count in answer["nodes"].items() if count) or "none"
    click.echo(
        f"cluster   {answer['cluster']['name']} ({answer['cluster']['id']}), up {format_age(answer['uptime_seconds'])}"
    )
    click.echo(f"endpoint  {answer['base_url']}")
    click.echo(f"nodes     {states}")
    click.echo(f"models    {_shorten_names(answer['models'])}")
    click.echo(f"requests  {answer['in_flight']} in flight, {answer['queued']} queued")
    for condition in answer.get("conditions", []):
        click.secho(
            f"{condition['severity']:<9} {condition['name']}: {condition['summary']}",
            fg="red",
            bold=condition["severity"] == "critical",
        )
        click.echo(f"          {condition['remedy']}")
    dangers = answer.get("dangers", [])
    for warning in answer["warnings"]:
        click.secho(f"warning   {warning}", fg="red" if warning in dangers else "yellow")


def _shorten_names(names: list[str]) -> str:
    """Return the first `MAX_MODELS_SHOWN` names, and how many more there are; `none` without names."""
    more = f" and {len(names) - MAX_MODELS_SHOWN} more: `cluster models`" if len(names) > MAX_MODELS_SHOWN else ""
    return (", ".join(names[:MAX_MODELS_SHOWN]) or "none") + more


@click.command()
@wide_session_options
def nodes(session: ApiSession) -> None:
    """List the nodes with their state and memory.

    MEMORY is current of ceiling, MODELS is loaded of known. `-o wide` shows every column.
    """
    session.print_answer(
        session.request_json("GET", "/api/v1/nodes"), lambda answer: print_nodes(answer, wide=session.wide)
    )


@click.group(cls=CommandGroup)
def node() -> None:
    """List, show, cordon, drain, label or remove nodes. NODE is a node's name or id."""


node.add_command(nodes, "list")


def print_nodes(answer: dict[str, Any], *, wide: bool = False) -> None:
    """Print the nodes of a response of `/api/v1/nodes` as a table, with notes about faults and pauses below.

    With `wide`, print every column.
    """
    if wide:
        print_table(WIDE, [build_wide_row(member) for member in answer["nodes"]], ALARMING, full_width=True)
    else:
        columns, rows = NARROW, [build_narrow_row(member) for member in answer["nodes"]]
        if all(row[-1] == "-" for row in rows):
            columns, rows = columns[:-1], [row[:-1] for row in rows]
        print_table(columns, rows, numbers=("HEADROOM", "IN FLIGHT"), fold=("NAME", "STATE", "VIDEO"))
    for node in answer["nodes"]:
        if broken := describe_breaker(node):
            click.secho(f"{node['name']}: {broken}", fg="red")
        if get_guard_state(node) in ALARMING:
            click.secho(f"{node['name']}: guard {get_guard_state(node)}: `cluster node show {node['name']}`", fg="red")
        if (
            node["state"] == NodeState.READY
            and node["headroom"] is not None
            and node["headroom"] <= 0
            and node["remedy"]
        ):
            click.echo(f"{node['name']}: no headroom, limited by {node['bound_by']}: {node['remedy']}")
        if node["state"] == NodeState.PAUSED:
            click.echo(f"{node['name']}: {describe_sharing(node['sharing'])}")


@node.command("show")
@click.argument("node")
@session_options
def show_node(session: ApiSession, node: str) -> None:
    """Show one node, with the memory terms of its gate."""
    session.print_answer(
        session.request_json("GET", f"/api/v1/nodes/{quote(node, safe='')}"), lambda answer: print_node(answer["node"])
    )


def print_node(node: dict[str, Any]) -> None:
    """Print a node: its membership, memory and faults, the work of its engine, and its models.

    `node` is the field `node` of a response of `/api/v1/nodes/NODE`.
    """
    for line in (*describe_member(node), "", *render_breakdown(node)):
        click.echo(line)
    if broken := describe_breaker(node):
        click.secho(f"breaker   {broken}", fg="red")
    for danger in node["enforcement"]["warnings"]:
        click.secho(f"warning   {danger}", fg="red")
    for line in describe_work(node["engine"]):
        click.echo(line)
    if node["models"]:
        click.echo()
        print_table(MODEL_COLUMNS, build_model_rows(node), numbers=MODEL_COLUMNS[2:])


@node.command()
@click.argument("node")
@session_options
def cordon(session: ApiSession, node: str) -> None:
    """Send no new requests to a node. Running requests continue there."""
    session.print_answer(
        session.request_json("POST", f"/api/v1/nodes/{quote(node, safe='')}/cordon"),
        lambda _: click.echo(f"{node} cordoned"),
    )


@node.command()
@click.argument("node")
@session_options
def uncordon(session: ApiSession, node: str) -> None:
    """Send requests to a node again."""
    session.print_answer(
        session.request_json("POST", f"/api/v1/nodes/{quote(node, safe='')}/uncordon"),
        lambda _: click.echo(f"{node} uncordoned"),
    )


@node.command("allow-video")
@click.argument("node")
@session_options
def allow_video(session: ApiSession, node: str) -> None:
    """Allow a node to make videos. If the node has a video package, it starts Ray."""
    session.print_answer(
        session.request_json("POST", f"/api/v1/nodes/{quote(node, safe='')}/allow-video"),
        lambda _: click.echo(f"{node} may make videos"),
    )


@node.command("deny-video")
@click.argument("node")
@session_options
def deny_video(session: ApiSession, node: str) -> None:
    """Place no new videos on a node. A running video job continues to its end."""
    session.print_answer(
        session.request_json("POST", f"/api/v1/nodes/{quote(node, safe='')}/deny-video"),
        lambda _: click.echo(f"{node} makes no new videos"),
    )


@node.command()
@click.argument("node")
@click.option("--wait", type=Duration(), help="Maximum wait until the node has no requests (30s, 5m).")
@session_options
def drain(session: ApiSession, node: str, wait: float | None) -> None:
    """Cordon a node and move its running requests to other nodes. Clients notice at most a short pause.

    The node stays cordoned until `cluster node uncordon`. Exit code 6: no other node can continue the remaining
    requests now, and they end where they are. The code is also 6 if the node was uncordoned during the drain.
    """
    seconds = wait or 0.0
    with show_spinner(f"draining {node}"):
        answer = session.request_json(
            "POST", f"/api/v1/nodes/{quote(node, safe='')}/drain", {"wait_seconds": seconds}, timeout=seconds + 30
        )
    session.print_answer(answer, lambda _: None)
    if not answer["cordoned"]:
        raise CommandError(REFUSED, f"{node} was uncordoned during the drain: it keeps its requests and gets new ones")
    if answer["left"]:
        raise CommandError(
            REFUSED,
            f"{node} is cordoned, and still runs {show_count(answer['left'], 'request')}: no other node can "
            "continue them now; use --wait, or let them end",
        )
    if not session.json:
        click.echo(f"{node} is empty and cordoned")


@node.command()
@click.argument("node")
@click.argument("labels", nargs=-1)
@session_options
def label(session: ApiSession, node: str, labels: tuple[str, ...]) -> None:
    """Replace all labels of a node with LABELS. Without LABELS, remove them. API keys can be limited to labels."""
    wrong = next((text for text in labels if not LABEL.fullmatch(text)), None)
    if wrong is not None:
        raise click.UsageError(
            f"{wrong!r} is not a valid label: use 1 to 63 letters, digits, `.`, `-`, `_`, `=`, as in gpu=large"
        )
    answer = session.request_json("PUT", f"/api/v1/nodes/{quote(node, safe='')}/labels", {"labels": list(labels)})
    session.print_answer(answer, lambda answer: click.echo(f"{node}: {', '.join(answer['labels']) or 'no labels'}"))


@node.command()
@click.argument("node")
@yes_option
@session_options
def remove(session: ApiSession, node: str, yes: bool) -> None:
    """Revoke a node's certificate and remove the node.

    Its requests continue on other nodes if possible, or fail. The node can join again with a new token or code.
    """
    path = f"/api/v1/nodes/{quote(node, safe='')}"
    name = session.request_json("GET", path)["node"]["name"]
    confirm(f"Remove {name}? Its requests move or fail, and it needs a new token or code to join again.", yes=yes)
    session.print_answer(
        session.request_json("DELETE", f"/api/v1/nodes/{quote(node, safe='')}"), lambda _: click.echo(f"{node} removed")
    )


@node.command()
@click.argument("node")
@click.option(
    "--bytes",
    "size",
    type=click.IntRange(1, 2**30),
    default=65536,
    show_default=True,
    help="Maximum number of bytes from the end of the log.",
)
@session_options
def logs(session: ApiSession, node: str, size: int) -> None:
    """Print the newest lines of a node's log. The lines are fetched over the node's link."""
    from coordinator.cli.commands.logs_and_top import print_log

    print_log(session, session.stream(f"/api/v1/nodes/{quote(node, safe='')}/logs?bytes={size}"))


@click.command()
@click.argument("code", required=False)
@click.option("--reject", is_flag=True, help="Reject the machine instead.")
@session_options
def approve(session: ApiSession, code: str | None, reject: bool) -> None:
    """Admit a machine that shows this six-digit code. Without CODE, list the waiting machines.

    Three wrong codes in a row block all decisions for 60 s.
    """
    if code is None:
        session.print_answer(session.request_json("GET", "/api/v1/joins"), _print_waiting)
        return
    answer = session.request_json("DELETE" if reject else "POST", f"/api/v1/joins/{quote(code, safe='')}")
    text = "is rejected" if reject else "is approved: `cluster nodes` shows it once it has joined"
    session.print_answer(answer, lambda answer: click.echo(f"{answer['name']} {text}"))


def _print_waiting(answer: dict[str, Any]) -> None:
    rows = [(join["name"], join["address"], join["chip"], join["replaces"]) for join in answer["joins"]]
    if rows:
        print_table(("NAME", "ADDRESS", "CHIP", "REPLACES"), rows)
    else:
        click.echo("no machine waits for approval")
