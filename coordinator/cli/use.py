"""Using the pool: placement, a chat, and the settings of clients."""

import json
import shlex
import shutil
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO
from urllib.parse import quote

import click

from coordinator.cli.session import PROTOCOL, REFUSED, Problem, Session, options, raise_for, table
from wire.units import show_size


@click.command()
@click.argument("model")
@click.option("--prompt-tokens", type=click.IntRange(1), default=1000, show_default=True, help="Length of the prompt.")
@click.option("--max-tokens", type=click.IntRange(1), help="Most tokens of the answer.")
@options
def place(session: Session, model: str, prompt_tokens: int, max_tokens: int | None) -> None:
    """Show where a request would go now: every node's arithmetic, and why not. Nothing is sent or reserved."""
    body = {"model": model, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens}
    answer = session.call("POST", "/api/v1/place", body)
    session.show(answer, _print_placement)
    if answer["node"] is None:
        raise Problem(REFUSED, answer["refused"]["message"])


def _print_placement(answer: dict[str, Any]) -> None:
    sizes = ("need", "headroom", "ceiling", "current", "reserved", "margin")
    table(
        ("NODE", *[size.upper() for size in sizes], "VERDICT"),
        [
            (
                c["name"],
                *[show_size(c.get(size)) for size in sizes],
                c["why_not"] or ("chosen" if c["chosen"] else "fits"),
            )
            for c in answer["candidates"]
        ],
    )
    if answer["node"] is not None:
        click.echo(f"would go to {answer['name']}")


@click.command("open")
@click.option("--print", "only_print", is_flag=True, help="Print the link and start no browser.")
@options
def open_page(session: Session, only_print: bool) -> None:
    """Open the pool's page in a browser, by a link that works once and for two minutes."""
    answer = session.call("POST", "/api/v1/page/links", {})
    session.show(answer, lambda made: click.echo(made["url"]))
    if not only_print and sys.stdout.isatty():
        click.launch(answer["url"])


@click.command()
@click.argument("request_id", metavar="[ID]", required=False)
@click.option("--last", type=click.IntRange(1, 1000), default=20, show_default=True, help="Without an ID: how many.")
@click.option("--export", type=click.File("wb"), help="Write all kept decisions into a file, for `cluster replay`.")
@options
def explain(session: Session, request_id: str | None, last: int, export: BinaryIO | None) -> None:
    """Show what became of a request and why it went where it went; without an ID, list the newest."""
    if export is not None:
        response = session.request("GET", "/api/v1/decisions", timeout=120)
        if response.status >= 400:
            raise_for(response.status, response.read())
        shutil.copyfileobj(response, export)
        return
    if request_id is None:
        session.show(session.call("GET", f"/api/v1/requests?last={last}"), _print_requests)
        return
    session.show(session.call("GET", f"/api/v1/requests/{quote(request_id, safe='')}"), _print_story)


def _print_requests(answer: dict[str, Any]) -> None:
    table(
        ("ID", "MODEL", "KEY", "SECONDS", "OUTCOME", "PROMPT", "CACHED", "ANSWER", "WAY"),
        [
            (
                one["request_id"], one["model"], one["key"], f"{one['seconds']:.2f}", one["outcome"],
                str(one["prompt_tokens"] or "-"), str(one["cached_tokens"]), str(one["completion_tokens"]),
                " ".join(f"{step['what'].partition(':')[0]} {step['node']}".strip() for step in one["steps"]),
            )
            for one in answer["requests"]
        ],
        alarming=(),
    )  # fmt: skip


def _print_story(answer: dict[str, Any]) -> None:
    for one in answer.get("under_way", ()):
        click.echo(f"{one['request_id']}  {one['model']}, key {one['key']}: {one['phase']}, for {one['seconds']:.1f} s")
        _print_steps(one["steps"])
    for one in answer["requests"]:
        took = f"{one['outcome']} after {one['seconds']:.3f} s"
        click.echo(f"{one['request_id']}  {one['model']}, key {one['key']}: {took}")
        if one["message"]:
            click.echo(f"  {one['message']}")
        _print_steps(one["steps"])
        if one["timings"] is not None:
            times = "  ".join(f"{name} {seconds:.3f} s" for name, seconds in one["timings"].items())
            click.echo(f"  on the node: {times}")
        click.echo(f"  tokens: {one['prompt_tokens']} of prompt ({one['cached_tokens']} cached), "
                   f"{one['completion_tokens']} of answer")  # fmt: skip
    for one in answer["decisions"]:
        click.echo(f"\ndecided {one['seconds_ago']:.1f} s ago among {one['nodes']} nodes: {one['refused'] or 'placed'}")
        _print_placement({"candidates": one["candidates"], "node": None})


def _print_steps(steps: list[dict[str, Any]]) -> None:
    for step in steps:
        click.echo(f"  {step['at']:9.3f} s  {step['what']} {step['node']}".rstrip())


@click.command()
@click.argument("file", type=click.File("rb"))
@click.option("--policy", type=click.Choice(["balanced", "most_headroom"]), required=True, help="Who decides again.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Form of the answer.")
def replay(file: BinaryIO, policy: str, output: str) -> None:
    """Take the decisions of a FILE (`cluster explain --export FILE`) again by another policy, and show what differs."""
    from random import Random

    import msgspec

    from router.history import Decision, read_line
    from router.history import replay as again
    from router.placement import POLICIES

    decisions: list[Decision] = []
    for number, line in enumerate(file, 1):
        try:
            decisions.append(read_line(line))
        except ValueError as error:
            raise Problem(2, f"{file.name}, line {number}: {error}") from None
    found = again(decisions, POLICIES[policy], Random(1).random)  # noqa: S311  draws between equals
    if output == "json":
        click.echo(json.dumps({"schema": 1, "policy": policy, **msgspec.to_builtins(found)}))
        return
    click.echo(f"{found.decisions} decisions, {found.refused} of them refusals: {found.same} the same by {policy}, "
               f"{len(found.instead)} not; expected wait {found.waits[0]:.3f} s as decided, {found.waits[1]:.3f} s by "
               f"{policy}")  # fmt: skip
    if found.instead:
        table(("REQUEST", "TAKEN", "INSTEAD"), found.instead[:50])


@click.command()
@click.argument("prompt", nargs=-1)
@click.option("--model", help="Which model; the first one served unless given.")
@click.option("--max-tokens", type=click.IntRange(1), help="Most tokens of the answer.")
@options
def chat(session: Session, prompt: tuple[str, ...], model: str | None, max_tokens: int | None) -> None:
    """Ask a model something; without a PROMPT it is read from standard input."""
    text = " ".join(prompt) or sys.stdin.read()
    if not text.strip():
        raise click.UsageError("nothing to ask: give a PROMPT or pipe one in")
    body: dict[str, Any] = {"model": model or _first_model(session), "messages": [{"role": "user", "content": text}]}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    if session.json:
        click.echo(json.dumps({"schema": 1, **session.call("POST", "/v1/chat/completions", body)}))
        return
    for piece in _stream(session, {**body, "stream": True}):
        click.echo(piece, nl=False)
    click.echo()


def _first_model(session: Session) -> str:
    served = session.call("GET", "/v1/models")["data"]
    if not served:
        raise Problem(REFUSED, "no node serves a model: look at `cluster nodes`")
    return served[0]["id"]


def _stream(session: Session, body: dict[str, Any]) -> Iterator[str]:
    response = session.request("POST", "/v1/chat/completions", body, timeout=600)
    if response.status >= 400:
        raise_for(response.status, response.read())
    for line in response:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise Problem(1, event["error"]["message"])
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""


@click.command()
@click.option("--shell", type=click.Choice(["sh", "fish"]), default="sh", show_default=True, help="Whose syntax.")
@options
def env(session: Session, shell: str) -> None:
    """Print the variables that point OpenAI's and Anthropic's clients at this pool: `eval "$(cluster env)"`.

    The key is the one of --key-file; without it a line says how to make one. Where this machine trusts the pool's own
    authority (`cluster trust-ca`), Python and Node are told of it, too.
    """
    from coordinator.cli.trust import bundle_of

    base, authority = session.target()[0], session.authority()
    key = session.key_file.read_text().strip() if session.key_file else None
    bundle = bundle_of(session.state, authority) if authority else None
    found = {"OPENAI_BASE_URL": base + "/v1", "ANTHROPIC_BASE_URL": base, "OPENAI_API_KEY": key,
             "ANTHROPIC_API_KEY": key, "SSL_CERT_FILE": bundle, "NODE_EXTRA_CA_CERTS": bundle}  # fmt: skip
    if session.json:
        click.echo(json.dumps({"schema": 1, **found}))
        return
    assign = "set -gx {} {}" if shell == "fish" else "export {}={}"
    for name, value in found.items():
        if value is not None:
            click.echo(assign.format(name, shlex.quote(value)))
    if key is None:
        click.echo("# OPENAI_API_KEY, ANTHROPIC_API_KEY: the key that `cluster up` printed first, or a new one from "
                   "`cluster key create NAME`")  # fmt: skip
    if authority and bundle is None:
        click.echo("# the certificate: `cluster trust-ca` once on each machine; then this names its file, too")


@click.command()
@click.option("--cluster", "whole", is_flag=True, help="Ask the coordinator and its nodes too.")
@options
def version(session: Session, whole: bool) -> None:
    """Print versions; with --cluster what every member runs, its protocol, and what to do.

    Exit code 8 where a member cannot take part because of its protocol."""
    from importlib.metadata import version as installed

    from wire import identity

    answer: dict[str, Any] = {
        "schema": 1,
        "version": installed("macpool"),
        "protocol": identity.PROTOCOL,
        "oldest": identity.OLDEST_PROTOCOL,
    }
    if whole:
        asked, nodes = session.call("GET", "/api/v1/version"), session.call("GET", "/api/v1/nodes")["nodes"]
        answer["coordinator"] = asked["version"]
        answer["coordinator_protocol"] = asked["protocol"]
        answer["nodes"] = {node["name"]: node["version"] for node in nodes}
        answer["members"] = _members(asked["version"], nodes)
    session.show(answer, _print_version)
    if any("cannot take part" in one["advice"] for one in answer.get("members", [])):
        click.get_current_context().exit(PROTOCOL)


def _members(coordinator: str, nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from coordinator.versions import Running, compare

    lines = compare(coordinator, [Running(n["name"], n["version"], n["protocol"], n["state"]) for n in nodes])
    return [
        {"name": one.running.name, "state": one.running.state, "version": one.running.version,
         "protocol": one.running.protocol, "ok": one.ok, "advice": one.advice}
        for one in lines
    ]  # fmt: skip


def _print_version(answer: dict[str, Any]) -> None:
    click.echo(f"macpool {answer['version']}, protocol {answer['protocol']} (speaks from {answer['oldest']})")
    if "coordinator" in answer:
        rows = [("coordinator", "", answer["coordinator"], str(answer["coordinator_protocol"]), "")]
        rows += [
            (one["name"], one["state"], one["version"] or "-", str(one["protocol"] or "-"), one["advice"] or "ok")
            for one in answer["members"]
        ]
        table(("MEMBER", "STATE", "VERSION", "PROTOCOL", "WHAT TO DO"), rows)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a shell: `eval "$(cluster completion zsh)"`."""
    from click.shell_completion import get_completion_class

    from coordinator.cli import cluster

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(kind(cluster, {}, "cluster", "_CLUSTER_COMPLETE").source())
