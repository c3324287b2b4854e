"""`cluster join` and `cluster leave`: both become the node's own process, which this package never imports."""

import os
import signal
import sys
from pathlib import Path
from typing import NoReturn, TextIO

import click

from coordinator.cli.session import NOT_FOUND, TIMED_OUT, Problem, default_state

LEAVE_SECONDS = 60.0


@click.command()
@click.argument("url", required=False)
@click.option("--token-file", type=click.File(), help="File with the join token; `-` reads it from standard input.")
@click.option("--token", hidden=True)
@click.option("--state", envvar="MACPOOL_STATE", type=click.Path(path_type=Path), help="State folder; made if missing.")
@click.option("--name", help="Friendly name of this machine in the pool.")
@click.option("--models", multiple=True, type=click.Path(path_type=Path), help="A folder of models; may be repeated.")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="A setting; see docs/settings.md.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Form of the ready line.")
def join(
    url: str | None,
    token_file: TextIO | None,
    token: str | None,
    state: Path | None,
    name: str | None,
    models: tuple[Path, ...],
    pairs: tuple[str, ...],
    output: str,
) -> None:
    """Join this machine to the cluster at URL and run its node until Ctrl-C.

    Without URL the coordinator is looked for by Bonjour. Without a token this machine shows a short code that a person
    approves on the coordinator. A machine that has joined before needs neither.
    """
    if token is not None:
        raise click.UsageError(
            "--token would show the token to everybody who lists the processes of this machine; write "
            "`echo TOKEN | cluster join URL --token-file -`, or name a file that holds it"
        )
    secret = token_file.readline() if token_file else ""
    arguments = ["--state", str(state or default_state()), "--output", output]
    if url:
        arguments += ["--url", url]
    for model in models:
        arguments += ["--models", str(model)]
    for pair in (*pairs, *([f"node.name={name}"] if name else [])):
        arguments += ["--set", pair]
    _become_node(arguments, secret)


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
@click.option("--force", is_flag=True, help="Also when the coordinator cannot be told: remove the node there, too.")
def leave(state: Path | None, force: bool) -> None:
    """Take this machine out of its cluster for good: running requests end, its certificate is revoked and removed."""
    folder = state or default_state()
    if not (folder / "node" / "identity" / "identity.json").exists():
        raise Problem(NOT_FOUND, f"there is no node in {folder}")
    process = _running(folder / "node" / "lock")
    if process is None:
        _become_node(["--state", str(folder), "--leave", *(["--force"] if force else [])], "")
    os.kill(process, signal.SIGUSR1)
    if not _wait(folder / "node" / "lock", LEAVE_SECONDS):
        raise Problem(TIMED_OUT, f"the node (process {process}) has not left within {LEAVE_SECONDS:.0f} s")
    click.echo("left the cluster")


def _running(lock: Path) -> int | None:
    """Give the process that holds the node's lock."""
    import fcntl

    try:
        with lock.open("r+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                return int(file.read())
    except FileNotFoundError:
        return None
    return None


def _wait(lock: Path, seconds: float) -> bool:
    """Wait until nobody holds the lock: an alarm ends the blocking wait."""
    import fcntl

    def late(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, late)
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
