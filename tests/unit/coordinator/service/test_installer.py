"""Install, repair, refuse, undo, uninstall: with stand-ins of service managers that answer as the real ones do."""

import dataclasses
import itertools
import json
import os
import plistlib
import pwd
import stat
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from coordinator.cli import cluster
from coordinator.service import installer, launchd, service_manager
from coordinator.service.installer import install, uninstall
from coordinator.service.plan import ServicePlan
from coordinator.service.service_manager import ServiceError, ServiceHost, find_account, find_group_name
from tests.support.coordinator.sync_log import SyncLog
from tests.support.managers import calls, manager

USER = pwd.getpwnam("nobody") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())
BOTH = pytest.mark.parametrize("platform", ["darwin", "linux"])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(installer, "STEADY_SECONDS", 0.05)
    monkeypatch.setattr(installer, "POLL_INTERVAL_SECONDS", 0.02)
    monkeypatch.setattr(service_manager, "UNLOAD_POLL_SECONDS", 0.02)


def plan(tmp_path: Path, **changes: object) -> ServicePlan:
    state = tmp_path / "state"
    if not state.exists():
        state.mkdir(mode=0o700)
        if os.geteuid() == 0:
            os.chown(state, USER.pw_uid, USER.pw_gid)
    made = ServicePlan("coordinator", "/opt/python", USER.pw_name, "nogroup", "/nonexistent", str(state), launchd.LOGS)
    return dataclasses.replace(made, **changes)


@BOTH
def test_installed_twice_is_installed_once(tmp_path: Path, platform: str):
    host, wanted = manager(tmp_path, platform), plan(tmp_path)
    done, standing = install(host, wanted)
    assert standing.running
    assert host.unit.read_text() == host.render_unit(wanted)
    assert stat.S_IMODE(host.unit.stat().st_mode) == 0o644
    assert f"wrote {host.unit}" in done
    before = calls(tmp_path)
    assert ("launchctl enable system/org.macpool" if host.mac else "systemctl enable macpool.service") in before
    again, after = install(host, wanted)
    assert (again, after.pid, calls(tmp_path)) == ([], standing.pid, before)


@BOTH
@pytest.mark.parametrize("missing", ["unit", "loaded", "changed", "cut off"])
def test_install_repairs_an_incomplete_installation(tmp_path: Path, platform: str, missing: str):
    host, wanted = manager(tmp_path, platform), plan(tmp_path)
    install(host, wanted)
    if missing == "unit":
        host.unit.unlink()
    elif missing == "loaded":
        host.unload_unit()
    elif missing == "changed":
        host.unit.write_text(host.render_unit(plan(tmp_path, arguments=("--lan",))))
    else:
        host.unit.unlink()
        host.unit.with_name(f".{host.unit.name}.new").write_text("half")
    done, standing = install(host, wanted)
    assert done
    assert (f"renewed {host.unit}" in done) is (missing == "changed")
    assert standing.running
    assert host.unit.read_text() == host.render_unit(wanted)
    assert not host.unit.with_name(f".{host.unit.name}.new").exists()


@BOTH
def test_an_install_that_is_cut_off_after_its_file_is_finished_by_the_next(tmp_path: Path, platform: str):
    host, newer = manager(tmp_path, platform), plan(tmp_path, arguments=("--lan",))
    _, before = install(host, plan(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServiceHost, "unload_unit" if host.mac else "load_unit", cut_off)
        with pytest.raises(KeyboardInterrupt):
            install(host, newer)
    assert host.unit.read_text() == host.render_unit(newer)
    assert host.read_state().pid == before.pid
    done, standing = install(host, newer)
    assert done, "the file is new, and what runs is not"
    assert standing.pid != before.pid
    assert install(host, newer)[0] == []
    assert [one.name for one in host.unit.parent.iterdir()] == [host.unit.name]


def cut_off(*_: object) -> None:
    """Simulate a user who presses Ctrl-C, or a power cut."""
    raise KeyboardInterrupt


@BOTH
def test_install_distinguishes_state_folders_with_a_common_prefix(tmp_path: Path, platform: str):
    host, wanted = manager(tmp_path, platform), plan(tmp_path)
    host.unit.parent.mkdir(parents=True)
    host.unit.write_text(host.render_unit(plan(tmp_path, state=f"{wanted.state}-of-the-lab")))
    with pytest.raises(ServiceError, match="another state folder"):
        install(host, wanted)


@BOTH
def test_all_folders_above_a_new_state_folder_belong_to_the_user(tmp_path: Path, platform: str):
    host, state = manager(tmp_path, platform), tmp_path / "home" / ".local" / "share" / "macpool"
    state.parents[2].mkdir()
    done, _ = install(host, plan(tmp_path, state=str(state)))
    made = [state, *state.parents[:2]]
    assert [(path.stat().st_uid, stat.S_IMODE(path.stat().st_mode)) for path in made] == [(USER.pw_uid, 0o700)] * 3
    assert state.parents[2].stat().st_uid == os.geteuid(), "a folder that exists keeps its owner"
    assert done[: 1 + host.mac] == [f"created {state}", f"created {host.logs}"][: 1 + host.mac]
    assert not host.mac or (host.logs.stat().st_uid, stat.S_IMODE(host.logs.stat().st_mode)) == (USER.pw_uid, 0o700)


@BOTH
def test_a_service_with_spaces_in_its_paths_is_found_again(tmp_path: Path, platform: str):
    (tmp_path / "a  b$c%").mkdir()
    host, wanted = manager(tmp_path, platform), plan(tmp_path / "a  b$c%", python="/opt/o'neil's  own/python")
    install(host, wanted)
    assert install(host, wanted)[0] == []
    told = json.loads(invoke(host, "status", "-o", "json").stdout)
    assert told["state"] == wanted.state
    if platform == "darwin":
        assert installer.read_existing_unit(host, host.unit).program[0] == wanted.python
    gone = json.loads(invoke(host, "uninstall", "-o", "json").stdout)
    assert gone["kept"][0] == wanted.state


@pytest.mark.parametrize(
    ("program", "state"), [(("x", "--state", "a b", "--lan"), "a b"), (("x", "--state"), ""), ((), "")]
)
def test_the_state_folder_is_the_word_after_its_option(program: tuple[str, ...], state: str):
    assert installer.ExistingUnit(program=program).state == state


@BOTH
def test_a_folder_of_models_is_no_state_folder(tmp_path: Path, platform: str):
    host, wanted = manager(tmp_path, platform), plan(tmp_path)
    host.unit.parent.mkdir(parents=True)
    host.unit.write_text(host.render_unit(plan(tmp_path, state="/var/other", arguments=("--models", wanted.state))))
    with pytest.raises(ServiceError, match="another state folder"):
        install(host, wanted)


def test_a_folder_of_logs_that_the_service_could_not_write_is_refused(tmp_path: Path):
    host, wanted = manager(tmp_path, "darwin"), plan(tmp_path)
    host.logs.mkdir(parents=True)
    if os.geteuid() == 0:
        os.chown(host.logs, 1, 1)
    else:
        wanted = plan(tmp_path, user="nobody", state=str(tmp_path / "new"))
    with pytest.raises(ServiceError, match="sudo chown -R"):
        install(host, wanted)
    assert calls(tmp_path) == []


@BOTH
def test_install_is_rolled_back_if_the_service_does_not_start(tmp_path: Path, platform: str):
    host, wanted = manager(tmp_path, platform), plan(tmp_path)
    (tmp_path / "bin" / "broken").touch()
    if host.mac:
        host.logs.mkdir(parents=True)
        (host.logs / "service.log").write_text("an old line\n" * installer.TAIL_CHARS + "the port is taken\n")
        os.chown(host.logs, USER.pw_uid, USER.pw_gid)
    with pytest.raises(ServiceError, match="does not stay up") as caught:
        install(host, wanted, timeout_seconds=0.3)
    assert caught.value.code == 7
    assert platform == "linux" or "the port is taken" in str(caught.value)
    assert f"; its last exit: {'1' if host.mac else 'exit-code 1'}" in str(caught.value)
    assert list(host.unit.parent.iterdir()) == []
    assert not host.read_state().loaded


@BOTH
def test_a_service_that_restarts_again_and_again_does_not_run(tmp_path: Path, platform: str):
    host = manager(tmp_path, platform)
    (tmp_path / "bin" / "restarting").touch()
    with pytest.raises(ServiceError, match="does not stay up"):
        install(host, plan(tmp_path), timeout_seconds=0.6)
    assert not host.unit.exists()


def test_a_unit_that_launchd_or_its_linter_refuses_is_not_installed(tmp_path: Path):
    host = manager(tmp_path, "darwin")
    with pytest.raises(ServiceError, match="the unit is not valid: 'python' is not absolute") as refused:
        install(host, plan(tmp_path, python="python"))
    linted = dataclasses.replace(host, tools={**host.tools, "plutil": "/bin/false"})
    with pytest.raises(ServiceError, match=r"plutil -lint .*\.org\.macpool\.plist\.new failed with 1") as failed:
        install(linted, plan(tmp_path))
    assert (refused.value.code, failed.value.code) == (1, 1)
    assert not host.unit.exists()
    assert calls(tmp_path) == []


@BOTH
def test_a_unit_is_on_the_disk_before_it_gets_its_name(tmp_path: Path, platform: str, monkeypatch: pytest.MonkeyPatch):
    syncs = SyncLog(monkeypatch)
    install(manager(tmp_path, platform), plan(tmp_path))
    assert syncs.unsynced_folders, "a rename was recorded"
    assert syncs.unsynced_content == []


def test_a_service_must_keep_one_process_for_three_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Each call of the clock returns a second more, and each of the first calls of systemctl a new process."""
    monkeypatch.undo()  # the real `STEADY_SECONDS`
    monkeypatch.setattr(installer, "POLL_INTERVAL_SECONDS", 0.0)
    counter, tool = tmp_path / "counter", tmp_path / "systemctl"
    tool.write_text(
        f"#!/bin/sh\necho >> {counter}\ncount=$(wc -l < {counter})\n"
        'echo LoadState=loaded; echo ActiveState=active; echo "MainPID=$((count < 3 ? count : 3))"\n'
    )
    tool.chmod(0o700)
    host = ServiceHost("linux", tmp_path, {"systemctl": str(tool)})
    monkeypatch.setattr(time, "monotonic", itertools.count().__next__)
    for timeout_seconds, expected in ((45.0, 6), (8.0, 5)):
        counter.unlink(missing_ok=True)
        assert installer.wait_until_running(host, timeout_seconds).pid == 3
        assert len(counter.read_text()) == expected, "the third call and those of 3 s, or of a quarter of the timeout"


@BOTH
def test_failed_change_restarts_the_former_service(tmp_path: Path, platform: str):
    host, wanted = manager(tmp_path, platform), plan(tmp_path)
    install(host, wanted)
    (tmp_path / "bin" / "broken").touch()
    with pytest.raises(ServiceError):
        install(host, plan(tmp_path, arguments=("--lan",)), timeout_seconds=0.3)
    (tmp_path / "bin" / "broken").unlink()
    assert host.unit.read_text() == host.render_unit(wanted)
    assert host.read_state().running
    assert [one.name for one in host.unit.parent.iterdir()] == [host.unit.name]


def test_restart_under_launchd_does_not_kill_the_service(tmp_path: Path):
    host = manager(tmp_path, "darwin")
    install(host, plan(tmp_path))
    before = len(calls(tmp_path))
    host.restart_service()
    assert [line.split()[1] for line in calls(tmp_path)[before:]] == ["bootout", "enable", "bootstrap"]
    assert host.read_state().running


def test_a_job_that_launchd_does_not_unload_is_an_error_with_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    host = manager(tmp_path, "darwin")
    install(host, plan(tmp_path))
    (tmp_path / "bin" / "stuck").touch()
    monkeypatch.setattr(service_manager, "UNLOAD_TIMEOUT_SECONDS", 0.1)
    with pytest.raises(ServiceError, match=r"did not unload system/org\.macpool within 0 s: wait until") as caught:
        host.unload_unit()
    assert caught.value.code == 7


@BOTH
@pytest.mark.parametrize(
    "what",
    ["foreign", "link", "folder", "other owner", "other user", "other state", "state of another", "state of root"],
)
def test_files_of_another_user_are_refused_and_kept(tmp_path: Path, platform: str, what: str):
    host, wanted = manager(tmp_path, platform), plan(tmp_path)
    host.unit.parent.mkdir(parents=True)
    if what == "foreign":
        host.unit.write_text("[Service]\nExecStart=/bin/other\n")
    elif what == "link":
        (tmp_path / "elsewhere").write_text(host.render_unit(wanted))
        host.unit.symlink_to(tmp_path / "elsewhere")
    elif what == "folder":
        host.unit.mkdir()
    elif what == "other owner":
        host.unit.write_text(host.render_unit(wanted) if os.geteuid() == 0 else "not ours")
        if os.geteuid() == 0:
            os.chown(host.unit, 1, 1)
    elif what == "other user":
        host.unit.write_text(host.render_unit(plan(tmp_path, user="daemon")))
    elif what == "other state":
        host.unit.write_text(host.render_unit(plan(tmp_path, state="/var/other")))
    elif os.geteuid() == 0:
        owner = 0 if what == "state of root" else 1
        os.chown(wanted.state, owner, owner)
    else:
        wanted = plan(tmp_path, user="nobody")
    before = host.unit.read_bytes() if host.unit.is_file() else b""
    with pytest.raises(ServiceError) as caught:
        install(host, wanted)
    assert caught.value.code == 6
    assert (host.unit.read_bytes() if host.unit.is_file() else b"") == before
    assert calls(tmp_path) == []
    assert not host.read_state().loaded


@BOTH
def test_a_foreign_unit_is_not_removed(tmp_path: Path, platform: str):
    host = manager(tmp_path, platform)
    host.unit.parent.mkdir(parents=True)
    host.unit.write_text("somebody's")
    with pytest.raises(ServiceError, match="is not a file of macpool"):
        uninstall(host)
    assert host.unit.read_text() == "somebody's"


@BOTH
def test_a_unit_with_other_bytes_than_text_is_read_or_refused(tmp_path: Path, platform: str):
    host = manager(tmp_path, platform)
    install(host, plan(tmp_path))
    content = host.unit.read_bytes()
    if platform == "darwin":
        content = plistlib.dumps(plistlib.loads(content), fmt=plistlib.FMT_BINARY)
    else:
        content += b"# \xff\n"
    host.unit.write_bytes(content)
    uninstall(host)
    assert not host.unit.exists()


@BOTH
def test_uninstall_leaves_the_data(tmp_path: Path, platform: str):
    host, wanted = manager(tmp_path, platform), plan(tmp_path)
    install(host, wanted)
    (Path(wanted.state) / "cluster.db").write_text("the cluster")
    assert uninstall(host)
    assert not host.unit.exists()
    assert not host.read_state().loaded
    assert (Path(wanted.state) / "cluster.db").read_text() == "the cluster"
    assert uninstall(host) == [], "a second time there is nothing to do"


@BOTH
def test_only_root_may(tmp_path: Path, platform: str):
    host = manager(tmp_path, platform, uid=501)
    for act in (lambda: install(host, plan(tmp_path)), lambda: uninstall(host)):
        with pytest.raises(ServiceError, match="sudo") as caught:
            act()
        assert caught.value.code == 4


def test_the_wired_limit_is_a_job_of_its_own(tmp_path: Path):
    host = manager(tmp_path, "darwin")
    install(host, plan(tmp_path))
    assert not host.wired_unit.exists()
    done, _ = install(host, plan(tmp_path, wired_limit_mb=4096))
    assert "iogpu.wired_limit_mb=4096" in host.wired_unit.read_text()
    wired = [call for call in calls(tmp_path) if "wired-limit" in call]
    loaded = f"launchctl bootstrap system {host.wired_unit}"
    assert wired == ["launchctl bootout system/org.macpool.wired-limit", loaded]
    install(host, plan(tmp_path, wired_limit_mb=4096))
    assert [call for call in calls(tmp_path) if "wired-limit" in call] == wired, "an equal job is left alone"
    assert any("4096 MB" in one for one in done)
    install(host, plan(tmp_path, wired_limit_mb=2048))
    assert "iogpu.wired_limit_mb=2048" in host.wired_unit.read_text()
    install(host, plan(tmp_path))
    assert host.wired_unit.exists(), "an install that does not name it leaves it"
    before = len(calls(tmp_path))
    uninstall(host)
    assert not host.wired_unit.exists()
    assert "launchctl bootout system/org.macpool.wired-limit" in calls(tmp_path)[before:]


# the verbs


def invoke(host: ServiceHost, *arguments: str) -> Result:
    return CliRunner(env={"MACPOOL_STATE": "", "SUDO_USER": USER.pw_name}).invoke(
        cluster, ["service", *arguments], obj=host
    )


@BOTH
def test_a_dry_run_prints_and_does_nothing(tmp_path: Path, platform: str):
    host, wanted = manager(tmp_path, platform, uid=501), plan(tmp_path)
    done = invoke(host, "install", "--dry-run", "--coordinator", "--state", wanted.state, "--", "--lan")
    assert done.exit_code == 0, done.output
    assert str(host.unit) in done.output
    assert "--lan" in done.output
    assert not host.unit.exists()
    assert calls(tmp_path) == []


@BOTH
def test_the_life_of_a_service(tmp_path: Path, platform: str):
    host, state = manager(tmp_path, platform), plan(tmp_path).state
    assert invoke(host, "status").exit_code == 5
    assert invoke(host, "restart").exit_code == 5
    missing = invoke(host, "install", "--state", state)
    assert missing.exit_code == 5
    assert "join once by hand" in missing.output
    made = invoke(host, "install", "--coordinator", "--state", state, "-o", "json")
    assert made.exit_code == 0, made.output
    assert (json.loads(made.stdout)["role"], json.loads(made.stdout)["user"]) == ("coordinator", USER.pw_name)
    told = json.loads(invoke(host, "status", "-o", "json").stdout)
    assert (told["running"], told["user"], told["state"]) == (True, USER.pw_name, state)
    again = invoke(host, "install", "--coordinator", "--state", state)
    assert "nothing to do" in again.output
    assert invoke(host, "restart").exit_code == 0
    assert json.loads(invoke(host, "status", "-o", "json").stdout)["pid"] != told["pid"]
    (tmp_path / "bin" / "broken").touch()
    assert invoke(host, "status").exit_code == 1
    gone = invoke(host, "uninstall")
    assert f"kept      {state}" in gone.output
    assert "no service was installed" in invoke(host, "uninstall").output


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["--user", "root"], 6, "name another user"),
        (["--user", "no-such-user"], 5, "there is no user"),
        (["--coordinator", "--", "--token", "x"], 2, "every user of this machine could read it"),
        (["--coordinator", "--", "--no-such-option"], 2, "there is no option --no-such-option"),
        (["--coordinator", "--wired-limit-mb", "100"], 2, "is for macOS"),
    ],
)
def test_check_plan_refuses_invalid_plans(tmp_path: Path, arguments: list[str], code: int, says: str):
    host, state = manager(tmp_path, "linux"), plan(tmp_path).state
    done = invoke(host, "install", "--state", state, *arguments)
    assert (done.exit_code, says in done.output) == (code, True), done.output
    assert calls(tmp_path) == []


@BOTH
def test_a_folder_or_tool_that_cannot_be_used_is_a_clear_error(tmp_path: Path, platform: str):
    host, wanted = manager(tmp_path, platform), plan(tmp_path)
    (tmp_path / "file").touch()
    lost = dataclasses.replace(host, root=tmp_path / "file")
    with pytest.raises(ServiceError, match="cannot be read: Not a directory"):
        installer.read_existing_unit(lost, lost.unit)
    with pytest.raises(ServiceError, match=f"{tmp_path}/file/new: Not a directory"):
        install(host, dataclasses.replace(wanted, state=str(tmp_path / "file" / "new")))
    install(host, wanted)
    unfinished = host.unit.with_name(f".{host.unit.name}.unfinished")
    unfinished.mkdir()
    with pytest.raises(ServiceError, match=r"\.unfinished: "):
        uninstall(host)
    tools = dataclasses.replace(host, tools=dict.fromkeys(host.tools, str(tmp_path)))
    with pytest.raises(ServiceError, match=f"{tmp_path} cannot be run: Permission denied"):
        tools.read_state()


def test_find_group_name_names_a_group_of_the_system_and_refuses_an_unknown_one():
    assert find_group_name(0) == ("root" if sys.platform == "linux" else "wheel")
    with pytest.raises(ServiceError, match="group 3999999999, the user's primary one, has no name") as refused:
        find_group_name(3999999999)
    assert refused.value.code == 5


def test_find_account_refuses_an_unknown_user_and_root():
    with pytest.raises(ServiceError, match="there is no user 'nobody-here'") as unknown:
        find_account("nobody-here")
    assert unknown.value.code == 5
    with pytest.raises(ServiceError, match="does not run as root") as root:
        find_account("root")
    assert root.value.code == 6
