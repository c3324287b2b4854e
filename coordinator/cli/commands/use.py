"""Commands of users: place, open, explain, replay, chat, env, version, completion and help."""

import http.client
import json
import shlex
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO
from urllib.parse import quote

import click

from coordinator.cli.request_table import print_placement, print_request, print_requests
from coordinator.cli.spinner import show_spinner
from coordinator.client.api_client import (
    ApiSession,
    print_table,
    raise_for_status,
    session_options,
    wide_session_options,
)
from coordinator.client.connection import parse_base_url, split_lines
from coordinator.client.errors import PROTOCOL, REFUSED, CommandError

CHAT_TIMEOUT_SECONDS = 600.0
"""Seconds without data after which `cluster chat` fails."""
RETRY_INTERVAL_SECONDS = 1.0
"""Seconds between two checks whether a node is ready."""
EMBEDDED_MODEL = "macpool-tiny"
"""Name of the demo model that is part of the package."""
TOY_NOTE = (
    f"({EMBEDDED_MODEL} is a demo with a few fixed answers. For a real model: `cluster up --models FOLDER`, or "
    "download one into the Hugging Face cache)"
)
"""Text that `cluster chat` prints after an answer of the demo model."""


@click.command()
@click.argument("model")
@click.option(
    "--prompt-tokens", type=click.IntRange(1), default=1000, show_default=True, help="Length of the prompt in tokens."
)
@click.option("--max-tokens", type=click.IntRange(1), help="Maximum tokens of the answer.")
@session_options
def place(session: ApiSession, model: str, prompt_tokens: int, max_tokens: int | None) -> None:
    """Show the node to which a request would be sent now, with the numbers or the refusal of each node.

    The request is not sent, and no memory is reserved. Exit code 6 if the request would be refused.
    """
    body = {"model": model, "prompt_tokens": prompt_tokens, "max_tokens": max_tokens}
    answer = session.request_json("POST", "/api/v1/place", body)
    session.print_answer(answer, print_placement)
    if answer["node"] is None:
        raise CommandError(REFUSED, answer["refused"]["message"])


@click.command("open")
@click.option("--print", "only_print", is_flag=True, help="Print the link without opening a browser.")
@session_options
def open_page(session: ApiSession, only_print: bool) -> None:
    """Print a link to the pool's page, and open the link in a browser. The link works once, for 2 minutes.

    The browser is opened only if standard output is a terminal.
    """
    answer = session.request_json("POST", "/api/v1/page/links", {})
    session.print_answer(answer, lambda answer: click.echo(answer["url"]))
    if not only_print and sys.stdout.isatty():
        click.launch(answer["url"])


@click.command()
@click.argument("request_id", metavar="[ID]", required=False)
@click.option(
    "--last", type=click.IntRange(1, 1000), default=20, show_default=True, help="Number of requests, without an ID."
)
@click.option("--export", type=click.File("wb"), help="Write all recorded decisions into a file, for `cluster replay`.")
@wide_session_options
def explain(session: ApiSession, request_id: str | None, last: int, export: BinaryIO | None) -> None:
    """Show placement, steps and end of a request. Without ID, list the newest requests.

    `-o wide` adds keys and steps to the list. The newest 1000 requests and decisions are stored until the coordinator
    stops. ID and --export exclude each other.
    """
    if export is not None and request_id is not None:
        raise click.UsageError("--export writes the decisions of all requests: leave out either ID or --export")
    if export is not None:
        for piece in session.stream("/api/v1/decisions", timeout=120):
            export.write(piece)
        return
    if request_id is None:
        newest = session.request_json("GET", f"/api/v1/requests?last={last}")
        session.print_answer(newest, lambda answer: print_requests(answer, wide=session.wide))
        return
    session.print_answer(session.request_json("GET", f"/api/v1/requests/{quote(request_id, safe='')}"), print_request)


@click.command()
@click.argument("file", type=click.File("rb"))
@click.option("--policy", type=click.Choice(["balanced", "most_headroom"]), required=True, help="Placement policy.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Output format.")
def replay(file: BinaryIO, policy: str, output: str) -> None:
    """Repeat the recorded decisions in FILE (`cluster explain --export FILE`) with another policy, and compare.

    The text shows at most 50 differences, `-o json` all of them.
    """
    from random import Random

    import msgspec

    from router.dispatch.decision_log import PlacementDecision, parse_line
    from router.dispatch.decision_log import replay as again
    from router.placement.policies import POLICIES

    decisions: list[PlacementDecision] = []
    for number, line in enumerate(file, 1):
        try:
            decisions.append(parse_line(line))
        except ValueError as error:
            raise CommandError(2, f"{file.name}, line {number}: {error}") from None
    comparison = again(decisions, POLICIES[policy], Random(1).random)  # noqa: S311  draws between equals
    if output == "json":
        click.echo(json.dumps({"schema": 1, "policy": policy, **msgspec.to_builtins(comparison)}))
        return
    click.echo(
        f"{comparison.decisions} decisions, {comparison.refused} of them refusals: {comparison.same} the same "
        f"with {policy}, {len(comparison.instead)} different; expected wait {comparison.waits[0]:.3f} s as decided, "
        f"{comparison.waits[1]:.3f} s with {policy}"
    )
    if comparison.instead:
        print_table(("REQUEST", "RECORDED", "REPLAYED"), comparison.instead[:50])


@click.command()
@click.argument("prompt", nargs=-1)
@click.option("--model", help="Model; default: the first one for chats.")
@click.option("--max-tokens", type=click.IntRange(1), help="Maximum tokens of the answer.")
@click.option(
    "--wait",
    type=click.FloatRange(0, 3600),
    default=60.0,
    show_default=True,
    help="Maximum wait for a starting node, in seconds.",
)
@session_options
def chat(session: ApiSession, prompt: tuple[str, ...], model: str | None, max_tokens: int | None, wait: float) -> None:
    """Send a prompt to a model and print the answer. Without PROMPT, read the prompt from standard input.

    If no node serves a model, the command waits for one, for at most --wait.
    """
    if not prompt and sys.stdin.isatty():
        raise click.UsageError("write a PROMPT, or pipe one in")
    text = " ".join(prompt) or sys.stdin.read()
    if not text.strip():
        raise click.UsageError("the prompt is empty: write a PROMPT, or pipe one in")
    with show_spinner("waiting for a node that serves a model"):
        response, answering = _request_answer(session, text, model, max_tokens, time.monotonic() + wait)
    pieces = session.read_body(response, CHAT_TIMEOUT_SECONDS)
    if session.json:
        click.echo(json.dumps({"schema": 1, **json.loads(b"".join(pieces))}))
        return
    for piece in _iterate_text(pieces):
        click.echo(piece, nl=False)
    click.echo()
    if answering == EMBEDDED_MODEL:
        click.echo(TOY_NOTE, err=True)


def _request_answer(
    session: ApiSession, text: str, model: str | None, max_tokens: int | None, until: float
) -> tuple[http.client.HTTPResponse, str]:
    """Return the response to a chat and the name of the model. Retry until a node is ready.

    Raise `CommandError` if no node is ready at `until` (monotonic seconds), or if the request fails.
    """
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}], "stream": not session.json}
    if max_tokens is not None:
        body["max_tokens"] = max_tokens
    pause = threading.Event()
    while True:
        served = [
            row["id"]
            for row in session.request_json("GET", "/v1/models")["data"]
            if row.get("type", "llm") == "llm"  # an alias without a served candidate has no type
        ]
        late = time.monotonic() >= until
        if served or late:
            if not (model or served):
                raise CommandError(
                    REFUSED,
                    "no node serves a model for chats: see each node's state in `cluster nodes`, "
                    "and the models in `cluster models`",
                )
            name = model or served[0]
            response = session.send_request(
                "POST", "/v1/chat/completions", {"model": name, **body}, CHAT_TIMEOUT_SECONDS
            )
            if response.status < 400:
                return response, name
            raw = b"".join(session.read_body(response, CHAT_TIMEOUT_SECONDS))
            if late or response.status != 503:
                raise_for_status(response.status, raw)
        pause.wait(RETRY_INTERVAL_SECONDS)


def _iterate_text(pieces: Iterable[bytes]) -> Iterator[str]:
    for line in split_lines(pieces):
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        event = json.loads(line[6:])
        if "error" in event:
            raise CommandError(1, event["error"]["message"])
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""


KEY_VARIABLES = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "OLLAMA_API_KEY")
"""Environment variables with the API key, for the clients of OpenAI, Anthropic and Ollama."""
BUNDLE_VARIABLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")
"""Environment variables with the path of a file of authorities.

In order: for OpenSSL, Python and Rust; for `requests`; for Node, Bun and Electron.
"""


@click.command()
@click.option(
    "--shell", type=click.Choice(["sh", "fish"]), default="sh", show_default=True, help="Syntax of this shell."
)
@session_options
def env(session: ApiSession, shell: str) -> None:
    """Print the variables that point the clients of OpenAI, Anthropic and Ollama at this pool: `eval "$(cluster env)"`.

    The command works on the coordinator's machine, with --url, and after `cluster login` or `cluster trust-ca`. The key
    is read from --key-file; without a file, a comment shows how to create a key. If this machine trusts the pool's
    authority, the output includes the variables with the authority's file.
    """
    base, bundle, untrusted = _find_endpoint(session)
    key = session.read_key() if session.key_file else None
    variables = {
        "OPENAI_BASE_URL": base + "/v1",
        "OPENAI_API_BASE": base + "/v1",
        "ANTHROPIC_BASE_URL": base,
        "OLLAMA_HOST": base,
        **dict.fromkeys(KEY_VARIABLES, key),
        **dict.fromkeys(BUNDLE_VARIABLES, bundle),
    }
    if session.json:
        click.echo(json.dumps({"schema": 1, **variables}))
        return
    assign = "set -gx {} {}" if shell == "fish" else "export {}={}"
    for name, value in variables.items():
        if value is not None:
            click.echo(assign.format(name, shlex.quote(value)))
    if key is None:
        click.echo(
            f"# {', '.join(KEY_VARIABLES)}: the key that `cluster up` printed first, or a new one from "
            "`cluster key create NAME`"
        )
    if untrusted:
        click.echo("# the certificate: run `cluster trust-ca` once on each machine, then this command prints its file")


def _find_endpoint(session: ApiSession) -> tuple[str, str | None, bool]:
    """Return the URL of the endpoint, the file with its authority, and whether this machine must still trust it.

    The file is None if this machine does not trust an authority of the endpoint. Without a known coordinator and
    without --url, use the endpoint that was trusted last.
    """
    from coordinator.cli.commands.clients.trust_ca import find_bundle, find_trusted_endpoint

    known = None
    if session.url is not None or not session.running:
        url = parse_base_url(session.url) if session.url is not None else None
        known = find_trusted_endpoint(session.state, url)
        if known is None and url is not None:
            return url, None, url.startswith("https:")
    if known is not None:
        return *known, False
    base, authority = session.get_url_and_key()[0], session.get_authority()
    bundle = find_bundle(session.state, authority) if authority else None
    return base, bundle, bool(authority) and bundle is None


@click.command()
@click.option("--cluster", "all_nodes", is_flag=True, help="Print the versions of the coordinator and of every node.")
@session_options
def version(session: ApiSession, all_nodes: bool) -> None:
    """Print version and protocol. With --cluster, also print both for every member, with the next step.

    Exit code: 8 if the protocol of a member is not supported.
    """
    from importlib.metadata import version as installed

    from wire import identity

    answer: dict[str, Any] = {
        "schema": 1,
        "version": installed("macpool"),
        "protocol": identity.PROTOCOL,
        "oldest": identity.OLDEST_PROTOCOL,
    }
    if all_nodes:
        coordinator, nodes = (
            session.request_json("GET", "/api/v1/version"),
            session.request_json("GET", "/api/v1/nodes")["nodes"],
        )
        answer["coordinator"] = coordinator["version"]
        answer["coordinator_protocol"] = coordinator["protocol"]
        answer["nodes"] = {node["name"]: node["version"] for node in nodes}
        answer["members"] = _compare_members(coordinator["version"], nodes)
    session.print_answer(answer, _print_version)
    if not all(member["joinable"] for member in answer.get("members", [])):
        click.get_current_context().exit(PROTOCOL)


def _compare_members(coordinator: str, nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from coordinator.cluster.version_skew import MemberVersion, compare_versions

    lines = compare_versions(
        coordinator, [MemberVersion(n["name"], n["version"], n["protocol"], n["state"]) for n in nodes]
    )
    return [
        {
            "name": line.member.name,
            "state": line.member.state,
            "version": line.member.version,
            "protocol": line.member.protocol,
            "ok": line.ok,
            "joinable": line.joinable,
            "advice": line.advice,
        }
        for line in lines
    ]


def _print_version(answer: dict[str, Any]) -> None:
    click.echo(f"macpool {answer['version']}, protocol {answer['protocol']} (supports {answer['oldest']} and newer)")
    if "coordinator" in answer:
        rows = [("coordinator", "", answer["coordinator"], str(answer["coordinator_protocol"]), "")]
        rows += [
            (
                member["name"],
                member["state"],
                member["version"] or "-",
                str(member["protocol"] or "-"),
                member["advice"] or "ok",
            )
            for member in answer["members"]
        ]
        print_table(("MEMBER", "STATE", "VERSION", "PROTOCOL", "NEXT STEP"), rows)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script for a shell: `eval "$(cluster completion zsh)"`.

    The script completes the name by which the command was called: `macpool completion zsh` completes `macpool`.
    """
    from click.shell_completion import get_completion_class

    from coordinator.cli import cluster

    name = click.get_current_context().find_root().info_name or "cluster"

    kind = get_completion_class(shell)
    if kind is None:
        raise click.UsageError(f"no completion for {shell}")
    click.echo(kind(cluster, {}, name, f"_{name.upper()}_COMPLETE").source())


@click.command("help")
@click.argument("words", metavar="[COMMAND]...", nargs=-1)
@click.pass_context
def help_(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Print the help of a command: `cluster help`, `cluster help key limit`."""
    root = ctx.find_root()
    command, context = root.command, root
    for word in words:
        if not isinstance(command, click.Group):
            raise click.UsageError(f"`{context.command_path}` has no commands of its own")
        name, below, _ = command.resolve_command(context, [word])
        if below is None:
            raise click.UsageError(f"there is no `{context.command_path} {word}`")
        command, context = below, click.Context(below, info_name=name, parent=context)
    click.echo(command.get_help(context))
