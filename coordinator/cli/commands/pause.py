"""`cluster pause` and `cluster resume`: free a Mac's memory for its owner, and share it again."""

import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import click

from coordinator.cli.commands.tokens_and_keys import Duration, format_minute
from coordinator.client.api_client import ApiSession, session_options
from coordinator.client.errors import NOT_FOUND, CommandError
from host.node_marks import PauseFile, PauseRecord
from wire.units import show_count


@click.command()
@click.argument("node", required=False)
@click.argument("duration", required=False)
@session_options
def pause(session: ApiSession, node: str | None, duration: str | None) -> None:
    """Stop work on a Mac for DURATION (30m, 2h, 1d) and free its memory.

    Examples:

    \b
    cluster pause 2h           this Mac, even with its node stopped
    cluster pause              this Mac, until `cluster resume`
    cluster pause studio 2h    another Mac, by name.

    Running requests continue on other Macs, or get `sharing.grace_seconds` to end on this Mac. Then the models are
    unloaded. The pause persists across restarts.
    """
    name, seconds = _parse_arguments(node, duration)
    if name is None:
        _pause_here(session, seconds)
        return
    answer = session.request_json("POST", f"/api/v1/nodes/{quote(name, safe='')}/pause", {"seconds": seconds})
    session.print_answer(
        answer, lambda state: click.echo(f"{name} is {describe_sharing(state['sharing'])}{_describe_running(state)}")
    )


@click.command()
@click.argument("node", required=False)
@session_options
def resume(session: ApiSession, node: str | None) -> None:
    """End the pause of this Mac, or of another Mac by name. The setting `sharing.when` applies again."""
    if node is None:
        was_paused = _open_pause_file(session.state).remove()
        text = "this Mac accepts requests again within 1 s, if sharing.when permits"
        answer = {"schema": 1, "paused": False, "was_paused": was_paused}
        session.print_answer(
            answer, lambda state: click.echo(text if state["was_paused"] else "this Mac was not paused")
        )
        return
    answer = session.request_json("POST", f"/api/v1/nodes/{quote(node, safe='')}/resume")
    session.print_answer(answer, lambda state: click.echo(f"{node} is {describe_sharing(state['sharing'])}"))


def describe_sharing(sharing: dict[str, Any]) -> str:
    """Describe the field `sharing` of a node in the API: shared, or paused with the end and the reason."""
    if not sharing["paused"]:
        return "shared" if sharing["when"] in ("", "always") else f"shared ({sharing['when']})"
    until = f" until {format_minute(sharing['until'])}" if sharing["until"] else ""
    return f"paused{until}: {sharing['why']}"


def _describe_running(answer: dict[str, Any]) -> str:
    left = show_count(answer["in_flight"], "request")
    return f"; it still runs {left}, which will move or end soon" if answer["in_flight"] else ""


def _parse_arguments(node: str | None, duration: str | None) -> tuple[str | None, float | None]:
    """Return name and seconds from the arguments; None for a missing one. A single word may be either.

    Raise `click.UsageError` for an invalid duration.
    """
    if duration is not None:
        return node, Duration().convert(duration, None, click.get_current_context())
    if node is None:
        return None, None
    try:
        return None, Duration().convert(node, None, None)
    except click.UsageError:
        if not node or (node[0].isdecimal() and node.isalnum()):
            raise  # a mistyped duration; a Mac with such a name can be paused by giving both name and duration
        return node, None


def _pause_here(session: ApiSession, seconds: float | None) -> None:
    file = _open_pause_file(session.state)
    until = None if seconds is None else time.time() + seconds
    try:
        file.write(PauseRecord(until))
    except OSError as error:
        raise CommandError(1, f"{file.path} cannot be written: {error.strerror}") from None
    end = "until `cluster resume`" if until is None else f"until {format_minute(until)}"
    session.print_answer(
        {"schema": 1, "paused": True, "until": until},
        lambda _: click.echo(
            f"this Mac accepts no new requests, {end}; running requests move or end, then the models are unloaded"
        ),
    )


def _open_pause_file(state: Path) -> PauseFile:
    folder = state / "node"
    if not (folder / "identity" / "identity.json").exists():
        raise CommandError(
            NOT_FOUND, f"there is no node in {state}: name a node (`cluster pause NODE 2h`), or join this machine first"
        )
    return PauseFile(folder)
