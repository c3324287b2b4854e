"""`cluster token`, `key` and `audit`, which also work without a running coordinator."""

import math
from datetime import UTC, date, datetime
from typing import Any
from urllib.parse import quote, urlencode

import click

from coordinator.cli.group import CommandGroup, confirm, yes_option
from coordinator.cli.key_limit_options import CLEARABLE, limit_options, select_limits
from coordinator.client.api_client import ApiSession, print_table, session_options
from coordinator.client.errors import NOT_FOUND, UNREACHABLE, CommandError


def call_route(session: ApiSession, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Call an API route of the running coordinator, and return its JSON.

    If no coordinator is known, or that of the state folder has crashed, lock the database and perform the operation of
    the route on it. Raise `CommandError` if the call or the operation fails.
    """
    if session.running:
        try:
            return session.request_json(method, path, body)
        except CommandError as error:
            if error.exit_code != UNREACHABLE or not session.has_crashed:
                raise
    from coordinator.cli.offline_access import run_offline as offline

    return offline(session, method, path, body or {})


def format_minute(seconds: float | None) -> str:
    """Format Unix seconds in local time, such as `2026-01-31 12:00`; `never` for None."""
    return "never" if seconds is None else datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M")


def format_second(seconds: float) -> str:
    """Format Unix seconds in local time, such as `2026-01-31 12:00:00`."""
    return datetime.fromtimestamp(seconds, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")


MAX_DURATION_SECONDS = 10 * 365 * 86400.0
"""Maximum duration, in seconds. `datetime` cannot represent the end of a much longer one."""


class Duration(click.ParamType[float]):
    """Parameter type for a duration: `90s`, `15m`, `1h` or `30d`, at most ten years. Its value is in seconds."""

    name = "duration"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return a duration in seconds.

        Raise `click.BadParameter` if `value` is not a duration above 0, or is above `MAX_DURATION_SECONDS`.
        """
        if isinstance(value, float):
            return value
        unit = {"s": 1, "m": 60, "h": 3600, "d": 86400}.get(str(value)[-1:])
        try:
            seconds = float(str(value)[:-1]) * (unit or 0)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < math.inf:
            self.fail(f"{value!r} is not a duration: write 90s, 15m, 1h or 30d", param, ctx)
        if seconds > MAX_DURATION_SECONDS:
            self.fail(f"{value!r} is more than ten years", param, ctx)
        return seconds


class Day(click.ParamType[str]):
    """Parameter type for a day of the calendar: `2026-01-31`."""

    name = "day"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return a day in the form `2026-01-31`. Raise `click.BadParameter` if `value` is not a day."""
        try:
            return date.fromisoformat(str(value)).isoformat()
        except ValueError:
            self.fail(f"{value!r} is not a day: write 2026-01-31", param, ctx)


LIST_ROUTES = {"key": "/api/v1/keys", "token": "/api/v1/tokens"}
"""API route that lists all objects of a kind."""


def find_object(session: ApiSession, kind: str, id_or_name: str) -> dict[str, Any]:
    """Return the object of `kind` (`key` or `token`) with this id or name, as the API lists it.

    Raise `CommandError` if there is none, or if several have this name. Raise the errors of `call_route`.
    """
    rows: list[dict[str, Any]] = call_route(session, "GET", LIST_ROUTES[kind])[f"{kind}s"]
    matches = [row for row in rows if row["id"] == id_or_name] or [row for row in rows if row["name"] == id_or_name]
    if not matches:
        raise CommandError(NOT_FOUND, f"there is no {kind} {id_or_name}: `cluster {kind} list` shows ids and names")
    if len(matches) > 1:
        ids = ", ".join(row["id"] for row in matches)
        raise CommandError(2, f"{len(matches)} {kind}s are named {id_or_name}: name one by its id ({ids})")
    return matches[0]


@click.group(cls=CommandGroup)
def token() -> None:
    """Create, list or revoke the tokens with which machines join."""


@token.command("create")
@click.option(
    "--expires",
    "--ttl",
    "ttl",
    type=Duration(),
    default="1h",
    show_default=True,
    help="Lifetime of the token, such as 24h.",
)
@click.option(
    "--uses",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="Number of machines that may use it.",
)
@click.option("--name", default="", help="Name in `cluster token list`.")
@session_options
def token_create(session: ApiSession, ttl: float, uses: int, name: str) -> None:
    """Create a join token. The token works once, for one hour, unless --uses or --expires is given."""
    answer = call_route(session, "POST", "/api/v1/tokens", {"ttl_seconds": ttl, "uses": uses, "name": name})
    session.print_answer(answer, lambda answer: click.echo(answer.get("join") or answer["token"]))


@token.command("list")
@session_options
def token_list(session: ApiSession) -> None:
    """List tokens without their secrets."""
    session.print_answer(
        call_route(session, "GET", "/api/v1/tokens"),
        lambda answer: print_table(
            ("ID", "NAME", "USES LEFT", "EXPIRES"),
            [(t["id"], t["name"], str(t["uses_left"]), format_minute(t["expires"])) for t in answer["tokens"]],
        ),
    )


@token.command("show")
@click.argument("token_", metavar="TOKEN")
@session_options
def token_show(session: ApiSession, token_: str) -> None:
    """Show one token, named by its id or name, without its secret."""
    row = find_object(session, "token", token_)
    session.print_answer({"schema": 1, "token": row}, lambda _: _print_token(row))


def _print_token(row: dict[str, Any]) -> None:
    fields = {
        "id": row["id"],
        "name": row["name"] or "-",
        "uses left": row["uses_left"],
        "expires": format_minute(row["expires"]),
    }
    for name, value in fields.items():
        click.echo(f"{name:<9} {value}")


@token.command("revoke")
@click.argument("token_", metavar="TOKEN")
@yes_option
@session_options
def token_revoke(session: ApiSession, token_: str, yes: bool) -> None:
    """Revoke a token by its id or name. No further machine can join with it."""
    token = find_object(session, "token", token_)
    confirm(f"Revoke token {_format_title(token)}?", yes=yes)
    answer = call_route(session, "DELETE", f"/api/v1/tokens/{quote(token['id'], safe='')}")
    session.print_answer(answer, lambda _: click.echo(f"token {_format_title(token)} revoked"))


def _format_title(row: dict[str, Any]) -> str:
    """Format name and id of a key or token for messages; the id alone without a name."""
    return f"{row['name']} ({row['id']})" if row["name"] else str(row["id"])


@click.group(cls=CommandGroup)
def key() -> None:
    """Create, list, limit or revoke API keys; show their usage. KEY is a key's name or id."""


@key.command("create")
@click.argument("name")
@click.option(
    "--scope",
    "scopes",
    multiple=True,
    type=click.Choice(["infer", "admin", "metrics"]),
    default=("infer",),
    show_default=True,
    help="A permission of the key; may be repeated.",
)
@click.option(
    "--expires", type=Duration(), help="Lifetime of the key, such as 30d. Without it, the key does not expire."
)
@limit_options
@session_options
def key_create(session: ApiSession, name: str, scopes: tuple[str, ...], expires: float | None, **options: Any) -> None:
    """Create an API key. The key is shown once; only its digest is stored."""
    body = {"name": name, "scopes": list(scopes), "ttl_seconds": expires, "limits": select_limits(options)}
    session.print_answer(call_route(session, "POST", "/api/v1/keys", body), lambda answer: click.echo(answer["key"]))


@key.command("list")
@session_options
def key_list(session: ApiSession) -> None:
    """List keys without their secrets."""
    session.print_answer(
        call_route(session, "GET", "/api/v1/keys"),
        lambda answer: print_table(
            ("ID", "NAME", "SCOPES", "CREATED", "EXPIRES", "LIMITS"),
            [_build_row(key) for key in answer["keys"]],
        ),
    )


@key.command("show")
@click.argument("key_", metavar="KEY")
@session_options
def key_show(session: ApiSession, key_: str) -> None:
    """Show one key without its secret."""
    row = find_object(session, "key", key_)
    session.print_answer({"schema": 1, "key": row}, lambda _: _print_key(row))


def _print_key(row: dict[str, Any]) -> None:
    for name, value in zip(("id", "name", "scopes", "created", "expires", "limits"), _build_row(row), strict=True):
        click.echo(f"{name:<9} {value}")


def _build_row(key: dict[str, Any]) -> tuple[str, ...]:
    dates = (format_minute(key["created"]), format_minute(key["expires"]))
    return (key["id"], key["name"], ",".join(key["scopes"]), *dates, _format_limits(key["limits"]))


def _format_limits(limits: dict[str, Any]) -> str:
    return " ".join(f"{name}={_format_value(value)}" for name, value in limits.items()) or "none"


def _format_value(value: list[str] | tuple[str, ...] | str | int) -> str:
    return ",".join(value) if isinstance(value, (list, tuple)) else str(value)


@key.command("limit")
@click.argument("key_", metavar="KEY")
@limit_options
@click.option(
    "--clear",
    "cleared",
    multiple=True,
    metavar="LIMIT",
    type=click.Choice([name.replace("_", "-") for name in CLEARABLE] + ["all"]),
    help="Remove a limit: models, labels, requests-per-minute, tokens-per-minute, concurrency, waiting, "
    "priority, upstreams, or all; may be repeated.",
)
@session_options
def key_limit(session: ApiSession, key_: str, cleared: tuple[str, ...], **options: Any) -> None:
    """Change the given limits of a key immediately.

    Print the limits before and after. Other limits do not change. A limit cannot be both given and cleared.
    """
    row, changes = find_object(session, "key", key_), select_limits(options)
    names = set(CLEARABLE) if "all" in cleared else {name.replace("-", "_") for name in cleared}
    both = sorted(names & set(changes)) if "all" not in cleared else []
    if both:
        raise click.UsageError(f"{both[0].replace('_', '-')} is both given and cleared: use one of the two")
    if not names and not changes:
        raise click.UsageError(
            f"name a limit to change, or --clear one; {_format_title(row)} has: {_format_limits(row['limits'])}"
        )
    remaining = {name: value for name, value in row["limits"].items() if name not in names}
    after = {name: value for name, value in {**remaining, **changes}.items() if value not in (None, (), [])}
    call_route(session, "PUT", f"/api/v1/keys/{quote(row['id'], safe='')}/limits", {"limits": after})
    answer = {"schema": 1, "id": row["id"], "name": row["name"], "before": row["limits"], "after": after}
    session.print_answer(
        answer,
        lambda answer: click.echo(
            f"{_format_title(row)}\n  before  {_format_limits(answer['before'])}\n"
            f"  after   {_format_limits(answer['after'])}"
        ),
    )


@key.command("rename")
@click.argument("key_", metavar="KEY")
@click.argument("name")
@session_options
def key_rename(session: ApiSession, key_: str, name: str) -> None:
    """Rename a key. Its secret, limits and usage do not change."""
    row = find_object(session, "key", key_)
    answer = call_route(session, "PUT", f"/api/v1/keys/{quote(row['id'], safe='')}/name", {"name": name})
    session.print_answer(answer, lambda _: click.echo(f"{_format_title(row)} is now {name}"))


@key.command("expire")
@click.argument("key_", metavar="KEY")
@click.argument("after", type=Duration(), required=False)
@click.option("--never", is_flag=True, help="The key does not expire.")
@session_options
def key_expire(session: ApiSession, key_: str, after: float | None, never: bool) -> None:
    """Set when a key expires.

    AFTER is a time from now (90s, 15m, 1h, 30d). With --never the key does not expire.
    """
    if (after is None) != never:
        raise click.UsageError("specify either a time from now, such as 30d, or --never")
    row = find_object(session, "key", key_)
    call_route(session, "PUT", f"/api/v1/keys/{quote(row['id'], safe='')}/expiry", {"ttl_seconds": after})
    row = find_object(session, "key", row["id"])
    answer = {"schema": 1, "id": row["id"], "expires": row["expires"]}
    session.print_answer(
        answer, lambda answer: click.echo(f"{_format_title(row)} expires: {format_minute(answer['expires'])}")
    )


@key.command("rotate")
@click.argument("key_", metavar="KEY")
@yes_option
@session_options
def key_rotate(session: ApiSession, key_: str, yes: bool) -> None:
    """Replace the secret of a key. The new secret is shown once; the old one is refused immediately."""
    row = find_object(session, "key", key_)
    confirm(
        f"Replace the secret of {_format_title(row)}? Programs that use the old one are refused immediately.", yes=yes
    )
    answer = call_route(session, "POST", f"/api/v1/keys/{quote(row['id'], safe='')}/rotate", {})
    session.print_answer(answer, lambda answer: click.echo(answer["key"]))


@key.command("usage")
@click.argument("key_", metavar="[KEY]", required=False)
@click.option("--since", type=Day(), metavar="DAY", help="Show usage since this day (UTC, 2026-01-31).")
@session_options
def key_usage(session: ApiSession, key_: str | None, since: str | None) -> None:
    """Show how many requests and tokens each key used, by model.

    Usage is stored for 400 days, including that of revoked keys.
    """
    id_ = find_object(session, "key", key_)["id"] if key_ else None
    query = urlencode({name: value for name, value in (("key", id_), ("since", since)) if value})
    answer = call_route(session, "GET", f"/api/v1/keys/usage?{query}")
    columns = ("requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens")
    session.print_answer(
        answer,
        lambda answer: print_table(
            ("KEY", "NAME", "MODEL", *(column.replace("_", " ").upper() for column in columns)),
            [(u["key"], u["name"], u["model"], *(str(u[column]) for column in columns)) for u in answer["usage"]],
        ),
    )


@click.command()
@click.option("--last", type=click.IntRange(1), default=50, show_default=True, help="Number of newest entries.")
@session_options
def audit(session: ApiSession, last: int) -> None:
    """Print the newest entries of the audit log: time, key, address and action, oldest first.

    The entries are joins, and changes of keys, tokens, nodes and models.
    """
    session.print_answer(
        call_route(session, "GET", f"/api/v1/audit?last={last}"),
        lambda answer: print_table(
            ("TIME", "ACTOR", "ADDRESS", "ACTION", "SUBJECT"),
            [
                (
                    format_second(act["at"]),
                    act.get("actor_name") or act["actor"],
                    act.get("address") or "-",
                    act["action"],
                    act["subject"],
                )
                for act in answer["acts"]
            ],
            fold=("ACTOR", "SUBJECT"),
        ),
    )


@key.command("revoke")
@click.argument("key_", metavar="KEY")
@yes_option
@session_options
def key_revoke(session: ApiSession, key_: str, yes: bool) -> None:
    """Revoke a key: requests with it are refused immediately."""
    key = find_object(session, "key", key_)
    confirm(f"Revoke key {_format_title(key)}? Programs that use it are refused immediately.", yes=yes)
    answer = call_route(session, "DELETE", f"/api/v1/keys/{quote(key['id'], safe='')}")
    session.print_answer(answer, lambda _: click.echo(f"key {_format_title(key)} revoked"))
