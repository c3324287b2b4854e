"""Output and exit codes of `cluster service`, for states of a service manager that a test sets."""

import json
import os
import pwd
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from coordinator.cli import cluster
from coordinator.cli.commands import service as service_commands
from coordinator.client.errors import NOT_FOUND, REFUSED
from coordinator.doctor import host_probe
from coordinator.service import installer
from coordinator.service.installer import ExistingUnit
from coordinator.service.plan import ServiceState
from coordinator.service.service_manager import ServiceHost
from wire.units import GIB

USER = pwd.getpwnam("nobody").pw_name
UNIT = ExistingUnit("unit", "anna", ("python", "-m", "coordinator.cli", "up", "--state", "/srv/pool"))


def invoke(host: ServiceHost, *words: str) -> Result:
    environ = {"MACPOOL_STATE": "", "SUDO_USER": USER}
    return CliRunner(env=environ).invoke(cluster, ["service", *words], obj=host)


@pytest.mark.parametrize(
    ("unit", "now", "code", "lines"),
    [
        (ExistingUnit(), ServiceState(), NOT_FOUND, ["not installed"]),
        (
            ExistingUnit(),
            ServiceState(loaded=True),
            1,
            ["not installed, but its unit is missing: `cluster service install` repairs that"],
        ),
        (
            UNIT,
            ServiceState(),
            1,
            ["service   not loaded: `cluster service install` repairs that", "unit      UNIT", "user      anna"],
        ),
        (UNIT, ServiceState(loaded=True, last_exit="9"), 1, ["service   loaded, not running", "last exit 9"]),
        (UNIT, ServiceState(True, True, 77), 0, ["service   running, process 77", "state     /srv/pool"]),
    ],
)
def test_the_state_of_the_service_is_printed_with_its_exit_code(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    unit: ExistingUnit,
    now: ServiceState,
    code: int,
    lines: list[str],
):
    monkeypatch.setattr(installer, "read_existing_unit", lambda *_: unit)
    monkeypatch.setattr(ServiceHost, "read_state", lambda _: now)
    host = ServiceHost("darwin", tmp_path)
    done = invoke(host, "status")
    printed = done.stdout.replace(str(host.unit), "UNIT").splitlines()
    assert (done.exit_code, len(printed)) == (code, (4 + bool(now.last_exit)) if unit.text else 1)
    assert set(lines) <= set(printed)
    done = invoke(host, "status", "-o", "json")
    assert done.exit_code == code
    assert json.loads(done.stdout) == {
        "schema": 1,
        "installed": bool(unit.text),
        "loaded": now.loaded,
        "running": now.running,
        "pid": now.pid,
        "user": unit.user,
        "state": unit.state,
        "unit": str(host.unit),
        "last_exit": now.last_exit,
    }


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the command line of each program that takes the place of the command."""
    found: list[list[str]] = []
    monkeypatch.setattr(service_commands.os, "execv", lambda _, command: found.append(command))
    return found


def test_the_output_of_the_service_is_read_with_the_tool_of_the_system(tmp_path: Path, replaced: list[list[str]]):
    tools = {"tail": "/usr/bin/tail", "journalctl": "/usr/bin/journalctl"}
    mac, linux = ServiceHost("darwin", tmp_path, tools), ServiceHost("linux", tmp_path, tools)
    missing = invoke(mac, "logs")
    assert (missing.exit_code, "is the service installed?" in missing.stderr, replaced) == (NOT_FOUND, True, [])
    mac.logs.mkdir(parents=True)
    (mac.logs / "service.log").write_text("started\n")
    for host in (mac, linux):
        invoke(host, "logs")
        invoke(host, "logs", "--follow", "--lines", "7")
    file = str(mac.logs / "service.log")
    journal = ["/usr/bin/journalctl", "--no-pager", "-u", "macpool.service", "-n"]
    assert replaced == [
        ["/usr/bin/tail", "-n", "200", file],
        ["/usr/bin/tail", "-n", "7", "-F", file],
        [*journal, "200"],
        [*journal, "7", "-f"],
    ]


def test_a_missing_tool_is_a_clear_error(tmp_path: Path):
    done = invoke(ServiceHost("linux", tmp_path, {"journalctl": "/none/journalctl"}), "logs")
    assert (done.exit_code, done.stderr) == (1, "Error: /none/journalctl: No such file or directory\n")


@pytest.mark.parametrize(
    ("safe", "wired", "code"),
    [(110 * GIB, 112_640, 0), (110 * GIB, 112_641, REFUSED), (0, 1, REFUSED), (None, 1, REFUSED)],
)
def test_a_wired_limit_is_at_most_the_safe_one_of_this_mac(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, safe: int | None, wired: int, code: int
):
    inspection: dict[str, Any] | None = None if safe is None else {"memory": {"safe": safe}}
    monkeypatch.setattr(host_probe, "HostProbe", lambda _: SimpleNamespace(read_inspection=lambda: inspection))
    host = ServiceHost("darwin", tmp_path)
    words = ("install", "--dry-run", "--coordinator", "--state", str(tmp_path), "--wired-limit-mb", str(wired))
    done = invoke(host, *words, "-o", "json")
    assert done.exit_code == code, done.output
    if code == 0:
        units = json.loads(done.stdout)["units"]
        assert list(units) == [str(host.unit), str(host.wired_unit)]
        assert str(wired) in units[str(host.wired_unit)]
        text = invoke(host, *words).stdout
        assert text == "".join(f"# {file}\n{content}\n" for file, content in units.items())


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_a_dry_run_without_a_wired_limit_has_one_unit_for_the_user_of_sudo(tmp_path: Path, platform: str):
    host = ServiceHost(platform, tmp_path)
    done = invoke(host, "install", "--dry-run", "--coordinator", "--state", str(tmp_path), "-o", "json")
    answer = json.loads(done.stdout)
    assert (answer["role"], answer["user"], list(answer["units"])) == ("coordinator", USER, [str(host.unit)])
    assert not host.unit.exists()
    assert os.listdir(tmp_path) == []
