"""`cluster backup` and `cluster restore`: local only and without an API, because a backup file controls the cluster."""

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from coordinator.cli.commands.tokens_and_keys import format_minute
from coordinator.client.api_client import get_default_state
from coordinator.client.errors import DENIED, NOT_FOUND, REFUSED, CommandError
from wire.units import show_count, show_size

if TYPE_CHECKING:
    from coordinator.backup.restore import Restored

STATE = click.option(
    "--state", envvar="MACPOOL_STATE", type=click.Path(path_type=Path), help="State folder of the coordinator."
)
PASSPHRASE = click.option(
    "--passphrase-file", type=click.Path(path_type=Path), help="File whose first line is the passphrase; - reads stdin."
)
OUTPUT = click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Output format.")


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--artifacts", is_flag=True, help="Include the finished videos.")
@click.option("--encrypt", is_flag=True, help="Encrypt it with a passphrase; the command asks for it.")
@PASSPHRASE
@STATE
@OUTPUT
def backup(
    file: Path, artifacts: bool, encrypt: bool, passphrase_file: Path | None, state: Path | None, output: str
) -> None:
    """Write a backup of the cluster into FILE: authority, members, digests of keys, settings, video jobs.

    The coordinator may run meanwhile. FILE (mode 0600) is written completely or not at all, and replaces an older
    backup. A person who can read FILE controls the cluster: encrypt it, or protect it like a key.
    """
    from coordinator.backup.backup import BackupError, create_backup

    passphrase = _read_new_passphrase(passphrase_file) if encrypt or passphrase_file else None
    folder = state or get_default_state()
    try:
        result = create_backup(folder, file, artifacts=artifacts, passphrase=passphrase)
    except BackupError as error:
        raise CommandError(NOT_FOUND if "there is no cluster" in str(error) else 1, str(error)) from None
    summary = {
        "schema": 1,
        "file": str(result.file),
        "bytes": result.size,
        "encrypted": result.encrypted,
        **_summarize_manifest(result.manifest),
    }
    if output == "json":
        _print_json(summary)
        return
    click.echo(
        f"{result.file}: cluster {summary['name']} ({summary['cluster']}), {summary['files']} files, "
        f"{show_size(result.size)}"
    )
    if not artifacts and (folder / "videos").exists():
        click.echo("finished videos are not included: use --artifacts to include them")
    for path in result.manifest.outside:
        click.echo(f"{path} is named in the settings but not included: back it up separately")
    if not result.encrypted:
        click.secho(
            "the file is not encrypted and contains the cluster's key: protect it, or use --encrypt",
            fg="yellow",
            err=True,
        )


@click.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Verify the backup and print its contents; change nothing.")
@click.option("--replace", is_flag=True, help="Replace the existing cluster; its files are renamed and kept.")
@PASSPHRASE
@STATE
@OUTPUT
def restore(
    file: Path, check: bool, replace: bool, passphrase_file: Path | None, state: Path | None, output: str
) -> None:
    """Restore the cluster of a backup FILE into the state folder. This machine then becomes its coordinator.

    The backup is verified first and restored completely or not at all. The nodes connect to the restored coordinator.
    The former coordinator stops when one of its nodes connects to it again.
    """
    from coordinator.backup.restore import RestoreError
    from coordinator.backup.restore import inspect_backup as look_at
    from coordinator.backup.restore import restore as put_in_place
    from coordinator.state.store_errors import StateLockedError

    folder = state or get_default_state()
    passphrase = _read_needed_passphrase(file, passphrase_file)
    try:
        if check:
            _print_checked(file, _summarize_manifest(look_at(file, passphrase)), output)
            return
        done = put_in_place(file, folder, time.time(), passphrase=passphrase, replace=replace)
    except RestoreError as error:
        raise CommandError(REFUSED, str(error)) from None
    except StateLockedError as error:
        raise CommandError(REFUSED, str(error)) from None
    if output == "json":
        counts = {name: getattr(done.counts, name) for name in ("members", "keys", "tokens", "jobs")}
        _print_json(
            {
                "schema": 1,
                "state": str(folder),
                "generation": done.generation,
                **counts,
                "aside": str(done.aside or ""),
                "config": done.config,
                **_summarize_manifest(done.manifest),
            }
        )
        return
    _print_restored(folder, done)


def _print_restored(folder: Path, done: "Restored") -> None:
    manifest, counts = done.manifest, done.counts
    click.echo(f"cluster {manifest.name} ({manifest.cluster}), as of {format_minute(manifest.made)}, is in {folder}:")
    nouns = {"member": counts.members, "key": counts.keys, "join token": counts.tokens, "video job": counts.jobs}
    click.echo(", ".join(show_count(count, noun) for noun, count in nouns.items()))
    if done.config == "config.toml.restored":
        click.echo(f"settings: this machine's config.toml was kept; the backup's is next to it as {done.config}")
    if done.aside is not None:
        click.echo(f"the former files are in {done.aside}: delete them when they are no longer needed")
    for path in manifest.outside:
        click.echo(f"{path} is named in the settings but not in the backup: copy it here")
    click.echo("next: stop the coordinator on the other machine, if it runs, and start this one: `cluster up`")
    click.echo("      the nodes find it by their stored addresses and by Bonjour, and trust it as before")


def _print_checked(file: Path, summary: dict[str, Any], output: str) -> None:
    if output == "json":
        _print_json({"schema": 1, "file": str(file), "whole": True, **summary})
        return
    click.echo(
        f"{file} is valid: cluster {summary['name']} ({summary['cluster']}), made {format_minute(summary['made'])} "
        f"by macpool {summary['macpool']}, {summary['files']} files"
    )


def _summarize_manifest(manifest: Any) -> dict[str, Any]:
    return {
        "cluster": manifest.cluster,
        "name": manifest.name,
        "made": manifest.made,
        "macpool": manifest.macpool,
        "epoch": manifest.epoch,
        "files": len(manifest.members),
        "artifacts": manifest.artifacts,
    }


def _print_json(summary: dict[str, Any]) -> None:
    import json

    click.echo(json.dumps(summary))


def _read_new_passphrase(file: Path | None) -> bytes:
    """Read the passphrase from its file, or ask for it twice."""
    return _read_passphrase_file(file) if file is not None else _ask_passphrase(twice=True)


def _read_needed_passphrase(file: Path, passphrase_file: Path | None) -> bytes | None:
    """Return the passphrase of an encrypted backup; None if the file is not encrypted."""
    from coordinator.backup.encryption import MAGIC, is_encrypted

    try:
        with file.open("rb") as opened:
            needed = is_encrypted(opened.read(len(MAGIC)))
    except OSError as error:
        raise CommandError(NOT_FOUND, f"{file} cannot be read: {error.strerror}") from None
    if not needed:
        return None
    return _read_passphrase_file(passphrase_file) if passphrase_file is not None else _ask_passphrase(twice=False)


def _ask_passphrase(*, twice: bool) -> bytes:
    if not sys.stdin.isatty():
        raise CommandError(2, "there is no terminal to ask for the passphrase: use --passphrase-file FILE")
    passphrase = click.prompt("Passphrase", hide_input=True, confirmation_prompt=twice, err=True)
    return _check_passphrase(str(passphrase).encode())


def _read_passphrase_file(file: Path) -> bytes:
    try:
        line = sys.stdin.buffer.readline() if str(file) == "-" else file.open("rb").readline()
    except OSError as error:
        raise CommandError(DENIED, f"{file} cannot be read: {error.strerror}") from None
    return _check_passphrase(line.rstrip(b"\r\n"))


def _check_passphrase(passphrase: bytes) -> bytes:
    if not passphrase:
        raise CommandError(DENIED, "the passphrase is empty")
    return passphrase
