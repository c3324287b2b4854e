"""`cluster login` and `cluster logout`: store URL, key and authority of a remote coordinator for later commands."""

import json
import sys
from pathlib import Path

import click

from coordinator.cli.commands.clients.trust_ca import fetch_confirmed_authority
from coordinator.client.api_client import LOGIN_FILE, ApiSession, get_default_state
from coordinator.client.connection import CoordinatorAddress, parse_base_url, send_request
from coordinator.client.errors import DENIED, REFUSED, UNREACHABLE, CommandError


@click.command()
@click.argument("url")
@click.option(
    "--key-file",
    envvar="MACPOOL_KEY_FILE",
    type=click.Path(path_type=Path),
    help="File with an API key; `-` reads it from standard input. Without it, the command asks for the key.",
)
@click.option(
    "--fingerprint",
    help="Fingerprint of the authority, from the output of `cluster up`. Without it, the command asks you to compare.",
)
@click.option("--state", envvar="MACPOOL_STATE", type=click.Path(path_type=Path), help="State folder for the login.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Output format.")
def login(url: str, key_file: Path | None, fingerprint: str | None, state: Path | None, output: str) -> None:
    """Store URL, key and authority of the coordinator at URL for later commands, in STATE/login.json (mode 0600).

    Later commands without --url use this login, unless a coordinator runs in the state folder. A key with the scope
    `admin` allows every command. The scope `metrics` allows commands such as `status` and `top`, the scope `infer`
    commands such as `chat` and `models`. The key is never an argument.
    """
    folder, base = state or get_default_state(), parse_base_url(url)
    if (folder / "run.json").exists() and not ApiSession(folder, None, None, output).has_crashed:
        raise CommandError(
            REFUSED,
            f"a coordinator runs in {folder}, and commands use it: run `cluster login` on "
            "another machine, or with another --state",
        )
    reached = CoordinatorAddress(base, _read_key(key_file), _confirm_authority(base, fingerprint))
    _check_key(reached)
    _store_login(folder, reached)
    answer = {"schema": 1, "url": base, "file": str(folder / LOGIN_FILE)}
    ApiSession(folder, None, None, output).print_answer(
        answer, lambda _: click.echo(f"logged in to {base}; commands use it until `cluster logout`")
    )


@click.command()
@click.option("--state", envvar="MACPOOL_STATE", type=click.Path(path_type=Path), help="State folder.")
def logout(state: Path | None) -> None:
    """Delete the login that `cluster login` stored. The key stays valid."""
    file = (state or get_default_state()) / LOGIN_FILE
    if not file.exists():
        click.echo("not logged in")
        return
    file.unlink()
    click.echo("logged out")


def _confirm_authority(base: str, fingerprint: str | None) -> str:
    """Return the confirmed authority (PEM) of an HTTPS endpoint that has its own; empty otherwise."""
    if base.startswith("https://"):
        return fetch_confirmed_authority(base, fingerprint)
    if fingerprint is not None:
        raise click.UsageError(f"{base} is not an HTTPS endpoint and has no authority: omit --fingerprint")
    return ""


def _read_key(file: Path | None) -> str:
    if file is None and sys.stdin.isatty():
        text = str(click.prompt("API key", hide_input=True, err=True))
    elif file is None:
        raise click.UsageError("there is no terminal to ask for the key: use --key-file FILE, or `-` for a pipe")
    else:
        try:
            text = sys.stdin.readline() if str(file) == "-" else file.read_text()
        except OSError as error:
            raise CommandError(DENIED, f"{file} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise CommandError(DENIED, f"{file} is no text: it must contain an API key") from None
    key = text.strip()
    if not key.startswith("mp_") or not key.isascii() or any(letter.isspace() for letter in key):
        raise CommandError(
            DENIED, "that is not an API key: a key begins with mp_; `cluster key create NAME` creates one"
        )
    return key


def _check_key(reached: CoordinatorAddress) -> None:
    """Check that the coordinator accepts the key. Raise `CommandError` if it does not, or does not answer."""
    status = send_request(reached, "GET", "/v1/models", timeout=10.0).status
    if status == 401:
        raise CommandError(DENIED, f"{reached.url} refuses this key: it may be revoked, expired, or of another pool")
    if status not in (200, 403):  # 403: the key is known, its scope is another
        raise CommandError(
            UNREACHABLE, f"{reached.url} answers with status {status}: check that it is the endpoint of a coordinator"
        )


def _store_login(folder: Path, reached: CoordinatorAddress) -> None:
    """Write the login where `ApiSession.stored_login` reads it."""
    from host.private_files import create_private_folder, write_private

    login = {"url": reached.url, "key": reached.key, "ca": reached.authority}
    try:
        write_private(create_private_folder(folder) / LOGIN_FILE, json.dumps(login).encode())
    except OSError as error:
        raise CommandError(1, f"{folder / LOGIN_FILE} cannot be written: {error.strerror}") from None
