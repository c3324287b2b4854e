"""Who may come in: tokens for machines, keys for programs. Both work with and without a running coordinator."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

import click

from coordinator.cli.session import Session, options, table


def call(session: Session, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask the running coordinator; without one, do the same on its database under its lock."""
    if session.running:
        return session.call(method, path, body)
    from coordinator.cli.offline import call as offline

    return offline(session, method, path, body or {})


def moment(seconds: float | None) -> str:
    """Write a time stamp for a person."""
    return "never" if seconds is None else datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M")


class Duration(click.ParamType[float]):
    """`90s`, `15m`, `1h`, `30d`, as seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read one; a click usage error otherwise."""
        if isinstance(value, float):
            return value
        unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(str(value)[-1:])
        try:
            seconds = float(str(value)[:-1]) * (unit or 0)
        except ValueError:
            seconds = 0.0
        if seconds <= 0:
            self.fail(f"{value!r} is not a duration: write 90s, 15m, 1h or 30d", param, ctx)
        return seconds


@click.group()
def token() -> None:
    """Make, list and revoke the tokens with which machines join."""


@token.command("create")
@click.option("--ttl", type=Duration(), default="1h", show_default=True, help="How long it is good.")
@click.option(
    "--uses", type=click.IntRange(1, 1000), default=1, show_default=True, help="How many machines may use it."
)
@click.option("--name", default="", help="A note for the list.")
@options
def token_create(session: Session, ttl: float, uses: int, name: str) -> None:
    """Make a join token: one use and one hour unless told otherwise."""
    answer = call(session, "POST", "/api/v1/tokens", {"ttl_seconds": ttl, "uses": uses, "name": name})
    session.show(answer, lambda made: click.echo(made.get("join") or made["token"]))


@token.command("list")
@options
def token_list(session: Session) -> None:
    """List tokens without their secrets."""
    session.show(
        call(session, "GET", "/api/v1/tokens"),
        lambda answer: table(
            ("ID", "NAME", "USES LEFT", "EXPIRES"),
            [(t["id"], t["name"], str(t["uses_left"]), moment(t["expires"])) for t in answer["tokens"]],
        ),
    )


@token.command("revoke")
@click.argument("id_", metavar="ID")
@options
def token_revoke(session: Session, id_: str) -> None:
    """Make a token useless at once."""
    session.show(call(session, "DELETE", f"/api/v1/tokens/{id_}"), lambda _: click.echo(f"token {id_} revoked"))


@click.group()
def key() -> None:
    """Make, list and revoke the keys with which programs use the pool."""


def limits(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options that say what a key may take."""
    for option in reversed((
        click.option("--model", "models", multiple=True, help="Only this model or pattern (`qwen*`); again for more."),
        click.option("--label", "labels", multiple=True, help="Only nodes with this label; again for more."),
        click.option("--requests-per-minute", type=click.IntRange(1), help="Most requests in a minute."),
        click.option("--tokens-per-minute", type=click.IntRange(1), help="Most tokens in a minute, prompts included."),
        click.option("--concurrency", type=click.IntRange(1), help="Most requests at once."),
        click.option("--waiting", type=click.IntRange(0),
                     help="Most requests in line; by default a quarter of all, more while nobody else waits."),
        click.option("--priority", type=click.Choice(["low", "normal", "high"]), default="normal", show_default=True,
                     help="Its part of the queue, and of what Macs write at once, beside others: 1, 4 or 16."),
    )):  # fmt: skip
        command = option(command)
    return command


def limits_of(given: dict[str, Any]) -> dict[str, Any]:
    """Give the limits that were named, as the API takes them."""
    return {name: value for name, value in given.items() if value not in (None, ())}


@key.command("create")
@click.argument("name")
@click.option(
    "--scope", "scopes", multiple=True, type=click.Choice(["infer", "admin", "metrics"]), default=("infer",),
    show_default=True, help="What it may do; may be given again.",
)  # fmt: skip
@click.option("--expires", type=Duration(), help="How long it is good; for ever unless given.")
@limits
@options
def key_create(session: Session, name: str, scopes: tuple[str, ...], expires: float | None, **given: Any) -> None:
    """Make an API key. It is shown once and stored only as a digest."""
    body = {"name": name, "scopes": list(scopes), "ttl_seconds": expires, "limits": limits_of(given)}
    session.show(call(session, "POST", "/api/v1/keys", body), lambda made: click.echo(made["key"]))


@key.command("list")
@options
def key_list(session: Session) -> None:
    """List keys without their secrets."""
    session.show(
        call(session, "GET", "/api/v1/keys"),
        lambda answer: table(
            ("ID", "NAME", "SCOPES", "CREATED", "EXPIRES", "LIMITS"),
            [_row(key) for key in answer["keys"]],
        ),
    )


def _row(key: dict[str, Any]) -> tuple[str, ...]:
    dates = (moment(key["created"]), moment(key["expires"]))
    return (key["id"], key["name"], ",".join(key["scopes"]), *dates, _told(key["limits"]))


def _told(limits: dict[str, Any]) -> str:
    return " ".join(f"{name}={_value(value)}" for name, value in limits.items()) or "none"


def _value(value: list[str] | tuple[str, ...] | str | int) -> str:
    return ",".join(value) if isinstance(value, (list, tuple)) else str(value)


@key.command("limit")
@click.argument("id_", metavar="ID")
@limits
@options
def key_limit(session: Session, id_: str, **given: Any) -> None:
    """Give a key these limits in place of all that it had, at once; none named: no limits."""
    answer = call(session, "PUT", f"/api/v1/keys/{id_}/limits", {"limits": limits_of(given)})
    session.show(answer, lambda _: click.echo(f"key {id_}: {_told(limits_of(given))}"))


@key.command("usage")
@click.argument("id_", metavar="[ID]", required=False)
@click.option("--since", default="", metavar="DAY", help="Only from this day on (UTC, 2026-01-31).")
@options
def key_usage(session: Session, id_: str | None, since: str) -> None:
    """Show how many requests and tokens each key used, by model."""
    query = urlencode({name: value for name, value in (("key", id_), ("since", since)) if value})
    answer = call(session, "GET", f"/api/v1/keys/usage?{query}")
    columns = ("requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens")
    session.show(
        answer,
        lambda found: table(
            ("KEY", "NAME", "MODEL", *(column.replace("_", " ").upper() for column in columns)),
            [(u["key"], u["name"], u["model"], *(str(u[column]) for column in columns)) for u in found["usage"]],
        ),
    )


@click.command()
@click.option("--last", type=click.IntRange(1), default=50, show_default=True, help="How many.")
@options
def audit(session: Session, last: int) -> None:
    """Show who did what: joins, keys, tokens, and everything that was done to nodes and models."""
    session.show(
        call(session, "GET", f"/api/v1/audit?last={last}"),
        lambda answer: table(
            ("WHEN", "WHO", "WHAT", "TO"),
            [(moment(act["at"]), act["actor"], act["action"], act["subject"]) for act in answer["acts"]],
        ),
    )


@key.command("revoke")
@click.argument("id_", metavar="ID")
@options
def key_revoke(session: Session, id_: str) -> None:
    """Make a key useless at once."""
    session.show(call(session, "DELETE", f"/api/v1/keys/{id_}"), lambda _: click.echo(f"key {id_} revoked"))
