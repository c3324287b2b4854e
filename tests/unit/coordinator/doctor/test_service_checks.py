"""Check of the service by the doctor, with units of this project and stand-ins for launchctl and systemctl."""

import os
import pwd
from pathlib import Path

import pytest

from coordinator.doctor.service_checks import REPAIR, check_service
from coordinator.service import launchd
from coordinator.service.plan import ServicePlan
from coordinator.service.service_manager import ServiceHost
from tests.support.managers import manager
from tests.support.pretended_mac import pretended

USER = pwd.getpwuid(os.geteuid()).pw_name
BOTH = pytest.mark.parametrize("platform", ["darwin", "linux"])


def write_unit(host: ServiceHost, state: Path, python: str = "/bin/sh") -> str:
    """Write the unit of a coordinator, and return its text."""
    plan = ServicePlan("coordinator", python, USER, "nogroup", "/nonexistent", str(state), launchd.LOGS)
    text = host.render_unit(plan)
    host.unit.parent.mkdir(parents=True, exist_ok=True)
    host.unit.write_text(text)
    host.unit.chmod(0o644)
    return text


@BOTH
def test_check_service_names_user_process_and_last_exit(tmp_path: Path, platform: str):
    host, here = manager(tmp_path, platform), pretended(tmp_path / "state", platform=platform)
    found = check_service(here, host)
    assert (found.result, found.text) == (
        "not here",
        "no service is installed: `sudo cluster service install` starts macpool at each boot",
    )
    text = write_unit(host, tmp_path / "state")
    found = check_service(here, host)
    expected = "the service is installed but not running", f"`cluster service logs` shows why; {REPAIR}"
    assert (found.result, found.text, found.fix) == ("fail", *expected)
    host.load_unit()
    found = check_service(here, host)
    assert (found.result, found.text, found.fix) == ("ok", f"the service runs as {USER}, process 1001", "")
    assert found.numbers == {"pid": 1001}
    (tmp_path / "bin" / "broken").touch()
    if host.mac:  # that the service does not run is the graver fault
        host.unit.write_text(text.replace("Interactive", "Standard"))
    found = check_service(here, host)
    last_exit = "1" if host.mac else "exit-code 1"
    assert (found.result, found.text) == ("fail", f"{expected[0]}, last exit: {last_exit}")


def test_check_service_requires_an_executable_python_and_full_speed(tmp_path: Path):
    host, here = manager(tmp_path, "darwin"), pretended(tmp_path / "state")
    python = tmp_path / "python"
    text = write_unit(host, tmp_path / "state", str(python))
    for _ in range(2):  # a missing file, then one that cannot be executed
        found = check_service(here, host)
        assert (found.result, found.text, found.fix) == ("fail", f"the service's Python is missing: {python}", REPAIR)
        python.touch(mode=0o644)
    python.chmod(0o755)
    host.load_unit()
    assert check_service(here, host).result == "ok"
    host.unit.write_text(text.replace("Interactive", "Standard"))
    found = check_service(here, host)
    assert (found.result, found.fix) == ("warn", REPAIR)
    assert found.text == "ProcessType is Standard: macOS throttles the service's CPU and disk"


def test_check_service_warns_of_a_foreign_unit_below_the_root_of_the_probe(tmp_path: Path):
    here = pretended(tmp_path)
    unit = ServiceHost("darwin", root=tmp_path).unit
    unit.parent.mkdir(parents=True)
    unit.write_text("another program's")
    found = check_service(here)
    assert (found.result, found.fix) == ("warn", "`cluster service status` has details")
    assert found.text == f"{unit} is not a file of macpool: check it, and move it away if it is not needed"
