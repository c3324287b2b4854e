"""What the verbs share: which coordinator, with which key, and how answers are printed."""

import http.client
import json
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit

import click

from coordinator.cli.harmless import harmless

if TYPE_CHECKING:
    import ssl

UNREACHABLE, DENIED, NOT_FOUND, REFUSED, TIMED_OUT, PROTOCOL, PIN, BLOCKED = 3, 4, 5, 6, 7, 8, 9, 10
"""Exit codes; the whole list is in `cluster --help`."""


class Problem(click.ClickException):
    """A failure with its exit code and, in its text, the next step."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(harmless(message))
        self.exit_code = code  # pyright: ignore[reportAttributeAccessIssue]  click reads it from the instance


def default_state() -> Path:
    """Give the state folder that is used when none is named."""
    import platformdirs

    return Path(platformdirs.user_data_dir("macpool", appauthor=False))


@dataclass(frozen=True, slots=True)
class Session:
    """One coordinator as this command reaches it, and the wanted form of output."""

    state: Path
    url: str | None
    key_file: Path | None
    output: str

    @property
    def json(self) -> bool:
        """Whether the answer is for a program."""
        return self.output == "json"

    @property
    def running(self) -> bool:
        """Whether a coordinator can be asked: one was named, or one runs in the state folder."""
        return self.url is not None or self._run_file is not None

    @property
    def _run_file(self) -> dict[str, Any] | None:
        try:
            return json.loads((self.state / "run.json").read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise Problem(1, f"{self.state / 'run.json'} cannot be read: {error}") from None

    def target(self) -> tuple[str, str]:
        """Give base URL (no path) and key. Problem when neither the state folder nor the options say."""
        if self.url is not None:
            return self.url.rstrip("/").removesuffix("/v1"), self._key()
        run = self._run_file
        if run is None:
            raise Problem(
                UNREACHABLE,
                f"no coordinator runs in {self.state}: start it with `cluster up`, or name another with --url and "
                "--key-file",
            )
        return str(run["url"]), str(run["secret"])

    def authority(self) -> str:
        """Give the authority (PEM) behind the endpoint of a coordinator on this machine; empty where the system knows
        it, or there is no TLS."""
        run = None if self.url is not None else self._run_file
        return str(run.get("ca") or "") if run is not None else ""

    def _trust(self) -> "ssl.SSLContext":
        """Give whom this command trusts: what the system does, and the authority of a coordinator on this machine."""
        import ssl

        context = ssl.create_default_context()
        authority = self.authority()
        if authority:
            context.load_verify_locations(cadata=authority)
        return context

    def _key(self) -> str:
        if self.key_file is None:
            raise Problem(DENIED, "--url needs --key-file (or MACPOOL_KEY_FILE): a file that holds an admin key")
        try:
            return self.key_file.read_text().strip()
        except OSError as error:
            raise Problem(DENIED, f"the key file cannot be read: {error}") from None

    def request(self, method: str, path: str, body: object = None, timeout: float = 30.0) -> http.client.HTTPResponse:
        """Send a request and give the response, whatever its status. Problem when nobody answers."""
        base, key = self.target()
        parts = urlsplit(base)
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "https":
            connection = http.client.HTTPSConnection(host, port, timeout=timeout, context=self._trust())
        else:
            connection = http.client.HTTPConnection(host, port, timeout=timeout)
        headers = {"Authorization": f"Bearer {key}"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            return connection.getresponse()
        except TimeoutError:
            raise Problem(TIMED_OUT, f"{base} did not answer within {timeout:.0f} s") from None
        except OSError as error:
            raise Problem(*unreached(base, error)) from None

    def call(self, method: str, path: str, body: object = None, timeout: float = 30.0) -> dict[str, Any]:
        """Send a request and give its JSON. Problem with the server's own words for every error status."""
        response = self.request(method, path, body, timeout)
        raw = response.read()
        if response.status >= 400:
            raise_for(response.status, raw)
        return json.loads(raw) if raw else {}

    def show(self, answer: dict[str, Any], text: Callable[[dict[str, Any]], None]) -> None:
        """Print an answer as JSON or through `text`."""
        if self.json:
            click.echo(json.dumps(answer))
        else:
            text(answer)


def unreached(base: str, error: OSError) -> tuple[int, str]:
    """Give exit code and text for a connection that failed; errno 65 on macOS is privacy, not the network."""
    if sys.platform == "darwin" and error.errno == 65:
        return BLOCKED, (
            f"macOS blocks this program from reaching {base} (local network privacy): run it from Terminal, or allow "
            "it under System Settings > Privacy & Security > Local Network"
        )
    if "certificate verify failed" in str(error):
        return PIN, (
            f"the certificate of {base} is not trusted by this machine: `cluster trust-ca {base}` shows the authority "
            "behind it, and trusts it where its fingerprint is that of the coordinator"
        )
    return UNREACHABLE, f"{base} cannot be reached: {error.strerror or error}"


def raise_for(status: int, raw: bytes) -> NoReturn:
    """Turn an error body into a Problem."""
    try:
        error = json.loads(raw)["error"]
        message = str(error["message"]) + _numbers(error.get("memory"))
    except (ValueError, KeyError, TypeError):
        message = f"HTTP {status}: {raw[:200].decode(errors='replace')}"
    code = {
        401: DENIED, 403: DENIED, 404: NOT_FOUND, 409: REFUSED, 429: REFUSED, 503: REFUSED, 504: TIMED_OUT,
    }.get(status, 1)  # fmt: skip
    raise Problem(REFUSED if status == 400 and b"memory" in raw else code, message)


def _numbers(memory: dict[str, Any] | None) -> str:
    """Write the arithmetic of a refusal on a line of its own."""
    if not memory:
        return ""
    from wire.units import show_size

    sizes = ("estimate", "headroom", "ceiling", "current", "reserved", "margin", "cap")
    return "\n(" + ", ".join(f"{size} {show_size(memory[size])}" for size in sizes) + ")"


def options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command --state, --url, --key-file and -o, and a Session as its first argument."""

    def wrapped(state: Path | None, url: str | None, key_file: Path | None, output: str, **rest: object) -> None:
        command(Session(state or default_state(), url, key_file, output), **rest)

    for option in (
        click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Form of the answer."),
        click.option("--key-file", envvar="MACPOOL_KEY_FILE", type=click.Path(path_type=Path), help="File with a key."),
        click.option("--url", envvar="MACPOOL_URL", help="Another coordinator, http://HOST:PORT."),
        click.option(
            "--state", envvar="MACPOOL_STATE", type=click.Path(path_type=Path), help="State folder; its owner is admin."
        ),
    ):
        wrapped = option(wrapped)
    return update_wrapper(wrapped, command)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], alarming: Collection[str] = ()) -> None:
    """Print a table; plain text when the output is no terminal. Cells with one of the `alarming` texts are red."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        grid.add_column(column, no_wrap=True)
    for row in rows:
        grid.add_row(
            *(Text(cell, "bold red" if cell in alarming else "") for cell in row)
        )  # never markup: names come from other machines
    console.print(grid)
