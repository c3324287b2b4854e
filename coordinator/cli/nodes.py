"""The pool as a person looks at it, and what may be done to one node."""

from typing import Any, cast

import click

from coordinator.cli.access import Duration, moment
from coordinator.cli.arithmetic import ALARMING, ago, arithmetic, breaker_of, guard_of
from coordinator.cli.models import standing, waiting
from coordinator.cli.owner import described
from coordinator.cli.session import REFUSED, Problem, Session, options, table
from wire.units import show_size


@click.command()
@options
def status(session: Session) -> None:
    """Say in a few lines how the pool is, and what needs a person."""
    session.show(session.call("GET", "/api/v1/status"), _print_status)


def _print_status(answer: dict[str, Any]) -> None:
    states = ", ".join(f"{count} {state}" for state, count in answer["nodes"].items() if count) or "none"
    click.echo(f"cluster   {answer['cluster']['name']} ({answer['cluster']['id']}), up {ago(answer['uptime_seconds'])}")
    click.echo(f"endpoint  {answer['base_url']}")
    click.echo(f"nodes     {states}")
    click.echo(f"models    {', '.join(answer['models']) or 'none'}")
    click.echo(f"requests  {answer['in_flight']} in flight, {answer['queued']} queued")
    for one in answer.get("conditions", []):
        click.secho(
            f"{one['severity']:<9} {one['name']}: {one['summary']}", fg="red", bold=one["severity"] == "critical"
        )
        click.echo(f"          {one['remedy']}")
    dangers = answer.get("dangers", [])
    for warning in answer["warnings"]:
        click.secho(f"warning   {warning}", fg="red" if warning in dangers else "yellow")


@click.group(invoke_without_command=True)
@options
def nodes(session: Session) -> None:
    """List the nodes with their memory; inspect, cordon or remove one."""
    if click.get_current_context().invoked_subcommand is None:
        session.show(session.call("GET", "/api/v1/nodes"), _print_nodes)


def _print_nodes(answer: dict[str, Any]) -> None:
    columns = (
        "NAME", "STATE", "CHIP", "CAP", "BOUND BY", "PHYS", "MARGIN", "HEADROOM", "GUARD", "IN FLIGHT", "MODELS",
        "VIDEO", "HEARD", "VERSION",
    )  # fmt: skip
    table(columns, [_row(node) for node in answer["nodes"]], alarming=ALARMING)
    for node in answer["nodes"]:
        if broken := breaker_of(node):
            click.secho(f"{node['name']}: {broken}", fg="red")
        if node["bound_by"] and node.get("remedy"):
            click.echo(f"{node['name']}: {node['bound_by']} decides; {node['remedy']}")
        if node["state"] == "paused":
            click.echo(f"{node['name']}: {described(node['sharing'])}")


def _row(node: dict[str, Any]) -> tuple[str, ...]:
    cap, phys, margin = (show_size(node[name] or None) for name in ("cap", "phys", "margin"))
    state = node["state"] + (" cordoned" if node["cordoned"] else "") + (" failing" if breaker_of(node) else "")
    models = ", ".join(standing(m["name"], m) for m in node["models"]) or "-"
    return (
        node["name"], state, node["chip"], cap, node["bound_by"] or "-", phys, margin, show_size(node["headroom"]),
        guard_of(node), str(node["in_flight"]), models, _video(node.get("video")), ago(node["heard_seconds"]),
        node["version"],
    )  # fmt: skip


def _video(video: dict[str, Any] | None) -> str:
    """Say what a node does for videos: nothing, could, or lends so much."""
    if not video or not video["packages"]:
        return "-"
    lent = [lease for lease in video["leases"] if lease["size"]]
    if lent:
        return ", ".join(f"lends {show_size(one['size'])}, {one['phase']} {one['progress']} %" for one in lent)
    if not video["allowed"]:
        return "not allowed"
    return "ready" if video["ready"] and video["ray"] else "not ready"


@nodes.command()
@click.argument("node")
@options
def inspect(session: Session, node: str) -> None:
    """Show everything that is known of one node, its memory as the sum that its gate makes now."""
    session.show(session.call("GET", f"/api/v1/nodes/{node}"), lambda answer: _print_node(answer["node"]))


def _print_node(node: dict[str, Any]) -> None:
    for line in arithmetic(node):
        click.echo(line)
    if broken := breaker_of(node):
        click.secho(f"breaker   {broken}", fg="red")
    for danger in node["enforcement"]["warnings"]:
        click.secho(f"warning   {danger}", fg="red")
    click.echo()
    _print_tree(node)


def _print_tree(value: dict[str, Any], indent: str = "") -> None:
    for name, found in value.items():
        item: Any = found
        items = cast("list[Any]", item) if isinstance(item, list) else [item]
        trees = [cast("dict[str, Any]", tree) for tree in items if isinstance(tree, dict)]
        if not trees:
            click.echo(f"{indent}{name:<16} {_shown(name, found)}")
        for tree in trees:
            click.echo(f"{indent}{name}")
            _print_tree(tree, indent + "  ")


def _shown(name: str, item: object) -> str:
    sizes = {"cap", "ceiling", "margin", "phys", "active", "recent", "current", "reserved", "headroom", "leases",
             "weights", "total", "memory", "unacknowledged", "base", "cache", "peak", "available", "worker", "highest",
             "interval", "canary"}  # fmt: skip
    if name == "joined" and isinstance(item, float):
        return moment(item)
    if name in sizes and (item is None or isinstance(item, int)):
        return show_size(item)
    return str(item)


@nodes.command()
@click.argument("node")
@options
def cordon(session: Session, node: str) -> None:
    """Send no new requests to a node; running ones end."""
    session.show(session.call("POST", f"/api/v1/nodes/{node}/cordon"), lambda _: click.echo(f"{node} cordoned"))


@nodes.command()
@click.argument("node")
@options
def uncordon(session: Session, node: str) -> None:
    """Send requests to a node again."""
    session.show(session.call("POST", f"/api/v1/nodes/{node}/uncordon"), lambda _: click.echo(f"{node} uncordoned"))


@nodes.command("allow-video")
@click.argument("node")
@options
def allow_video(session: Session, node: str) -> None:
    """Allow a node to make videos; it then starts Ray where it has a video package."""
    session.show(
        session.call("POST", f"/api/v1/nodes/{node}/allow-video"), lambda _: click.echo(f"{node} may make videos")
    )


@nodes.command("deny-video")
@click.argument("node")
@options
def deny_video(session: Session, node: str) -> None:
    """Stop placing videos on a node; one that it makes now is finished."""
    session.show(
        session.call("POST", f"/api/v1/nodes/{node}/deny-video"), lambda _: click.echo(f"{node} makes no new videos")
    )


@nodes.command()
@click.argument("node")
@click.option("--wait", type=Duration(), help="Wait until it has no requests, so long at most (30s, 5m).")
@options
def drain(session: Session, node: str, wait: float | None) -> None:
    """Take a node out of use without anybody noticing: nothing new goes there, what runs goes on elsewhere.

    It stays cordoned; `cluster nodes uncordon` takes it back. Exit code 6 when requests are left: nobody else has room
    for them, and they end there.
    """
    seconds = wait or 0.0
    with waiting(f"draining {node}"):
        answer = session.call("POST", f"/api/v1/nodes/{node}/drain", {"wait_seconds": seconds}, timeout=seconds + 30)
    session.show(answer, lambda _: None)
    if answer["left"]:
        raise Problem(REFUSED, f"{node} is cordoned, {answer['left']} requests are still there: nobody else has room; "
                      "wait with --wait, or let them end")  # fmt: skip
    if not session.json:
        click.echo(f"{node} is empty and cordoned")


@nodes.command()
@click.argument("node")
@click.argument("labels", nargs=-1)
@options
def label(session: Session, node: str, labels: tuple[str, ...]) -> None:
    """Give a node these LABELS in place of all that it had; API keys can be bound to labels."""
    answer = session.call("PUT", f"/api/v1/nodes/{node}/labels", {"labels": list(labels)})
    session.show(answer, lambda made: click.echo(f"{node}: {', '.join(made['labels']) or 'no labels'}"))


@nodes.command()
@click.argument("node")
@options
def remove(session: Session, node: str) -> None:
    """Revoke a node's certificate at once and forget it; it can only come back with a new token."""
    session.show(session.call("DELETE", f"/api/v1/nodes/{node}"), lambda _: click.echo(f"{node} removed"))


@nodes.command()
@click.argument("node")
@click.option("--bytes", "size", type=click.IntRange(1, 2**30), default=65536, show_default=True, help="How much.")
@options
def logs(session: Session, node: str, size: int) -> None:
    """Print the newest part of a node's log, fetched over its link."""
    from coordinator.cli.watch import pour

    pour(session.request("GET", f"/api/v1/nodes/{node}/logs?bytes={size}"))


@click.command()
@click.argument("code", required=False)
@click.option("--reject", is_flag=True, help="Turn the machine away instead.")
@options
def approve(session: Session, code: str | None, reject: bool) -> None:
    """Let a machine in that shows this six-digit code; without a code, list who asks."""
    if code is None:
        session.show(
            session.call("GET", "/api/v1/joins"),
            lambda answer: table(
                ("NAME", "ADDRESS", "CHIP", "REPLACES"),
                [(j["name"], j["address"], j["chip"], j["replaces"]) for j in answer["joins"]],
            ),
        )
        return
    answer = session.call("DELETE" if reject else "POST", f"/api/v1/joins/{code}")
    session.show(answer, lambda made: click.echo(f"{made['name']} {'turned away' if reject else 'joined'}"))
