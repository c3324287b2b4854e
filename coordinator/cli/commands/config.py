"""`cluster config`: show the settings with their origins, or check a settings file."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from coordinator.cli.group import CommandGroup
from coordinator.client.api_client import ApiSession, get_default_state, print_table
from coordinator.client.config_inspect import (
    SettingsReport,
    inspect_settings,
    read_node_settings,
    read_running_settings,
)
from coordinator.client.errors import NOT_FOUND, UNREACHABLE, CommandError


@click.group(cls=CommandGroup)
def config() -> None:
    """Show the settings with their origins, or check a settings file."""


@config.command()
@click.argument("prefix", required=False, default="")
@click.option("--state", envvar="MACPOOL_STATE", type=click.Path(path_type=Path), help="State folder.")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="A setting, as for `cluster up`.")
@click.option("--changed", is_flag=True, help="Show only settings that differ from the default.")
@click.option("--running", is_flag=True, help="Show the settings in use by the coordinator and the node that run here.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Output format.")
def show(prefix: str, state: Path | None, pairs: tuple[str, ...], changed: bool, running: bool, output: str) -> None:
    """Show every setting that the next start would use.

    Each setting has its value and origin: default, the file, environment or --set. PREFIX limits the output. Secrets in
    URLs are hidden. --running and --set exclude each other.

    Exit codes: 2 a setting is wrong and a start would fail; 3 with --running, no process runs here; 5 no setting has
    PREFIX.
    """
    folder = state or get_default_state()
    if running and pairs:
        raise click.UsageError(
            "--running and --set exclude each other: running processes have the flags of their start"
        )
    report = (
        _read_running_report(folder) if running else inspect_settings(folder, folder / "config.toml", os.environ, pairs)
    )
    rows = [
        row for row in report.rows if row["key"].startswith(prefix) and not (changed and row["origin"] == "default")
    ]
    if prefix and not [row for row in report.rows if row["key"].startswith(prefix)]:
        raise CommandError(NOT_FOUND, f"there is no setting {prefix}: docs/settings.md lists them")
    if output == "json":
        wrong = [asdict(fault) for fault in report.faults]
        click.echo(json.dumps({"schema": 1, "settings": rows, "wrong": wrong}, default=str))
    else:
        print_table(
            ("KEY", "VALUE", "ORIGIN"), [(row["key"], _format_value(row["value"]), row["origin"]) for row in rows]
        )
    _raise_faults(report.faults)


@config.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--state", envvar="MACPOOL_STATE", type=click.Path(path_type=Path), help="State folder.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Output format.")
def check(file: Path | None, state: Path | None, output: str) -> None:
    """Check a settings FILE.

    The default is STATE/config.toml together with the settings of the environment, and is also compared with the memory
    of this machine. Each error is printed with its line, its key and the expected value. Exit code 0: valid; 2: not
    valid; 5: FILE does not exist.
    """
    folder = state or get_default_state()
    place = file or folder / "config.toml"
    if not place.is_file():
        if file is not None:
            raise CommandError(NOT_FOUND, f"there is no file {place}")
        if output == "text":
            click.echo(f"there is no {place}: every setting has its default")
    own = file is None
    report = inspect_settings(folder, place, os.environ if own else {}, (), on_this_machine=own)
    if output == "json":
        click.echo(json.dumps({"schema": 1, "file": str(place), "wrong": [asdict(fault) for fault in report.faults]}))
    _raise_faults(report.faults)
    if output == "text":
        changed = sum(row["origin"] != "default" for row in report.rows)
        click.echo(f"{place}: valid; settings that are not the default: {changed}")


def _raise_faults(wrong: Sequence[Any]) -> None:
    if wrong:
        raise CommandError(2, "\n".join(fault.render() for fault in wrong))


def _format_value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return json.dumps(value)
    return str(value) if value != "" else '""'


def _read_running_report(folder: Path) -> SettingsReport:
    report = read_running_settings(
        ApiSession(folder, None, None, "json"), read_node_settings(folder, folder / "config.toml", os.environ, ())
    )
    if not report.roles:
        raise CommandError(
            UNREACHABLE, f"neither a coordinator nor a node runs in {folder}: start one, or omit --running"
        )
    return SettingsReport(report.rows, ())
