"""Requests and placements as tables and texts for the terminal."""

from typing import Any

import click

from coordinator.client.api_client import print_table
from wire.units import show_count, show_size

NARROW = ("ID", "MODEL", "NODE", "OUTCOME", "SECONDS", "PROMPT", "ANSWER")
"""Columns of the table of requests, for terminals of 80 characters. PROMPT and ANSWER are in tokens."""
WIDE = (*NARROW, "CACHED", "KEY", "STEPS")
"""Columns of the table of requests with `-o wide`. CACHED is the cached tokens of the prompt."""


def print_placement(answer: dict[str, Any]) -> None:
    """Print the candidates of a placement with their memory, and the chosen node if there is one.

    `answer` is a response of `/api/v1/place`. The passed-over models of an alias come first. A candidate that was
    refused before its memory was read has the ceiling 0, and is listed without sizes. The reasons of refusals are
    below the table.
    """
    for row in answer.get("passed_over", ()):
        click.echo(f"passed over {row['model']}: {row['reason']}")
    sizes = ("need", "headroom", "ceiling", "current", "reserved", "margin")
    print_table(
        ("NODE", *[size.upper() for size in sizes], "VERDICT"),
        [
            (
                c["name"],
                *[show_size(c.get(size)) if c["ceiling"] else "-" for size in sizes],
                "refused" if c["why_not"] else "chosen" if c["chosen"] else "fits",
            )
            for c in answer["candidates"]
        ],
        numbers=[size.upper() for size in sizes],
    )
    for candidate in answer["candidates"]:
        if candidate["why_not"]:
            click.echo(f"{candidate['name']}: {candidate['why_not']}")
    if answer["node"] is not None:
        model = f" with {answer['model']}" if answer.get("alias") else ""
        click.echo(f"would go to {answer['name']}{model}")


def print_requests(answer: dict[str, Any], *, wide: bool = False) -> None:
    """Print the ended requests of a response of `/api/v1/requests` as a table, one request per row.

    With `wide`, each row is one line with the columns `WIDE`, otherwise the columns are `NARROW`.
    """
    columns = WIDE if wide else NARROW
    rows = [_build_request_row(request)[: len(columns)] for request in answer["requests"]]
    numbers = ("SECONDS", "PROMPT", "ANSWER", "CACHED")
    print_table(columns, rows, numbers=numbers, fold=("MODEL", "NODE", "OUTCOME"), full_width=wide)


def _build_request_row(request: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of a request for the columns `WIDE`. NODE is the last node, STEPS may be the error message."""
    steps = request["steps"]
    return (
        request["request_id"],
        request["model"] or "-",
        next((step["node"] for step in reversed(steps) if step["node"]), "-"),
        request["outcome"],
        f"{request['seconds']:.2f}",
        str(request["prompt_tokens"] or "-"),
        str(request["completion_tokens"]),
        str(request["cached_tokens"]),
        request["key"],
        ", ".join(f"{step['what'].partition(':')[0]} {step['node']}".strip() for step in steps) or request["message"],
    )


def print_request(answer: dict[str, Any]) -> None:
    """Print one request with its steps, and the decisions about its placement.

    `answer` is a response of `/api/v1/requests/ID`.
    """
    for request in answer.get("under_way", ()):
        click.echo(
            f"{request['request_id']}  {request['model']}, key {request['key']}: {request['phase']}, "
            f"for {request['seconds']:.1f} s"
        )
        _print_steps(request["steps"])
    for request in answer["requests"]:
        took = f"{request['outcome']} after {request['seconds']:.3f} s"
        click.echo(f"{request['request_id']}  {request['model'] or 'no model'}, key {request['key']}: {took}")
        if request["message"]:
            click.echo(f"  {request['message']}")
        if request.get("alias"):
            click.echo(f"  alias {request['alias']}{_describe_passed_over(request['passed_over'])}")
        if request.get("profile"):
            click.echo(f"  profile {request['profile']}")
        if request["ignored"]:
            click.echo(f"  ignored: {', '.join(request['ignored'])}")
        _print_steps(request["steps"])
        if request["timings"] is not None:
            times = "  ".join(f"{name} {seconds:.3f} s" for name, seconds in request["timings"].items())
            click.echo(f"  on the node: {times}")
        prompt = request["prompt_tokens"]
        counted = "prompt unknown" if prompt is None else f"{prompt} prompt ({request['cached_tokens']} cached)"
        click.echo(f"  tokens: {counted}, {request['completion_tokens']} generated")
    several = len({decision["demand"]["model"] for decision in answer["decisions"]}) > 1
    for decision in answer["decisions"]:
        about = f" about {decision['demand']['model']}" if several else ""
        verdict = decision["refused"] or "placed"
        nodes = show_count(decision["nodes"], "node")
        click.echo(f"\ndecided{about} {decision['seconds_ago']:.1f} s ago among {nodes}: {verdict}")
        print_placement({"candidates": decision["candidates"], "node": None})


def _describe_passed_over(passed_over: list[dict[str, Any]]) -> str:
    """Describe the candidates of an alias before the model that answered; empty without any."""
    return "".join(f"\n    {row['model']} passed over: {row['reason']}" for row in passed_over)


def _print_steps(steps: list[dict[str, Any]]) -> None:
    for step in steps:
        click.echo(f"  {step['at']:9.3f} s  {step['what']} {step['node']}".rstrip())
