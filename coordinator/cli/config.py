"""`cluster config`: the settings in force with their origins, and a file of settings looked through before a start.

Both halves are shown, the coordinator's and the node's; the node's own process reads its half, because this package
knows nothing of it.
"""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from coordinator.cli.group import Group
from coordinator.cli.session import NOT_FOUND, UNREACHABLE, Problem, Session, default_state, table

CHILD_SECONDS = 20.0
ASK_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Settings:
    """Every setting in force as rows (key, value, origin, description), and everything that is wrong."""

    rows: tuple[dict[str, Any], ...]
    wrong: tuple[Any, ...]
    """Wrong of coordinator.configuration."""


@dataclass(frozen=True, slots=True)
class Running:
    """What the processes of a state folder use now: which of them run ("coordinator", "node"), their settings as rows,
    and those that their file tells differently by now (wire.settings.Drift, as dictionaries)."""

    who: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]
    drift: tuple[dict[str, Any], ...]

    @property
    def given(self) -> list[dict[str, Any]]:
        """Give the rows of what no file and no default says: flags and environment of the processes."""
        from wire.settings import GIVEN

        return [row for row in self.rows if row["origin"] in GIVEN]


@click.group(cls=Group)
def config() -> None:
    """Show the settings with their origins, or check a settings file."""


@config.command()
@click.argument("prefix", required=False, default="")
@click.option("--state", envvar="MACPOOL_STATE", type=click.Path(path_type=Path), help="State folder.")
@click.option("--set", "pairs", multiple=True, metavar="KEY=VALUE", help="As a start would be given it.")
@click.option("--changed", is_flag=True, help="Show only settings that differ from the default.")
@click.option("--running", is_flag=True, help="What the coordinator and the node that run here use, with their flags.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Output format.")
def show(prefix: str, state: Path | None, pairs: tuple[str, ...], changed: bool, running: bool, output: str) -> None:
    """Show every setting that a start would use now.

    Each has its value and where that comes from; PREFIX narrows them down. Origins are default, the file, environment
    and --set. Addresses that could hold a secret are shown without it.
    Exit code 2 when a setting is wrong: a start would be refused; 3 with --running when nothing runs here.
    """
    folder = state or default_state()
    if running and pairs:
        raise click.UsageError("--running and --set exclude each other: what runs was given its flags at its start")
    found = _in_force(folder) if running else look(folder, folder / "config.toml", os.environ, pairs)
    rows = [row for row in found.rows if row["key"].startswith(prefix) and not (changed and row["origin"] == "default")]
    if prefix and not [row for row in found.rows if row["key"].startswith(prefix)]:
        raise Problem(NOT_FOUND, f"there is no setting {prefix}: docs/settings.md lists them")
    if output == "json":
        wrong = [asdict(one) for one in found.wrong]
        click.echo(json.dumps({"schema": 1, "settings": rows, "wrong": wrong}, default=str))
    else:
        table(("KEY", "VALUE", "ORIGIN"), [(row["key"], _value(row["value"]), row["origin"]) for row in rows])
    _refuse(found.wrong)


@config.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option("--state", envvar="MACPOOL_STATE", type=click.Path(path_type=Path), help="State folder.")
@click.option("-o", "--output", type=click.Choice(["text", "json"]), default="text", help="Output format.")
def check(file: Path | None, state: Path | None, output: str) -> None:
    """Check a settings FILE.

    The default is STATE/config.toml together with the settings of the environment. Each error is printed with its line,
    its key and the expected value. Exit code 0: valid; 2: not valid; 5: there is no such file.
    """
    folder = state or default_state()
    place = file or folder / "config.toml"
    if not place.is_file():
        if file is not None:
            raise Problem(NOT_FOUND, f"there is no file {place}")
        if output == "text":
            click.echo(f"there is no {place}: every setting has its default")
    found = look(folder, place, os.environ if file is None else {}, ())
    if output == "json":
        click.echo(json.dumps({"schema": 1, "file": str(place), "wrong": [asdict(one) for one in found.wrong]}))
    _refuse(found.wrong)
    if output == "text":
        changed = sum(row["origin"] != "default" for row in found.rows)
        click.echo(f"{place}: nothing is wrong, {changed} settings are not the default")


def _refuse(wrong: Sequence[Any]) -> None:
    if wrong:
        raise Problem(2, "\n".join(one.told() for one in wrong))


def _value(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return json.dumps(value)
    return str(value) if value != "" else '""'


def _in_force(folder: Path) -> Settings:
    found = in_force(Session(folder, None, None, "json"), _node(folder, folder / "config.toml", os.environ, ()))
    if not found.who:
        raise Problem(
            UNREACHABLE, f"neither a coordinator nor a node runs in {folder}: start one, or leave out --running"
        )
    return Settings(found.rows, ())


def in_force(session: Session, node: Mapping[str, Any]) -> Running:
    """Ask the coordinator that runs in the state folder for its settings, and take the node's from what `node.examine`
    told. What cannot be asked does not run."""
    told: dict[str, list[dict[str, Any]]] | None = node.get("running")
    halves = {} if told is None else {"node": told}
    ours = _coordinator(session)
    if ours is not None:
        halves = {"coordinator": {"settings": ours, "drift": _drift(session.state, ours)}, **halves}
    rows = tuple(row for half in halves.values() for row in half["settings"])
    return Running(tuple(halves), rows, tuple(one for half in halves.values() for one in half["drift"]))


def _coordinator(session: Session) -> list[dict[str, Any]] | None:
    from coordinator.configuration import rows_shown

    try:
        if session.url is not None or not session.running:
            return None
        rows = session.call("GET", "/api/v1/settings", timeout=ASK_SECONDS)["settings"]
    except (Problem, OSError, ValueError, KeyError):
        return None
    return list(rows_shown(rows))  # once more: an older coordinator shows all


def _drift(state: Path, ours: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Compare with the file, but for addresses, which are hidden; of a file that is wrong nothing is said here."""
    from coordinator.configuration import ADDRESSES
    from coordinator.settings import OTHERS, CoordinatorSettings
    from wire.settings import drifted, from_tree

    file = state / "config.toml"
    try:
        tree = from_tree(tomllib.loads(file.read_text()) if file.exists() else {})
        return [asdict(one) for one in drifted([row for row in ours if row["key"] not in ADDRESSES],
                                               CoordinatorSettings, tree, OTHERS)]  # fmt: skip
    except (OSError, ValueError):
        return []


def look(
    state: Path, file: Path, environ: Mapping[str, str], pairs: Sequence[str], node: Mapping[str, Any] | None = None
) -> Settings:
    """Read all settings of both halves as a start would; `node` is the node's half where it was read already."""
    from coordinator.configuration import Wrong, located, rows_shown, syntax
    from coordinator.settings import OTHERS, CoordinatorSettings
    from wire.settings import (
        Fault,
        SettingsError,
        describe,
        explained,
        faults,
        from_environment,
        from_pairs,
        from_tree,
        resolve,
    )  # fmt: skip

    try:
        text = file.read_text() if file.exists() else ""
        tree = from_tree(tomllib.loads(text))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        defaults = [{"key": one.key, "value": one.default, "origin": "default", "description": one.description}
                    for one in describe(CoordinatorSettings)]  # fmt: skip
        return Settings(tuple(defaults), (syntax(str(file), str(error)),))
    try:
        layers = [(str(file), tree), ("environment", from_environment(environ)), ("--set", from_pairs(pairs))]
    except SettingsError as error:
        raise Problem(2, str(error)) from None
    node = node or _node(state, file, environ, pairs)
    wrong: list[Wrong] = []
    for origin, flat in layers:
        found = faults(CoordinatorSettings, flat, OTHERS)
        found += [Fault(**one) for one in node["faults"] if one["key"] in flat and one["key"].split(".")[0] in OTHERS]
        wrong += located(origin, found, text if origin == str(file) else "")
    if node["error"] and not wrong:
        wrong.append(Wrong(str(file), 0, "", node["error"]))
    bad = {one.key for one in wrong}
    right = [(origin, {key: flat[key] for key in flat if key not in bad}) for origin, flat in layers]
    rows = rows_shown(explained(resolve(CoordinatorSettings, right, OTHERS)))
    return Settings(rows + tuple(node["settings"]), tuple(wrong))


def _node(state: Path, file: Path, environ: Mapping[str, str], pairs: Sequence[str]) -> dict[str, Any]:
    """Let the node's own module read its half."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "node.examine",
        "--settings-only",
        "--state",
        str(state),
        "--file",
        str(file),
    ]
    command += [item for pair in pairs for item in ("--set", pair)]
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MACPOOL_")}
    ours = {name: value for name, value in environ.items() if name.startswith("MACPOOL_")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_SECONDS, env={**plain, **ours},
                              stdin=subprocess.DEVNULL, check=False)  # fmt: skip
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise Problem(1, f"the node's settings cannot be read: {error}") from None
