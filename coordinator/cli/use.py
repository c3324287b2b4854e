"""Using the pool: placement, a chat, and the settings of clients."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import click

from coordinator.cli.session import REFUSED, Problem, Session, options, raise_for, table
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
    """Print the variables that point OpenAI clients at this pool: `eval "$(cluster env)"`.

    The key is the one of --key-file; without it a line says how to make one.
    """
    base = session.target()[0] + "/v1"
    key = session.key_file.read_text().strip() if session.key_file else None
    if session.json:
        click.echo(json.dumps({"schema": 1, "OPENAI_BASE_URL": base, "OPENAI_API_KEY": key}))
        return
    assign = "set -gx {} {}" if shell == "fish" else "export {}={}"
    click.echo(assign.format("OPENAI_BASE_URL", base))
    if key:
        click.echo(assign.format("OPENAI_API_KEY", key))
    else:
        click.echo(
            "# OPENAI_API_KEY: the key that `cluster up` printed first, or a new one from `cluster key create NAME`"
        )


@click.command()
@click.option("--cluster", "whole", is_flag=True, help="Ask the coordinator and its nodes too.")
@options
def version(session: Session, whole: bool) -> None:
    """Print versions."""
    from importlib.metadata import version as installed

    from wire.identity import OLDEST_PROTOCOL, PROTOCOL

    answer: dict[str, Any] = {
        "schema": 1,
        "version": installed("macpool"),
        "protocol": PROTOCOL,
        "oldest": OLDEST_PROTOCOL,
    }
    if whole:
        answer["coordinator"] = session.call("GET", "/api/v1/version")["version"]
        answer["nodes"] = {n["name"]: n["version"] for n in session.call("GET", "/api/v1/nodes")["nodes"]}
    session.show(answer, _print_version)


def _print_version(answer: dict[str, Any]) -> None:
    click.echo(f"macpool {answer['version']}, protocol {answer['protocol']} (speaks from {answer['oldest']})")
    if "coordinator" in answer:
        click.echo(f"coordinator {answer['coordinator']}")
        for name, running in answer["nodes"].items():
            click.echo(f"{name} {running or '-'}")


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
