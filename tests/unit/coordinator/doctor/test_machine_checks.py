"""Checks of the machine: the text, the numbers and the next step of each finding, on both sides of each limit."""

import json
import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any

import pytest

from coordinator.doctor import machine_checks as checks
from coordinator.doctor.finding import Finding, Result
from coordinator.doctor.host_probe import HostProbe, ToolOutput
from host.power import PowerState
from tests.support.pretended_mac import DEVICE, EXAMINED, FIREWALL, pretended
from wire.units import GIB, MIB

PROGRAM = os.path.realpath(sys.executable)
SOCKETS_ON = {f"{FIREWALL} --getglobalstate": "Firewall is enabled. (State = 1)\n"}


def seen(found: Finding) -> tuple[Result, str, str]:
    return found.result, found.text, found.fix


def silent(here: HostProbe) -> HostProbe:
    """Return a machine whose own modules give no answer."""

    def ask(command: tuple[str, ...], seconds: float) -> ToolOutput | None:
        return None if command[0] == sys.executable else here.run(command, seconds)

    return HostProbe(
        here.session, here.platform, here.environ, ask, here.dial, here.root, here.get_power, here.timeout_seconds
    )


def with_device(state: Path, platform: str = "darwin", **changes: Any) -> HostProbe:
    """Return a machine with other device values of MLX."""
    here = pretended(state, platform=platform)

    def ask(command: tuple[str, ...], seconds: float) -> ToolOutput | None:
        if "node.engine.process.device_info" in command:
            return ToolOutput(0, json.dumps({**DEVICE, **changes}))
        return here.run(command, seconds)

    return HostProbe(
        here.session, here.platform, here.environ, ask, here.dial, here.root, here.get_power, here.timeout_seconds
    )


def joined(state: Path) -> None:
    (state / "node" / "identity").mkdir(parents=True)
    (state / "node" / "identity" / "identity.json").write_text("{}")
    (state / "node" / "identity" / "identity.json").chmod(0o600)


# system, Python, MLX


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("14.0", ("ok", "macOS 14.0 (X)", "")),
        ("13.7", ("fail", "macOS 13.7 (X)", "nodes need macOS 14 or newer: update macOS")),
        ("26.1", ("ok", "macOS 26.1 (X)", "")),
    ],
)
def test_the_system_is_macos_14_or_newer(tmp_path: Path, version: str, expected: tuple[str, str, str]):
    listing = f"ProductName: macOS\nProductVersion: {version}\nBuildVersion: X\n"
    found = checks.check_system(pretended(tmp_path, {"/usr/bin/sw_vers": listing}))
    assert seen(found) == expected
    assert found.numbers == {"version": version}


@pytest.mark.parametrize(
    ("version", "result"), [((3, 10, 9), "fail"), ((3, 11, 0), "ok"), ((3, 14, 9), "ok"), ((3, 15, 0), "fail")]
)
def test_python_is_3_11_to_3_14(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], result: str
):
    monkeypatch.setattr("sys.version_info", version)
    found = checks.check_python(pretended(tmp_path, platform="linux"))
    assert found.result == result
    assert ("macpool runs on Python 3.11 to 3.14" in found.fix) is (result == "fail")


@pytest.mark.parametrize(("translated", "said"), [("1\n", ", translated by Rosetta"), ("0\n", ""), ("", "")])
def test_python_on_a_mac_is_native(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, translated: str, said: str):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    found = checks.check_python(pretended(tmp_path, {"/usr/sbin/sysctl -n sysctl.proc_translated": translated}))
    assert (found.result, found.text.endswith(f"x86_64{said}")) == ("fail", True), found
    step = "MLX needs an arm64 Python: `uv python install --managed-python 3.12`, then install macpool with it"
    assert found.fix == step
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr("sys.executable", "/opt/homebrew/bin/python3.12")
    assert checks.check_python(pretended(tmp_path)).result == "ok"


@pytest.mark.parametrize(
    "program",
    ["/usr/bin/python3-of-xcode", "/Library/Developer/Tools/python3", "/Applications/Xcode.app/Contents/bin/python3"],
)
@pytest.mark.parametrize("environment", [False, True])
def test_the_systems_own_python_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, environment: bool
):
    (tmp_path / "python").symlink_to(program)
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr("sys.executable", str(tmp_path / "python") if environment else program)
    found = checks.check_python(pretended(tmp_path))
    assert (found.result, "the system's own" in found.text) == ("warn", True)
    assert "uv tool install" in found.fix


def test_mlx_is_installed_loads_and_has_metal(tmp_path: Path):
    found = checks.check_mlx(with_device(tmp_path))
    assert seen(found) == ("ok", "MLX 0.32.4 on Apple M3 Ultra", "")
    assert found.numbers == {"most": 96 * GIB}
    found = checks.check_mlx(with_device(tmp_path, metal=False))
    assert seen(found)[:2] == ("fail", "MLX 0.32.4 on Apple M3 Ultra: no Metal")
    assert "log in once" in found.fix
    assert checks.check_mlx(with_device(tmp_path, "linux", metal=False)).result == "ok"
    found = checks.check_mlx(with_device(tmp_path, error="dlopen: no such symbol"))
    assert seen(found)[:2] == ("fail", "MLX cannot be loaded: dlopen: no such symbol")
    assert "uv tool install --reinstall macpool" in found.fix
    assert checks.check_mlx(with_device(tmp_path, installed=False)).result == "not here"
    joined(tmp_path)
    found = checks.check_mlx(with_device(tmp_path, installed=False))
    assert seen(found) == ("fail", "MLX is not installed", "install the extra: `uv tool install 'macpool[node]'`")


def test_checks_without_inspection_warn_with_the_command_to_run(tmp_path: Path):
    here = silent(pretended(tmp_path))
    for check, module in (
        (checks.check_mlx, "node.engine.process.device_info"),
        (checks.check_memory, "node.inspect.report"),
        (checks.check_wired_limit, "node.inspect.report"),
    ):
        found = check(here)
        assert (found.result, f"python -m {module}" in found.fix) == ("warn", True), found
    assert "failed or did not answer in time" in checks.check_mlx(here).text


# memory


def memory(**changes: Any) -> dict[str, Any]:
    return {**EXAMINED["memory"], **changes}


def test_memory_names_ram_cap_margin_and_the_term_that_decides(tmp_path: Path):
    found = checks.check_memory(pretended(tmp_path))
    assert seen(found) == ("ok", "RAM 128.0 GiB, cap 96.0 GiB (limited by static), margin 10.0 GiB", "")
    assert found.numbers == {"total": 128 * GIB, "cap": 96 * GIB, "margin": 10 * GIB}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"guard": "off"}, ("warn", "; the guard is off", 'no request is refused for memory: set memory.guard = "on"')),
        ({"warning": "the cap is tight", "remedy": "lower it"}, ("warn", "; the cap is tight", "lower it")),
        (
            {"error": "memory.cap is no size"},
            ("fail", "memory.cap is no size", "change it in config.toml; `cluster config check` names the line"),
        ),
        (
            {"guard": "off", "warning": "the cap is tight", "remedy": "lower it"},
            ("warn", "; the guard is off", 'no request is refused for memory: set memory.guard = "on"'),
        ),
        ({"margin_measured": True}, ("ok", "; a measured model has its own margin", "")),
    ],
)
def test_memory_that_is_not_as_it_should_be(tmp_path: Path, changes: dict[str, Any], expected: tuple[str, str, str]):
    found = checks.check_memory(pretended(tmp_path, memory=memory(**changes)))
    assert (found.result, found.text.endswith(expected[1]), found.fix) == (expected[0], True, expected[2]), found


@pytest.mark.parametrize(("megabytes", "result"), [(0, "ok"), (122880, "ok"), (122881, "fail")])
def test_the_wired_limit_is_at_most_the_safe_one(tmp_path: Path, megabytes: int, result: str):
    found = checks.check_wired_limit(
        pretended(tmp_path, {"/usr/sbin/sysctl -n iogpu.wired_limit_mb": f"{megabytes}\n"})
    )
    assert found.result == result
    assert found.numbers == {"now": megabytes * MIB, "safe": 120 * GIB}
    if result == "fail":
        assert found.text == "iogpu.wired_limit_mb is 122881 MB, above the 122880 MB that leave room for the system"
        assert "sudo sysctl iogpu.wired_limit_mb=122880, then restart the node" in found.fix
    else:
        assert found.text.endswith("highest safe value 122880 MB")
        assert ("set to 122880 MB" in found.text) is (megabytes > 0)


# disk, files, descriptors


class Disk:
    """Free bytes by folder, in the form of statvfs."""

    def __init__(self, free: dict[str, int]) -> None:
        self.free = free

    def __call__(self, place: Path) -> os.statvfs_result:
        if str(place) not in self.free:
            raise FileNotFoundError(str(place))
        blocks = self.free[str(place)] // 4096
        return os.statvfs_result((MIB, 4096, 10 * blocks, 5 * blocks, blocks, 0, 0, 0, 0, 255))


@pytest.mark.parametrize(
    ("models", "state", "result", "least"),
    [
        (20 * GIB, GIB, "ok", GIB),
        (20 * GIB - 4096, GIB, "warn", GIB),
        (20 * GIB, GIB - 4096, "fail", GIB - 4096),
        (500 * GIB, 30 * GIB, "ok", 30 * GIB),
    ],
)
def test_disks_have_room_for_models_and_for_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: int, state: int, result: str, least: int
):
    monkeypatch.setattr("os.statvfs", Disk({"/models": models, str(tmp_path): state}))
    found = checks.check_disk(pretended(tmp_path, folders=["/models/not/made/yet"]))
    assert (found.result, found.numbers) == (result, {"free": least})
    assert "free for /models/not/made/yet" in found.text
    short = "/models/not/made/yet" if result == "warn" else str(tmp_path)
    assert found.fix == (
        "" if result == "ok" else f"free space on the disk of {short}, or set another folder in models.folders"
    )


def test_check_disk_fails_for_the_state_folder_on_the_disk_of_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("os.statvfs", Disk({"/models": MIB, str(tmp_path): MIB}))
    found = checks.check_disk(pretended(tmp_path, folders=["/models"]))
    assert found.result == "fail"
    assert found.fix.startswith(f"free space on the disk of {tmp_path},")


def test_check_disk_warns_of_a_model_folder_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.statvfs", Disk({"/models": 90 * GIB, str(tmp_path): 90 * GIB}))
    found = checks.check_disk(pretended(tmp_path, folders=["/models/ssd"], missing_folders=["/models/ssd"]))
    assert (found.result, found.text) == ("warn", "the model folder /models/ssd is missing")
    assert found.fix == "connect its disk, or remove it from models.folders"


def test_check_disk_counts_blocks_available_to_normal_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.statvfs", Disk({str(tmp_path): 2 * GIB}))
    assert "2.0 GiB free" in checks.check_disk(pretended(tmp_path)).text, "f_bavail, not f_bfree"


@pytest.mark.parametrize("name", ["pepper", "run.json", "cluster.db", "token", "identity.json", "a.pem", "a.key"])
@pytest.mark.parametrize(("mode", "result"), [(0o600, "ok"), (0o640, "fail"), (0o602, "fail")])
def test_check_files_requires_private_secrets(tmp_path: Path, name: str, mode: int, result: str):
    (tmp_path / "node" / "deep").mkdir(parents=True)
    (tmp_path / "node" / "deep" / name).touch(mode=0o600)
    (tmp_path / "node" / "deep" / name).chmod(mode)
    found = checks.check_files(pretended(tmp_path))
    assert found.result == result
    if result == "ok":
        assert (found.text, found.numbers) == ("1 files with secrets, none readable by other users", {"secrets": 1})
    else:
        assert (name in found.text, found.fix) == (True, f"chmod -R go-rwx '{tmp_path}'")


def test_check_files_allows_readable_files_without_secrets(tmp_path: Path):
    for path in ("notes.txt", "logs/coordinator.log", "environments/x/a.pem", "trusted/b.pem", "prometheus/c.key"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
        (tmp_path / path).chmod(0o644)
    (tmp_path / "link.pem").symlink_to(tmp_path / "notes.txt")
    assert checks.check_files(pretended(tmp_path)).numbers == {"secrets": 0}
    gone = pretended(tmp_path / "gone")
    assert seen(checks.check_files(gone))[:2] == ("not here", f"there is no state folder {tmp_path / 'gone'}")


def test_only_open_secrets_are_named(tmp_path: Path):
    for name, mode in (("a.key", 0o600), ("b.key", 0o644), ("c.key", 0o600)):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    found = checks.check_files(pretended(tmp_path))
    assert (found.text, found.numbers) == (f"other users can read {tmp_path / 'b.key'}", {"open": 1})


def test_more_than_three_open_secrets_are_counted(tmp_path: Path):
    for number in range(5):
        (tmp_path / f"{number}.key").touch()
        (tmp_path / f"{number}.key").chmod(0o644)
    found = checks.check_files(pretended(tmp_path))
    assert (found.text.endswith(" and 2 more"), found.numbers) == (True, {"open": 5})


@pytest.mark.parametrize(
    ("hard", "result", "most"), [(1024, "ok", 1024), (1023, "warn", 1023), (resource.RLIM_INFINITY, "ok", 1 << 20)]
)
def test_open_files_are_at_least_1024(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard: int, result: str, most: int
):

    def limits(_: int) -> tuple[int, int]:
        return 256, hard

    monkeypatch.setattr("resource.getrlimit", limits)
    found = checks.check_open_files(pretended(tmp_path))
    assert (found.result, found.numbers) == (result, {"most": most})
    assert ("ulimit -Hn" in found.fix) is (result == "warn")
    expected = f"the limit is {most} open files" if result == "warn" else f"256 open files, can be raised to {most}"
    assert found.text == expected


# firewall, sleep, power, FileVault, terminal


@pytest.mark.parametrize(
    ("listing", "all_blocked", "coordinator", "result", "says"),
    [
        ("(Block incoming connections)", False, True, "fail", f"the application firewall blocks {PROGRAM}"),
        ("(Block incoming connections)", False, False, "fail", f"the application firewall blocks {PROGRAM}"),
        ("(Allow incoming connections)", False, True, "ok", "the application firewall is on and permits this Python"),
        (
            "(Allow incoming connections)",
            True,
            True,
            "fail",
            "the application firewall blocks all incoming connections",
        ),
        (None, False, True, "warn", "the application firewall is on and has no entry for this Python"),
        (None, False, False, "ok", "the application firewall is on; a node only makes outgoing connections"),
    ],
)
def test_check_firewall_judges_the_entry_of_the_coordinator(
    tmp_path: Path, listing: str | None, all_blocked: bool, coordinator: bool, result: str, says: str
):
    if coordinator:
        (tmp_path / "cluster.db").touch(mode=0o600)
    listed = "" if listing is None else f"1 :  {PROGRAM}\n         {listing}\n"
    block = "Firewall has block all state set to enabled." if all_blocked else "Block all DISABLED!"
    tools = {**SOCKETS_ON, f"{FIREWALL} --listapps": listed, f"{FIREWALL} --getblockall": block}
    found = checks.check_firewall(pretended(tmp_path, tools))
    assert (found.result, says in found.text) == (result, True), found
    if result != "ok":
        expected = f"sudo {FIREWALL} --add '{PROGRAM}' --unblockapp '{PROGRAM}' (again after each update of Python)"
        assert found.fix.endswith(expected)
    assert ("--setblockall off" in found.fix) is all_blocked


def test_a_firewall_that_is_off_or_cannot_be_read(tmp_path: Path):
    assert seen(checks.check_firewall(pretended(tmp_path))) == ("ok", "the application firewall is off", "")
    found = checks.check_firewall(pretended(tmp_path, {f"{FIREWALL} --getglobalstate": None}))
    assert (found.result, FIREWALL in found.fix) == ("warn", True)


@pytest.mark.parametrize(
    ("listing", "result", "steps"),
    [
        (" sleep 0\n womp 1\n autorestart 1\n", "ok", ""),
        (" sleep 1\n womp 1\n autorestart 1\n", "warn", "sleep 0"),
        (" sleep 0\n womp 0\n autorestart 1\n", "warn", "womp 1"),
        (" sleep 0\n womp 1\n autorestart 0\n", "warn", "autorestart 1"),
        (" sleep 5\n womp 0\n autorestart 0\n powernap 0\n", "warn", "sleep 0 womp 1 autorestart 1"),
        (" sleep 0\n", "ok", ""),
        ("", "warn", None),
    ],
)
def test_a_desktop_never_sleeps_wakes_by_network_and_restarts(
    tmp_path: Path, listing: str, result: str, steps: str | None
):
    found = checks.check_sleep(pretended(tmp_path, {"/usr/bin/pmset -g": listing}))
    assert found.result == result
    if steps is None:
        assert (found.text, found.fix) == ("the sleep settings cannot be read", "check `pmset -g`")
    elif steps:
        assert found.fix == f"for a dedicated Mac: sudo pmset -a {steps}"
        assert found.text == listing.strip().replace("\n ", ", ")
        assert found.numbers == {name: int(value) for name, value in (line.split() for line in listing.splitlines())}
    else:
        assert (found.text, found.fix) == (listing.strip().replace("\n ", ", "), "")


def test_a_closed_lid_is_a_warning(tmp_path: Path):
    tool = "/usr/sbin/ioreg -r -k AppleClamshellState -d 4"
    power = PowerState(plugged=True, battery=80.0)
    closed = pretended(tmp_path, {tool: '"AppleClamshellState" = Yes'}, power=power)
    found = checks.check_power(closed)
    assert seen(found)[:2] == ("warn", "on mains, 80 %, lid closed")
    assert (found.fix[:13], found.numbers) == ("connect power", {"battery": 80.0})
    opened = checks.check_power(pretended(tmp_path, {tool: '"AppleClamshellState" = No'}, power=power))
    assert seen(opened) == ("ok", "on mains, 80 %", "")


def test_filevault_off_on_and_unreadable(tmp_path: Path):
    tool = "/usr/bin/fdesetup status"
    found = [
        checks.check_filevault(pretended(tmp_path, {tool: text})) for text in ("FileVault is Off.", "FileVault is On.")
    ]
    assert [one.result for one in found] == ["ok", "warn"]
    assert found[0].text == "FileVault is off: services start without a password"
    assert "fdesetup authrestart" in found[1].fix
    found = [checks.check_filevault(pretended(tmp_path, {tool: None}))]
    assert seen(found[0]) == ("warn", "FileVault cannot be read", "check `fdesetup status`")


@pytest.mark.parametrize(
    ("environ", "result", "who"),
    [
        ({"TERM_PROGRAM": "Apple_Terminal"}, "ok", "Terminal, which needs no permission"),
        ({"SSH_CONNECTION": "1 2 3 4"}, "ok", "the SSH session, which needs no permission"),
        ({"TERM_PROGRAM": "vscode"}, "warn", "Visual Studio Code, which needs a permission"),
    ],
)
def test_started_from_names_the_program_and_whether_it_needs_a_permission(
    tmp_path: Path, environ: dict[str, str], result: str, who: str
):
    found = checks.check_started_from(pretended(tmp_path, environ=environ))
    assert (found.result, found.text) == (result, f"started from {who} for the local network")
    assert ("sudo cluster service install" in found.fix) is (result == "warn")


def test_check_system_names_other_systems_by_their_own_name(tmp_path: Path):
    found = checks.check_system(pretended(tmp_path, platform="linux"))
    assert (found.result, found.text.split()[0]) == ("ok", platform.system())


def test_pythons_of_another_systems_folders_are_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.executable", "/usr/bin/python3-of-linux")
    assert checks.check_python(pretended(tmp_path, platform="linux")).result == "ok"


def test_check_mlx_of_a_device_without_a_limit_has_no_number(tmp_path: Path):
    assert checks.check_mlx(with_device(tmp_path, most=0)).numbers == {"most": None}


def test_a_limit_of_metal_that_is_not_known_is_left_out(tmp_path: Path):
    found = checks.check_wired_limit(pretended(tmp_path, memory=memory(metal=None)))
    assert seen(found) == ("ok", "Metal's limit is the system's default; highest safe value 122880 MB", "")


def test_the_fullest_disk_is_the_one_to_make_room_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.statvfs", Disk({"/models": 5 * GIB, "/more": 3 * GIB, str(tmp_path): 50 * GIB}))
    found = checks.check_disk(pretended(tmp_path, folders=["/models", "/more"]))
    assert found.text == f"5.0 GiB free for /models, 3.0 GiB free for /more, 50.0 GiB free for {tmp_path}"
    assert found.fix.startswith("free space on the disk of /more,")


def test_unlisted_disks_are_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("os.statvfs", Disk({}))
    found = checks.check_disk(silent(pretended(tmp_path)))
    assert (seen(found), found.numbers) == (("ok", "there is no folder yet", ""), {"free": None})


@pytest.mark.parametrize(("home", "shown"), [("parent", "~/state"), ("/", "whole"), ("state", "whole")])
def test_paths_below_the_home_folder_are_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str, shown: str):
    state = tmp_path / "state"
    monkeypatch.setenv("HOME", {"parent": str(tmp_path), "/": "/", "state": str(state)}[home])
    found = checks.check_files(pretended(state))
    assert found.text == f"there is no state folder {state if shown == 'whole' else shown}"


def test_secrets_of_another_user_are_a_failure_and_none_to_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "pepper").touch(mode=0o600)
    here, owner = pretended(tmp_path), tmp_path.stat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 4242)
    expected = f"{tmp_path} belongs to another user", f"change its owner: sudo chown -R $(id -un) '{tmp_path}'"
    assert seen(checks.check_files(here)) == ("fail", *expected)
    if owner == 0:
        os.chown(tmp_path / "pepper", 4242, -1)
        os.chown(tmp_path, 4241, -1)
        monkeypatch.setattr("os.geteuid", lambda: 4241)
        assert checks.check_files(here).text == f"{tmp_path / 'pepper'} belongs to another user"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert checks.check_files(here).result == "ok"


def test_three_open_secrets_are_named(tmp_path: Path):
    for number in range(3):
        (tmp_path / f"{number}.key").touch()
        (tmp_path / f"{number}.key").chmod(0o644)
    found = checks.check_files(pretended(tmp_path))
    assert (found.text.count(".key"), "more" in found.text) == (3, False)
    (tmp_path / "3.key").touch()
    (tmp_path / "3.key").chmod(0o644)
    found = checks.check_files(pretended(tmp_path))
    assert (found.text.count(".key"), found.text.endswith(" and 1 more")) == (3, True)


def test_a_large_state_folder_is_looked_through_so_far(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "MAX_FILES_SEARCHED", 2)
    for number in range(3):
        (tmp_path / f"{number}.key").touch(mode=0o600)
    assert checks.check_files(pretended(tmp_path)).numbers == {"secrets": 2}
