"""Who may come in: tokens for machines, keys for programs. Both work with and without a running coordinator."""

from datetime import UTC, datetime
from typing import Any

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


@key.command("create")
@click.argument("name")
@click.option(
    "--scope", "scopes", multiple=True, type=click.Choice(["infer", "admin", "metrics"]), default=("infer",),
    show_default=True, help="What it may do; may be given again.",
)  # fmt: skip
@click.option("--expires", type=Duration(), help="How long it is good; for ever unless given.")
@options
def key_create(session: Session, name: str, scopes: tuple[str, ...], expires: float | None) -> None:
    """Make an API key. It is shown once and stored only as a digest."""
    body = {"name": name, "scopes": list(scopes), "ttl_seconds": expires}
    session.show(call(session, "POST", "/api/v1/keys", body), lambda made: click.echo(made["key"]))


@key.command("list")
@options
def key_list(session: Session) -> None:
    """List keys without their secrets."""
    session.show(
        call(session, "GET", "/api/v1/keys"),
        lambda answer: table(
            ("ID", "NAME", "SCOPES", "CREATED", "EXPIRES"),
            [
                (k["id"], k["name"], ",".join(k["scopes"]), moment(k["created"]), moment(k["expires"]))
                for k in answer["keys"]
            ],
        ),
    )


@key.command("revoke")
@click.argument("id_", metavar="ID")
@options
def key_revoke(session: Session, id_: str) -> None:
    """Make a key useless at once."""
    session.show(call(session, "DELETE", f"/api/v1/keys/{id_}"), lambda _: click.echo(f"key {id_} revoked"))
