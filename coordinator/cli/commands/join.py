"""`cluster join` and `cluster leave`, carried out by `node.run`, which this package never imports.

`join` replaces its process by `node.run`, as does `leave` without a running node. With a running node, `leave` sends a
signal to the node.
"""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, TextIO
from urllib.parse import urlsplit

import click

from coordinator.cli.group import confirm, yes_option
from coordinator.client.api_client import get_default_state
from coordinator.client.errors import NOT_FOUND, TIMED_OUT, CommandError

LEAVE_TIMEOUT_SECONDS = 60.0
MAX_TOKEN_CHARACTERS = 1000
"""Maximum characters that are read from the first line of `--token-file`.

The token is written into a pipe before the pipe has a reader. A longer text could block there.
"""
CLUSTER_PORT = 8081
"""Default port of `cluster up` for nodes (`--cluster-listen`)."""


@click.command()
@click.argument("url", required=False)
@click.option("--token-file", type=click.File(), help="File with the join token; `-` reads it from standard input.")
@click.option("--token", hidden=True)
@click.option(
    "--state", envvar="MACPOOL_STATE", type=click.Path(path_type=Path), help="State folder; created if missing."
)
@click.option("--name", help="Name of this machine in the pool.")
@click.option("--models", multiple=True, type=click.Path(path_type=Path), help="A folder of models; may be repeated.")
@click.option(
    "--allow-missing-folders",
    is_flag=True,
    help="Start even if a model folder is missing, for example on a disconnected disk. The service uses this option.",
)
@click.option(
    "--joined-only",
    is_flag=True,
    help="Exit immediately with code 0 if this machine is not in a cluster. The service uses this option.",
)
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="A setting; see docs/settings.md.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Format of the ready line.")
def join(
    url: str | None,
    token_file: TextIO | None,
    token: str | None,
    state: Path | None,
    name: str | None,
    models: tuple[Path, ...],
    allow_missing_folders: bool,
    joined_only: bool,
    pairs: tuple[str, ...],
    output: str,
) -> None:
    """Join this machine to the cluster at URL and run its node until Ctrl-C.

    Without URL, the node finds the coordinator by Bonjour. Without a token, this machine shows a six-digit code to
    approve on the coordinator. A machine that has joined before needs neither.
    """
    if token is not None:
        raise click.UsageError(
            "--token would show the token in the list of processes; use "
            "`echo TOKEN | cluster join URL --token-file -`, or a file that contains it"
        )
    if url and url.partition("://")[0] in ("http", "https"):
        try:
            host = urlsplit(url).hostname or "HOST"
        except ValueError:
            host = "HOST"
        raise click.UsageError(
            f"{url} is the endpoint for clients; machines join at the cluster port: run `cluster join "
            f"macpool://{host}:{CLUSTER_PORT} --token-file FILE`. `cluster token create` on the coordinator prints the "
            "complete command, with a token"
        )
    try:
        secret = token_file.readline(MAX_TOKEN_CHARACTERS) if token_file else ""
    except UnicodeDecodeError:
        raise click.UsageError("the file of --token-file is no text: it must contain a join token") from None
    folder = state or get_default_state()
    if joined_only and not _get_identity_file(folder).exists():
        click.echo(f"{folder} is in no cluster: there is no node to start", err=True)
        return
    arguments = ["--state", str(folder), "--output", output]
    if url:
        arguments += ["--url", url]
    for model in models:
        arguments += ["--models", str(model)]
    arguments += ["--allow-missing-folders"] * allow_missing_folders
    for pair in (*pairs, *([f"node.name={name}"] if name else [])):
        arguments += ["--set", pair]
    _become_node(arguments, secret)


def _get_identity_file(state: Path) -> Path:
    """Return the file of the node's identity, which exists while the machine is in a cluster."""
    return state / "node" / "identity" / "identity.json"


def _become_node(arguments: list[str], secret: str) -> NoReturn:
    """Replace this process, so that signals and exit codes are the node's own. The token goes through a pipe."""
    if secret:
        read, write = os.pipe()
        os.write(write, secret.encode())
        os.close(write)
        os.set_inheritable(read, True)
        arguments = [*arguments, "--token-fd", str(read)]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-P", "-m", "node.run", *arguments])  # noqa: S606  no shell is wanted


@click.command()
@click.option("--state", envvar="MACPOOL_STATE", type=click.Path(path_type=Path), help="State folder of the node.")
@click.option("--force", is_flag=True, help="Leave without notifying the coordinator. A running node ignores this.")
@yes_option
def leave(state: Path | None, force: bool, yes: bool) -> None:
    """Leave the cluster: end running requests, notify the coordinator, and delete this machine's certificate.

    The coordinator revokes the certificate when it is notified. A running node leaves even if the coordinator cannot be
    reached. In that case, and after --force, run `cluster node remove NAME` on the coordinator.
    """
    folder = state or get_default_state()
    identity, lock = _get_identity_file(folder), folder / "node" / "lock"
    if not identity.exists():
        raise CommandError(NOT_FOUND, f"there is no node in {folder}")
    confirm("Remove this machine from its cluster? It needs a new token or code to join again.", yes=yes)
    process = _find_lock_holder(lock)
    if process is not None:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGUSR1)
        if not _wait_for_lock(lock, LEAVE_TIMEOUT_SECONDS):
            raise CommandError(
                TIMED_OUT, f"the node (process {process}) did not leave within {LEAVE_TIMEOUT_SECONDS:.0f} s"
            )
        if not identity.exists():
            click.echo("left the cluster")
            return
        click.echo(f"the node (process {process}) ended before it left: leaving without that process", err=True)
    _become_node(["--state", str(folder), "--leave", *(["--force"] if force else [])], "")


def _find_lock_holder(lock: Path) -> int | None:
    """Return the id of the process that holds the node's lock; None if no process holds it.

    Raise `CommandError` if that process has not written its id yet.
    """
    import fcntl

    try:
        with lock.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                process = file.read().strip()
                if not process.isdecimal():
                    raise CommandError(
                        1, f"the node in {lock.parent.parent} has just started: run `cluster leave` again"
                    ) from None
                return int(process)
    except FileNotFoundError:
        return None
    return None


def _wait_for_lock(lock: Path, seconds: float) -> bool:
    """Wait at most `seconds` until the lock is free, and return whether it is. An alarm ends the blocking wait."""
    import fcntl

    def raise_timeout(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
    except TimeoutError:
        return False
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    return True
