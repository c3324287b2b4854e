"""Settings of a state folder: those that the next start would use, and those of the running processes.

A child process reads the settings of the node (`node.inspect.report`), because the coordinator does not import the
node.
"""

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coordinator.client.api_client import ApiSession
from coordinator.client.errors import CommandError

if TYPE_CHECKING:
    from host.settings_loader import InvalidSetting

CHILD_TIMEOUT_SECONDS = 20.0
"""Maximum duration of the process that reads the node's settings, in seconds."""
WEBHOOK = "alerts.webhook_url"
ANSWER_TIMEOUT_SECONDS = 5.0
"""Maximum wait for the settings of the running coordinator, in seconds."""


@dataclass(frozen=True, slots=True)
class SettingsReport:
    """Settings that the next start would use, and their faults."""

    rows: tuple[dict[str, Any], ...]
    """Every setting as a row: key, value, origin, description. An invalid value is ignored, as if it were not given.

    If the file cannot be parsed, the rows are the defaults of the coordinator's settings.
    """
    faults: tuple[Any, ...]
    """Faults of the settings, each a `coordinator.state.config_file.ConfigFault`."""


@dataclass(frozen=True, slots=True)
class RunningProcesses:
    """Settings in use by the processes of a state folder."""

    roles: tuple[str, ...]
    """Names of the running processes: `coordinator`, `node` or both; empty if none runs."""
    rows: tuple[dict[str, Any], ...]
    """Settings of the running processes as rows: key, value, origin, description."""
    drifts: tuple[dict[str, Any], ...]
    """Settings whose value in the file has changed since the start (`host.settings_loader.SettingDrift` as
    dictionaries)."""

    @property
    def overrides(self) -> list[dict[str, Any]]:
        """Rows of the settings that come from flags or the environment of the processes, not from files or defaults."""
        from host.settings_loader import GIVEN

        return [row for row in self.rows if row["origin"] in GIVEN]


def read_running_settings(session: ApiSession, node: Mapping[str, Any]) -> RunningProcesses:
    """Return the settings of the running coordinator and node of a state folder.

    `node` is the report of `node.inspect.report`. A process that does not answer is treated as not running. With --url,
    the coordinator is omitted, because the URL may be that of another machine.
    """
    running: dict[str, list[dict[str, Any]]] | None = node.get("running")
    halves = {} if running is None else {"node": running}
    ours = _read_coordinator_settings(session)
    if ours is not None:
        halves = {"coordinator": {"settings": ours, "drift": _find_drifts(session.state, ours)}, **halves}
    rows = tuple(row for half in halves.values() for row in half["settings"])
    return RunningProcesses(tuple(halves), rows, tuple(change for half in halves.values() for change in half["drift"]))


def _read_coordinator_settings(session: ApiSession) -> list[dict[str, Any]] | None:
    from coordinator.state.config_file import redact_rows

    try:
        if session.url is not None or not session.running:
            return None
        rows = session.request_json("GET", "/api/v1/settings", timeout=ANSWER_TIMEOUT_SECONDS)["settings"]
    except (CommandError, OSError, ValueError, KeyError):
        return None
    return list(redact_rows(rows))  # redact again: an older coordinator returns secrets


def _find_drifts(state: Path, ours: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the settings that differ from the file, except addresses; an empty list if the file is invalid."""
    from coordinator.state.config_file import URL_SETTINGS
    from coordinator.state.settings import NODE_SECTIONS, CoordinatorSettings
    from host.settings_loader import find_changed_settings, from_tree

    file = state / "config.toml"
    try:
        tree = from_tree(tomllib.loads(file.read_text()) if file.exists() else {})
        return [
            asdict(setting)
            for setting in find_changed_settings(
                [row for row in ours if row["key"] not in URL_SETTINGS], CoordinatorSettings, tree, NODE_SECTIONS
            )
        ]
    except (OSError, ValueError):
        return []


def inspect_settings(
    state: Path,
    file: Path,
    environ: Mapping[str, str],
    pairs: Sequence[str],
    node: Mapping[str, Any] | None = None,
    *,
    on_this_machine: bool = False,
) -> SettingsReport:
    """Read all settings of coordinator and node as a start would: from `file`, `environ`, and the `pairs` of --set.

    `node` is the report of `read_node_settings`; None: read it. Invalid values are faults of the result. With
    `on_this_machine`, a cap or margin that is impossible on this machine is a fault as well. Raise `CommandError` for a
    --set that is not KEY=VALUE, or if the node's settings cannot be read.
    """
    from coordinator.state.config_file import ConfigFault, build_syntax_fault, locate_faults, redact_rows
    from coordinator.state.settings import NODE_SECTIONS, CoordinatorSettings
    from host.settings_loader import (
        InvalidSetting,
        SettingsError,
        build_setting_rows,
        find_invalid_settings,
        from_environment,
        from_pairs,
        from_tree,
        list_settings,
        resolve_layers,
    )

    try:
        text = file.read_text() if file.exists() else ""
        tree = from_tree(tomllib.loads(text))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        defaults = [
            {"key": setting.key, "value": setting.default, "origin": "default", "description": setting.description}
            for setting in list_settings(CoordinatorSettings)
        ]
        if isinstance(error, OSError):
            text = f"cannot be read: {error.strerror}: check the owner and the mode of the file"
            fault = ConfigFault(str(file), 0, "", text)
        else:
            fault = build_syntax_fault(str(file), str(error))
        return SettingsReport(tuple(defaults), (fault,))
    try:
        layers = [(str(file), tree), ("environment", from_environment(environ)), ("--set", from_pairs(pairs))]
    except SettingsError as error:
        raise CommandError(2, str(error)) from None
    node = node or read_node_settings(state, file, environ, pairs)
    wrong: list[ConfigFault] = []
    for origin, flat in layers:
        faults = find_invalid_settings(CoordinatorSettings, flat, NODE_SECTIONS)
        faults += [
            InvalidSetting(**fault)
            for fault in node["faults"]
            if fault["key"] in flat and fault["key"].split(".")[0] in NODE_SECTIONS
        ]
        faults += _find_webhook_fault(flat)
        wrong += locate_faults(origin, faults, text if origin == str(file) else "")
    if node["error"] and not wrong:
        wrong.append(ConfigFault(str(file), 0, "", node["error"]))
    if on_this_machine and not wrong and node["unsuitable"]:
        key, _, reason = node["unsuitable"].removeprefix("setting ").partition(": ")
        origin = next(row["origin"] for row in node["settings"] if row["key"] == key)
        wrong += locate_faults(origin, [InvalidSetting(key, reason)], text if origin == str(file) else "")
    bad = {fault.key for fault in wrong}
    right = [(origin, {key: flat[key] for key in flat if not _is_part_of(key, bad)}) for origin, flat in layers]
    rows = redact_rows(build_setting_rows(resolve_layers(CoordinatorSettings, right, NODE_SECTIONS)))
    return SettingsReport(rows + tuple(node["settings"]), tuple(wrong))


def _find_webhook_fault(settings: Mapping[str, object]) -> "list[InvalidSetting]":
    """Return the fault of the webhook's URL in the settings of one source, for which `cluster up` would not start."""
    url = settings.get(WEBHOOK)
    if not url or not isinstance(url, str):
        return []
    from coordinator.alerts.webhook import WebhookError, parse_webhook_url
    from host.settings_loader import InvalidSetting

    try:
        parse_webhook_url(url)
    except WebhookError as error:
        return [InvalidSetting(WEBHOOK, str(error).removeprefix(f"{WEBHOOK} "))]
    return []


def _is_part_of(key: str, faults: Collection[str]) -> bool:
    """Return whether `faults` has a key, or a table that contains the key."""
    return key in faults or any(key.startswith(fault + ".") for fault in faults)


def read_node_settings(state: Path, file: Path, environ: Mapping[str, str], pairs: Sequence[str]) -> dict[str, Any]:
    """Return the settings of the node, as `node.inspect.report --settings-only` prints them.

    The arguments are those of `inspect_settings`. Of `environ`, only the MACPOOL_ variables are used. Raise
    `CommandError` if the process cannot be started, prints no JSON, or does not end within `CHILD_TIMEOUT_SECONDS`.
    """
    command = [
        sys.executable,
        "-P",
        "-m",
        "node.inspect.report",
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
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=CHILD_TIMEOUT_SECONDS,
            env={**plain, **ours},
            stdin=subprocess.DEVNULL,
            check=False,
        )
        return json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        raise CommandError(1, f"the node's settings cannot be read: {error}") from None
