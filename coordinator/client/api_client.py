"""Client of the coordinator's API for the commands: choice of coordinator and key, requests, and printed answers."""

import http.client
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from pathlib import Path
from typing import Any, NoReturn, cast

import click

from coordinator.client.connection import (
    CoordinatorAddress,
    convert_connection_errors,
    iterate_body,
    parse_base_url,
    send_request,
)
from coordinator.client.errors import DENIED, NOT_FOUND, REFUSED, TIMED_OUT, UNREACHABLE, CommandError

MEMBER_PATHS = frozenset({"/api/v1/status", "/api/v1/nodes", "/api/v1/models"})
"""Paths of the API that a command on a node's machine can read with the node's certificate, without a key."""
FOLLOW_TIMEOUT_SECONDS = 86400.0
"""Default timeout of a followed log: seconds without data."""
RESTART_SECONDS, RESTART_POLL_SECONDS = 60.0, 1.0
"""Time for which a waiting command repeats its request while the coordinator restarts, and pause between two tries."""
LOGIN_FILE = "login.json"
"""File in the state folder (mode 0600) with the data of `cluster login`."""
_FIELDS = {"run.json": {"url", "secret"}, LOGIN_FILE: {"url", "key"}}
"""Required fields of the files in the state folder that name a coordinator."""


def get_default_state() -> Path:
    """Return the default state folder: `macpool` in the current user's folder for application data."""
    import platformdirs

    return Path(platformdirs.user_data_dir("macpool", appauthor=False))


@dataclass(frozen=True, slots=True)
class ApiSession:
    """Options of a command that select a coordinator and an output format."""

    state: Path
    """State folder of this machine."""
    url: str | None
    """URL of --url; None for the coordinator of the state folder or of `cluster login`."""
    key_file: Path | None
    """File of --key-file with an API key; None without the option."""
    output: str
    """Format of the output: `text`, `wide` or `json`."""

    @property
    def json(self) -> bool:
        """Whether to print JSON."""
        return self.output == "json"

    @property
    def wide(self) -> bool:
        """Whether to print every column of a table."""
        return self.output == "wide"

    @property
    def running(self) -> bool:
        """Whether a coordinator is known: by --url, by `run.json`, or by `cluster login`.

        It may have ended, because a crash leaves `run.json` behind. Raise `CommandError` if a file of the state folder
        cannot be read.
        """
        return self.url is not None or self._read_file("run.json") is not None or self.stored_login is not None

    @property
    def has_crashed(self) -> bool:
        """Whether the state folder's coordinator ended without deleting its `run.json`; False with --url.

        Raise `CommandError` if the file cannot be read.
        """
        run = self._read_file("run.json") if self.url is None else None
        if run is None or not isinstance(run.get("pid"), int):
            return False
        try:
            os.kill(run["pid"], 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # the process runs, as another user
            return False
        return False

    @property
    def stored_login(self) -> dict[str, Any] | None:
        """Data of `cluster login`: URL, key and CA (PEM) of a remote coordinator; None without login.

        Raise `CommandError` if the file cannot be read.
        """
        return self._read_file(LOGIN_FILE)

    def _read_file(self, name: str) -> dict[str, Any] | None:
        try:
            content: object = json.loads((self.state / name).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            step = "check the owner and the mode of the file" if isinstance(error, OSError) else "delete the file"
            raise CommandError(1, f"{self.state / name} cannot be read: {error}: {step}") from None
        if not isinstance(content, dict) or not _FIELDS[name] <= content.keys():
            fields = " and ".join(sorted(_FIELDS[name]))
            raise CommandError(1, f"{self.state / name} has no {fields}: delete the file")
        return cast("dict[str, Any]", content)

    def select_coordinator(self) -> CoordinatorAddress:
        """Return the coordinator to use: the one at --url, else of the state folder, else of `cluster login`.

        A coordinator of the state folder that has crashed is skipped if there is a login. Raise `CommandError` if there
        is no coordinator, or if a key or a file of the state folder cannot be read. Raise `click.UsageError` for an
        invalid --url.
        """
        if self.url is not None:
            return CoordinatorAddress(
                parse_base_url(self.url), self.read_key(), self._get_stored_authority(parse_base_url(self.url))
            )
        run, login = self._read_file("run.json"), self.stored_login
        if run is not None and (login is None or not self.has_crashed):
            return CoordinatorAddress(str(run["url"]), str(run["secret"]), str(run.get("ca") or ""))
        if login is not None:
            return CoordinatorAddress(str(login["url"]), str(login["key"]), str(login.get("ca") or ""))
        raise CommandError(UNREACHABLE, self.explain_no_coordinator())

    def explain_no_coordinator(self) -> str:
        """Return the error message for a state folder without a known coordinator, with the next step."""
        from coordinator.client.member_client import get_coordinator_host, read_member_identity

        member = read_member_identity(self.state)
        if member is not None:
            host = get_coordinator_host(member)
            return (
                f"this Mac is a node, its coordinator runs on {host}: run this command there, or here after `cluster "
                f"login https://{host}:8080` (the `endpoint` of `cluster up`); `cluster status`, `nodes`, `models` and "
                "`top` need no login here"
            )
        return (
            f"no coordinator runs in {self.state}: start one with `cluster up`, or use another with "
            "`cluster login URL`, or with --url and --key-file"
        )

    def get_url_and_key(self) -> tuple[str, str]:
        """Return base URL (without path) and key of the coordinator to use.

        Raise `CommandError` if there is none, or if a file cannot be read; `click.UsageError` for an invalid --url.
        """
        reached = self.select_coordinator()
        return reached.url, reached.key

    def get_authority(self) -> str:
        """Return the stored CA (PEM) of the endpoint; empty if none is stored, for example without TLS.

        Raise `CommandError` if there is no coordinator to use, or if a file cannot be read. Raise `click.UsageError`
        for an invalid --url.
        """
        return self.select_coordinator().authority

    def _get_stored_authority(self, url: str) -> str:
        login = self.stored_login
        return str(login.get("ca") or "") if login is not None and login["url"] == url else ""

    def read_key(self) -> str:
        """Return the API key of --key-file, or the key of `cluster login` for --url.

        Raise `CommandError` if there is neither, or if a file cannot be read; `click.UsageError` for an invalid --url.
        """
        if self.key_file is None:
            login = self.stored_login
            if login is not None and self.url is not None and login["url"] == parse_base_url(self.url):
                return str(login["key"])
            raise CommandError(
                DENIED,
                "--url needs --key-file (or MACPOOL_KEY_FILE): a file with an admin key; "
                "`cluster login URL` stores both",
            )
        try:
            key = self.key_file.read_text().strip()
        except OSError as error:
            raise CommandError(DENIED, f"{self.key_file} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise CommandError(DENIED, f"{self.key_file} must contain one key and nothing else") from None
        if not (key.isascii() and key.isprintable()):  # the key would be no valid header
            raise CommandError(DENIED, f"{self.key_file} must contain one key and nothing else")
        return key

    def send_request(
        self, method: str, path: str, body: object = None, timeout: float = 30.0
    ) -> http.client.HTTPResponse:
        """Send a request to the coordinator and return the response, even with an error status.

        `body` is sent as JSON. `timeout` is in seconds. After a 401, the request is sent once more if the coordinator
        to use has changed, because a restart changes the key in `run.json`. Raise the errors of `select_coordinator`,
        and `CommandError` if there is no response.
        """
        reached = self.select_coordinator()
        response = send_request(reached, method, path, body, timeout)
        if response.status == 401 and (current := self.select_coordinator()) != reached:
            response.close()  # the coordinator started meanwhile, with another key in run.json
            response = send_request(current, method, path, body, timeout)
        return response

    def request_json(self, method: str, path: str, body: object = None, timeout: float = 30.0) -> dict[str, Any]:
        """Send a request and return the JSON of the response; an empty dict for an empty body. `timeout` is in seconds.

        On a node's machine without a known coordinator, `MEMBER_PATHS` are read with the node's certificate. Raise the
        errors of `select_coordinator`. Raise `CommandError` if the response is incomplete or not JSON, and with the
        server's message for an error status.
        """
        if method == "GET" and path in MEMBER_PATHS and not self.running:
            from coordinator.client.member_client import query_coordinator, read_member_identity

            member = read_member_identity(self.state)
            if member is not None:
                return query_coordinator(member, path)
        response, url = self.send_request(method, path, body, timeout), self.select_coordinator().url
        with convert_connection_errors(url, timeout):
            raw = response.read()
        if response.status >= 400:
            raise_for_status(response.status, raw)
        try:
            return json.loads(raw) if raw else {}
        except ValueError:
            text = f"{url} does not answer with JSON: use the `endpoint` of `cluster up`"
            raise CommandError(UNREACHABLE, text) from None

    def poll_json(self, path: str, restart_seconds: float = RESTART_SECONDS) -> dict[str, Any]:
        """Request a path for a command that waits, and return the JSON of the response.

        While the coordinator cannot be reached, repeat the request for `restart_seconds`, because the coordinator may
        be restarting. Raise the errors of `request_json`.
        """
        deadline, pause = time.monotonic() + restart_seconds, threading.Event()
        while True:
            try:
                return self.request_json("GET", path)
            except CommandError as error:
                if error.exit_code != UNREACHABLE or time.monotonic() >= deadline:
                    raise
            pause.wait(RESTART_POLL_SECONDS)

    def stream(self, path: str, timeout: float = 30.0) -> Iterator[bytes]:
        """Request a path and yield the body as it arrives. `timeout` is in seconds, for each read.

        Raise the errors of `send_request`. Raise `CommandError` if the connection ends before the body, and with the
        server's message for an error status.
        """
        response = self.send_request("GET", path, timeout=timeout)
        pieces = self.read_body(response, timeout)
        if response.status >= 400:
            raise_for_status(response.status, b"".join(pieces))
        yield from pieces

    def follow(self, path: str, timeout: float = FOLLOW_TIMEOUT_SECONDS) -> Iterator[bytes]:
        """Request a path whose body has no end, and yield the body as it arrives.

        `timeout` is in seconds, for each read. Raise the errors of `stream`. Raise `CommandError` when the coordinator
        ends the body. If the coordinator then refuses the key, the error has the coordinator's message.
        """
        yield from self.stream(path, timeout)
        self.request_json("GET", "/api/v1/version")
        text = "this log can no longer be read: check the node with `cluster nodes`, then repeat the command"
        raise CommandError(UNREACHABLE, text)

    def read_body(self, response: http.client.HTTPResponse, timeout: float) -> Iterator[bytes]:
        """Yield the body of a response as it arrives.

        `timeout`, that of the request in seconds, is used in error messages. Raise `CommandError` if the connection
        ends before the body. Raise the errors of `select_coordinator`.
        """
        return iterate_body(response, self.select_coordinator().url, timeout)

    def print_answer(self, answer: dict[str, Any], text: Callable[[dict[str, Any]], None]) -> None:
        """Print an answer: as JSON with `-o json`, otherwise by calling `text(answer)`."""
        if self.json:
            click.echo(json.dumps(answer))
        else:
            text(answer)


def raise_for_status(status: int, raw: bytes) -> NoReturn:
    """Raise `CommandError` for an error status, with the message and the memory numbers of the JSON body `raw`.

    With any other body, the message is the status and the first 200 bytes. Exit codes: `DENIED` for 401 and 403,
    `NOT_FOUND` for 404, `TIMED_OUT` for 504. `REFUSED` is for 409, 429, 503 and 507, and for 400 if the body contains
    `memory`. For any other status, the exit code is 1.
    """
    try:
        error = json.loads(raw)["error"]
        message = str(error["message"]) + _format_numbers(error.get("memory"))
    except (ValueError, KeyError, TypeError):
        message = f"HTTP {status}: {raw[:200].decode(errors='replace')}"
    code = {
        401: DENIED,
        403: DENIED,
        404: NOT_FOUND,
        409: REFUSED,
        429: REFUSED,
        503: REFUSED,
        507: REFUSED,
        504: TIMED_OUT,
    }.get(status, 1)
    raise CommandError(REFUSED if status == 400 and b"memory" in raw else code, message)


def _format_numbers(memory: dict[str, Any] | None) -> str:
    """Format the numbers of a refusal as a separate line."""
    if not memory:
        return ""
    from wire.units import show_size

    sizes = ("estimate", "headroom", "ceiling", "current", "reserved", "margin", "cap")
    return "\n(" + ", ".join(f"{size} {show_size(memory[size])}" for size in sizes) + ")"


def session_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command with --state, --url, --key-file and -o. The command gets an `ApiSession` as first argument."""
    return _with_session(command, ("text", "json"))


def wide_session_options(command: Callable[..., None]) -> Callable[..., None]:
    """Decorate a command with --state, --url, --key-file and -o, which also accepts `wide`.

    The command gets an `ApiSession` as first argument.
    """
    return _with_session(command, ("text", "wide", "json"))


def _with_session(command: Callable[..., None], forms: tuple[str, ...]) -> Callable[..., None]:
    def wrapped(state: Path | None, url: str | None, key_file: Path | None, output: str, **rest: object) -> None:
        command(ApiSession(state or get_default_state(), url, key_file, output), **rest)

    for option in (
        click.option("-o", "--output", type=click.Choice(forms), default="text", help="Output format."),
        click.option(
            "--key-file", envvar="MACPOOL_KEY_FILE", type=click.Path(path_type=Path), help="File with an API key."
        ),
        click.option("--url", envvar="MACPOOL_URL", help="URL of another coordinator, https://HOST:PORT."),
        click.option(
            "--state",
            envvar="MACPOOL_STATE",
            type=click.Path(path_type=Path),
            help="State folder. Its owner has admin rights.",
        ),
    ):
        wrapped = option(wrapped)
    return update_wrapper(wrapped, command)


MAX_UNFOLDED_COLUMN = 10
"""Maximum width, in characters, of a column that is never folded."""
UNLIMITED_COLUMNS = 10_000
"""Line width in characters for a file or a pipe, where lines do not wrap."""


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    alarming: Collection[str] = (),
    *,
    numbers: Collection[str] = (),
    fold: Collection[str] = (),
    full_width: bool = False,
) -> None:
    """Print a table with the header `columns`. Each row has one text per column.

    On a narrow terminal, the columns in `fold` wrap; by default, all columns wider than `MAX_UNFOLDED_COLUMN`
    characters. If the other columns alone are wider than the terminal, cells are cut and wrapping columns may vanish.
    With `full_width`, and outside a terminal, each row is one line. Cells whose text is in `alarming` are red. The
    columns in `numbers` are right-aligned.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    lines = [tuple(row) for row in rows]
    bound = sys.stdout.isatty() and not full_width
    console = Console(highlight=False) if bound else Console(highlight=False, width=UNLIMITED_COLUMNS, height=25)
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        long = max([len(column), *(len(line[number]) for line in lines)]) > MAX_UNFOLDED_COLUMN
        folds = column in fold if fold else long
        grid.add_column(column, no_wrap=not folds, overflow="fold", justify="right" if column in numbers else "left")
    for line in lines:
        grid.add_row(
            *(Text(cell, "bold red" if cell in alarming else "") for cell in line)
        )  # never markup: names come from other machines
    console.print(grid, soft_wrap=full_width)
