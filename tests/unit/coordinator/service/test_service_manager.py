"""The interface to the service managers: paths, errors of tools, and commands that have nothing to do."""

import os
import pwd
from pathlib import Path

import pytest

from coordinator.service import service_manager
from coordinator.service.plan import STOP_TIMEOUT_SECONDS
from coordinator.service.service_manager import ServiceError, ServiceHost, find_account
from tests.support.managers import calls, manager


def host(folder: Path, script: str = "exit 0", mode: int = 0o700) -> ServiceHost:
    """Return a host whose systemctl is a script."""
    tool = folder / "systemctl"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(mode)
    return ServiceHost("linux", folder, {"systemctl": str(tool), "launchctl": str(folder / "none")})


@pytest.mark.parametrize(
    ("platform", "unit", "wired"),
    [
        ("darwin", "Library/LaunchDaemons/org.macpool.plist", "Library/LaunchDaemons/org.macpool.wired-limit.plist"),
        ("linux", "etc/systemd/system/macpool.service", "Library/LaunchDaemons/org.macpool.wired-limit.plist"),
    ],
)
def test_units_are_below_the_root_in_the_folder_of_the_manager(platform: str, unit: str, wired: str):
    made = ServiceHost(platform, Path("/other-root"))
    assert (made.unit, made.wired_unit, made.logs) == (
        Path("/other-root") / unit,
        Path("/other-root") / wired,
        Path("/other-root/Library/Logs/macpool"),
    )
    assert made.mac is (platform == "darwin")


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo out; echo 'bad unit' >&2; exit 1", "systemctl enable x failed with 1: bad unit"),
        ("echo 'only out'; exit 4", "systemctl enable x failed with 4: only out"),
        ("exit 4", "systemctl enable x failed with 4: no message"),
        ("echo no >&2; exit 5", "systemctl enable x failed with 5: no (often: the job is loaded already"),
        ("exit 125", "systemctl enable x failed with 125: no message (this domain cannot be reached"),
    ],
)
def test_a_tool_that_fails_is_an_error_with_its_message_and_its_meaning(tmp_path: Path, script: str, text: str):
    with pytest.raises(ServiceError) as raised:
        host(tmp_path, script).run_tool_checked("systemctl", "enable", "x")
    assert (raised.value.code, str(raised.value).startswith(text)) == (1, True)
    assert host(tmp_path, script).run_tool("systemctl", "enable", "x").returncode == int(script.split()[-1])


def test_a_tool_that_is_missing_unusable_or_late_is_an_error_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = host(tmp_path, mode=0o600)
    monkeypatch.setattr(service_manager, "TOOL_TIMEOUT_SECONDS", 0.05)
    for tool, code, text in (
        ("launchctl", 1, f"this system has no {tmp_path}/none: `--dry-run` prints the unit"),
        ("systemctl", 1, f"{tmp_path}/systemctl cannot be run: Permission denied: check its mode"),
    ):
        with pytest.raises(ServiceError) as raised:
            made.run_tool(tool)
        assert (raised.value.code, str(raised.value).startswith(text)) == (code, True)
    with pytest.raises(ServiceError, match=r"systemctl show x did not end within 0 s") as raised:
        host(tmp_path, "exec sleep 20").run_tool("systemctl", "show", "x")
    assert raised.value.code == 7


@pytest.mark.parametrize("platform", ["darwin", "linux"])
def test_a_service_that_is_not_loaded_is_not_unloaded(tmp_path: Path, platform: str):
    made = manager(tmp_path, platform)
    made.unload_unit()
    assert [line.split()[:2] for line in calls(tmp_path)] == ([["launchctl", "bootout"]] if made.mac else [])
    assert not made.read_state().loaded


def test_launchd_may_kill_the_service_before_an_unload_fails():
    assert service_manager.UNLOAD_TIMEOUT_SECONDS >= STOP_TIMEOUT_SECONDS + 10


def test_a_bootout_that_launchd_refuses_is_an_error(tmp_path: Path):
    tool = tmp_path / "launchctl"
    tool.write_text("#!/bin/sh\necho out; echo Boot-out failed: 5 >&2; exit 5\n")
    tool.chmod(0o700)
    with pytest.raises(ServiceError, match=r"^launchctl bootout failed with 5: Boot-out failed: 5$") as refused:
        ServiceHost("darwin", tmp_path, {"launchctl": str(tool)}).unload_unit()
    assert refused.value.code == 1


def test_find_account_has_the_ids_and_the_home_of_the_user():
    users = [user for user in pwd.getpwall() if user.pw_uid]
    user = next((user for user in users if user.pw_uid != user.pw_gid), users[0])
    assert find_account(user.pw_name) == (user.pw_uid, user.pw_gid, user.pw_dir)
    assert ServiceHost().uid == os.geteuid()
