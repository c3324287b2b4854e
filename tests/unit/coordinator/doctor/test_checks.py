"""Every check on a healthy pretended Mac, on one with a single fault, and on this machine."""

import dataclasses
import json
import os
import shutil
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from coordinator.doctor.finding import Finding, compute_exit_code, fail, not_here, ok, warn
from coordinator.doctor.pool_checks import assess_dials
from coordinator.doctor.runner import CHECKS, Check, CheckResult, run_checks
from host.power import PowerState
from tests.support.pretended_mac import EXAMINED, FIREWALL, pretended
from wire.units import GIB

BY_ID = {check.id: check for check in CHECKS}
ONLY_MACOS = ("wired-limit", "local-network", "firewall", "started-from", "sleep", "filevault", "panics")
MEMORY = EXAMINED["memory"]
RECORDED = Path(__file__).parent / "panics"
PEER = {"address": "192.168.1.20:8081", "errno": 0, "seconds": 0.002, "proven": True, "error": "", "expires": None}
PMSET = "/usr/bin/pmset -g"


def test_ids_are_unique_and_plain():
    assert len(BY_ID) == len(CHECKS) >= 25
    assert all(one.replace("-", "").isalpha() and one.islower() for one in BY_ID)


def test_every_id_runs_the_check_of_its_name():
    names = {check.id: check.run.__name__.removeprefix("check_").replace("_", "-") for check in CHECKS}
    expected = {name: "log-errors" if name == "errors" else name for name in BY_ID}
    assert names == expected, "the function of the check `some-id` is called `check_some_id`"


def test_a_row_has_every_field_of_its_finding(tmp_path: Path):
    finding = warn("it is slow", "mend it", seconds=1.5, size=None)
    (one,) = run_checks(pretended(tmp_path), [Check("slow", "How fast it is", lambda _: finding)])
    row = one.to_row()
    assert 0 <= row.pop("seconds") < 5
    assert CheckResult(one.check, finding, 1.23456).to_row()["seconds"] == 1.235
    assert row == {
        "id": "slow",
        "title": "How fast it is",
        "result": "warn",
        "text": "it is slow",
        "fix": "mend it",
        "numbers": {"seconds": 1.5, "size": None},
    }


def test_nothing_is_wrong_with_a_mac_that_is_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr("sys.executable", "/opt/homebrew/bin/python3.12")
    here, asked = pretended(tmp_path), [check for check in CHECKS if check.id != "bonjour"]
    found = {one.check.id: one.finding for one in run_checks(here, asked)}
    assert {name: one for name, one in found.items() if one.result in ("warn", "fail") and name != "disk"} == {}


@pytest.mark.parametrize(
    ("check", "tools", "result", "says"),
    [
        ("system", {"/usr/bin/sw_vers": "ProductVersion: 13.6\nBuildVersion: 22G\n"}, "fail", "macOS 14 or newer"),
        ("system", {"/usr/bin/sw_vers": None}, "warn", "sw_vers"),
        ("wired-limit", {"/usr/sbin/sysctl -n iogpu.wired_limit_mb": "126000\n"}, "fail", "wired_limit_mb=122880"),
        ("wired-limit", {"/usr/sbin/sysctl -n iogpu.wired_limit_mb": None}, "warn", "sysctl -a"),
        ("sleep", {PMSET: " sleep 10\n womp 0\n"}, "warn", "sudo pmset -a sleep 0 womp 1"),
        ("filevault", {"/usr/bin/fdesetup status": "FileVault is On.\n"}, "warn", "authrestart"),
        (
            "firewall",
            {f"{FIREWALL} --getglobalstate": "(State = 1)", f"{FIREWALL} --getblockall": "Block all ENABLED!"},
            "fail",
            "--unblockapp",
        ),
        ("firewall", {f"{FIREWALL} --getglobalstate": "(State = 1)"}, "ok", "a node only makes outgoing connections"),
    ],
)
def test_one_thing_is_wrong_with_a_mac(tmp_path: Path, check: str, tools: dict, result: str, says: str):
    found = BY_ID[check].run(pretended(tmp_path, tools))
    assert (found.result, says in f"{found.text} {found.fix}") == (result, True), found
    assert found.fix or result in ("ok", "not here")


@pytest.mark.parametrize(
    ("platform", "power", "result", "says"),
    [
        ("darwin", PowerState(False, 20.0), "warn", "on battery, 20 %"),
        ("darwin", PowerState(True, 80.0), "ok", "on mains, 80 %"),
        ("darwin", PowerState(), "warn", "pmset -g batt"),
        ("linux", PowerState(True), "ok", "on mains"),
        ("linux", PowerState(False, 20.0), "ok", "on battery, 20 %"),
        ("linux", PowerState(), "not here", "does not report its power source"),
    ],
)
def test_the_power_supply(tmp_path: Path, platform: str, power: PowerState, result: str, says: str):
    found = BY_ID["power"].run(pretended(tmp_path, platform=platform, power=power))
    assert (found.result, says in f"{found.text} {found.fix}") == (result, True), found


def test_a_laptop_may_sleep(tmp_path: Path):
    found = BY_ID["sleep"].run(pretended(tmp_path, {PMSET: " sleep 10\n womp 0\n"}, power=PowerState(True, 80.0)))
    assert (found.result, "a laptop may sleep" in found.text) == ("ok", True)
    assert found.numbers == {"sleep": 10, "womp": 0}


def test_check_wired_limit_reports_the_safe_value_of_a_limiting_setting(tmp_path: Path):
    memory = {**MEMORY, "bound_by": "metal", "cap": 90 * GIB}
    found = BY_ID["wired-limit"].run(pretended(tmp_path, memory=memory))
    assert found.result == "warn"
    expected = "Metal's limit (the system's default, 96.0 GiB, as the device reports) determines the cap of 90.0 GiB"
    assert found.text == expected
    assert "sudo sysctl iogpu.wired_limit_mb=122880" in found.fix
    assert "sudo cluster service install --wired-limit-mb 122880" in found.fix
    assert found.numbers == {"now": 0, "safe": 120 * GIB, "cap": 90 * GIB}


def test_check_wired_limit_marks_an_unreported_limit_as_an_estimate(tmp_path: Path):
    found = BY_ID["wired-limit"].run(pretended(tmp_path, memory={**MEMORY, "metal_reported": False}))
    assert "the system's default, 96.0 GiB, estimated until an engine reports it;" in found.text


def test_a_firewall_without_a_rule_matters_where_clients_connect(tmp_path: Path):
    (tmp_path / "cluster.db").touch()
    found = BY_ID["firewall"].run(pretended(tmp_path, {f"{FIREWALL} --getglobalstate": "(State = 1)"}))
    assert found.result == "warn"
    assert "a service cannot prompt for one" in found.text


def test_local_network_privacy_is_not_a_network_that_is_down(tmp_path: Path):
    blocked = BY_ID["local-network"].run(
        pretended(tmp_path, reach={"192.168.1.20": 65}, environ={"TERM_PROGRAM": "vscode"})
    )
    assert blocked.result == "fail"
    assert "macOS blocks Visual Studio Code" in blocked.text
    assert "Privacy & Security > Local Network" in blocked.fix
    assert "sudo cluster service install" in blocked.fix
    assert compute_exit_code([("local-network", blocked), ("disk", fail("full", "clean"))], strict=False) == 10
    down = BY_ID["local-network"].run(pretended(tmp_path, reach={"192.168.1.20": 65, "192.168.1.1": 65}))
    assert down.result == "warn"
    assert BY_ID["local-network"].run(pretended(tmp_path)).result == "ok"


def test_check_local_network_fails_if_the_coordinator_of_the_node_is_blocked(tmp_path: Path):
    identity = tmp_path / "node" / "identity"
    identity.mkdir(parents=True)
    (identity / "identity.json").write_text("{}")
    here = pretended(
        tmp_path, dialled=[{**PEER, "errno": 65, "proven": None}], identity={"expires": 2e9}, reach={"192.168.1.20": 65}
    )
    assert BY_ID["local-network"].run(here).result == "fail"


@pytest.mark.parametrize("check", ONLY_MACOS)
def test_checks_of_a_mac_are_not_applicable_on_other_systems(tmp_path: Path, check: str):
    found = BY_ID[check].run(pretended(tmp_path, platform="linux"))
    assert found.result == "not here"
    assert "macOS" in found.text


def reports(state: Path, *names: str) -> None:
    """Write recorded reports where macOS stores them, the first a day old and each further one a day older."""
    folder = state / "Library" / "Logs" / "DiagnosticReports"
    folder.mkdir(parents=True)
    for days, name in enumerate(names, 1):
        shutil.copy(RECORDED / name, folder)
        old = time.time() - days * 86400
        os.utime(folder / name, (old, old))


GPU, GROUP = "panic-full-2026-04-03-235119.0002.panic", "panic-full-2026-05-10-195501.0002.panic"
WATCHDOG, WIRED = "panic-full-2026-05-12-070000.0002.panic", "Kernel_2026-05-13-080000_studio.panic"


@pytest.mark.parametrize(
    ("names", "result", "newest", "says", "of_gpu"),
    [
        ((GPU, GROUP), "fail", GPU, '"completeMemory() prepare count underflow" @IOGPUMemory.cpp:550', 2),
        ((GROUP, GPU), "fail", GROUP, '"IOGPUGroupMemory::remove_memory_object() memory object not found"', 2),
        ((WATCHDOG, GPU), "fail", GPU, '"completeMemory() prepare count', 1),
        ((WIRED,), "fail", WIRED, "vm_page_unwire: page 0xfffffe0000000005 is not wired", 1),
        ((WATCHDOG,), "warn", WATCHDOG, "userspace watchdog timeout: no successful checkins from WindowServer", 0),
    ],
)
def test_check_panics_reports_date_and_remedy_of_the_newest_panic(
    tmp_path: Path, names: tuple[str, ...], result: str, newest: str, says: str, of_gpu: int
):
    reports(tmp_path, *names)
    found = BY_ID["panics"].run(pretended(tmp_path))
    assert (found.result, found.numbers["panics"], found.numbers["of_gpu"]) == (result, len(names), of_gpu)
    at = (tmp_path / "Library" / "Logs" / "DiagnosticReports" / newest).stat().st_mtime
    date = f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d}"
    assert f"the newest {newest} of {date}: {says}" in found.text
    for step in ('memory.wire = "off"', "memory.cap"):
        assert (step in found.fix) is (result == "fail")


def test_check_panics_warns_of_a_folder_that_cannot_be_listed(tmp_path: Path):
    folder = tmp_path / "Library" / "Logs" / "DiagnosticReports"
    folder.parent.mkdir(parents=True)
    folder.touch()
    found = BY_ID["panics"].run(pretended(tmp_path))
    assert (found.result, found.text) == ("warn", "the panic reports cannot be read: Not a directory")


def test_check_panics_ignores_old_reports_and_warns_of_unreadable_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert BY_ID["panics"].run(pretended(tmp_path)).result == "ok"
    reports(tmp_path, GPU)
    folder = tmp_path / "Library" / "Logs" / "DiagnosticReports"
    os.utime(folder / GPU, (1, 1))
    found = BY_ID["panics"].run(pretended(tmp_path))
    assert (found.result, found.numbers) == ("ok", {"panics": 0, "of_gpu": 0})
    now = time.time()
    monkeypatch.setattr("time.time", lambda: now)
    for ago, count in ((30 * 86400 + 10, 0), (30 * 86400 - 10, 1)):
        os.utime(folder / GPU, (now - ago, now - ago))
        assert BY_ID["panics"].run(pretended(tmp_path)).numbers["panics"] == count
    (folder / "noise.ips").write_text("panic(cpu 1 caller 0x1): IOGPU")
    (folder / GPU).write_bytes(b"\xff no panic")
    found = BY_ID["panics"].run(pretended(tmp_path))
    assert (found.result, found.numbers) == ("warn", {"panics": 1, "of_gpu": 0})
    assert found.text.endswith(": no message")
    (folder / "empty.panic").mkdir()
    found = BY_ID["panics"].run(pretended(tmp_path))
    assert found.result == "warn"
    assert "sudo" in found.fix


def test_assess_dials_of_an_unexpected_peer_exits_with_pin():
    found = assess_dials([{**PEER, "proven": False, "error": "self-signed certificate in certificate chain"}])
    assert found.result == "fail"
    assert compute_exit_code([("coordinator", found)], strict=False) == 9
    assert assess_dials([{**PEER, "errno": 111, "proven": None, "error": "Connection refused"}, PEER]).result == "ok"
    lost = assess_dials([{**PEER, "errno": 111, "proven": None, "error": "Connection refused"}])
    assert (lost.result, compute_exit_code([("coordinator", lost)], strict=False)) == ("fail", 6)


def test_cluster_checks_are_not_applicable_without_a_cluster(tmp_path: Path):
    for check in ("coordinator", "certificates", "clock", "protocol", "identity"):
        assert BY_ID[check].run(pretended(tmp_path)).result == "not here", check


def test_a_coordinator_that_does_not_run_is_a_failure_with_a_next_step(tmp_path: Path):
    (tmp_path / "cluster.db").touch()
    stopped = BY_ID["coordinator"].run(pretended(tmp_path))
    assert stopped.result == "fail"
    assert "cluster up" in stopped.fix
    (tmp_path / "run.json").write_text(json.dumps({"url": "http://127.0.0.1:9", "secret": "mp_x_y"}))
    (tmp_path / "run.json").chmod(0o600)
    dead = BY_ID["coordinator"].run(pretended(tmp_path))
    assert dead.result == "fail"
    assert "cannot be reached" in dead.text
    for check in ("protocol", "clock"):
        assert BY_ID[check].run(pretended(tmp_path)).result == "not here"


def test_check_files_names_secrets_that_other_users_can_read(tmp_path: Path):
    (tmp_path / "pepper").write_text("x")
    (tmp_path / "pepper").chmod(0o644)
    found = BY_ID["files"].run(pretended(tmp_path))
    assert (found.result, found.numbers["open"]) == ("fail", 1)
    assert "chmod -R go-rwx" in found.fix
    (tmp_path / "pepper").chmod(0o600)
    assert BY_ID["files"].run(pretended(tmp_path)).result == "ok"


def test_check_identity_reports_a_copied_identity(tmp_path: Path):
    (tmp_path / "node" / "identity").mkdir(parents=True)
    (tmp_path / "node" / "identity" / "identity.json").write_text("{}")
    found = BY_ID["identity"].run(pretended(tmp_path, identity_error="it belongs to another machine"))
    assert found.result == "fail"
    assert "another machine" in found.text


def test_the_clock_of_the_last_link_counts_on_a_node(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    for skew, result in ((0.2, "ok"), (-7.5, "warn"), (4000, "fail")):
        (tmp_path / "logs" / "node.log").write_text(json.dumps({"event": "linked", "skew": skew}) + "\n")
        assert BY_ID["clock"].run(pretended(tmp_path)).result == result


def test_errors_of_the_last_hour_are_counted(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    line = {"event": "denied", "level": "error", "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
    (tmp_path / "logs" / "node.log").write_text(
        f"{json.dumps(line)}\nno json\n{json.dumps({**line, 'timestamp': '2020'})}\n"
    )
    found = BY_ID["errors"].run(pretended(tmp_path))
    assert (found.result, found.numbers["errors"]) == ("warn", 1)


# all of them together


def test_a_check_that_hangs_or_breaks_delays_no_other_check(tmp_path: Path):
    never = threading.Event()

    def hang(_):
        never.wait()
        return ok("")

    def broken(_):
        raise RuntimeError("boom")

    checks = [Check("hangs", "x", hang), Check("breaks", "x", broken), Check("works", "x", lambda _: ok("fine"))]
    examined = {
        one.check.id: one for one in run_checks(dataclasses.replace(pretended(tmp_path), timeout_seconds=1.0), checks)
    }
    assert [one.daemon for one in threading.enumerate() if one.name == "hangs"] == [True]
    never.set()
    found = {name: one.finding for name, one in examined.items()}
    assert 1.0 <= examined["hangs"].seconds < 60
    assert 0 < examined["works"].seconds < 60
    assert found["hangs"].result == "warn"
    assert "in time" in found["hangs"].text
    assert found["breaks"].result == "warn"
    assert "RuntimeError: boom" in found["breaks"].text
    assert found["works"].result == "ok"


def test_checks_run_at_the_same_time(tmp_path: Path):
    together = threading.Barrier(2, timeout=60.0)

    def meet(_):
        together.wait()
        return ok("")

    checks = [Check("one", "x", meet), Check("other", "x", meet)]
    found = run_checks(dataclasses.replace(pretended(tmp_path), timeout_seconds=60.0), checks)
    assert [one.finding.result for one in found] == ["ok", "ok"]


def test_all_checks_share_one_time_limit(tmp_path: Path):
    never = threading.Event()

    def hang(_):
        never.wait()
        return ok("")

    checks = [Check(f"hangs-{number}", "x", hang) for number in range(12)]
    began = time.monotonic()
    found = list(run_checks(dataclasses.replace(pretended(tmp_path), timeout_seconds=0.5), checks))
    never.set()
    assert [one.finding.result for one in found] == ["warn"] * 12
    assert time.monotonic() - began < 12 * 0.5


def test_exit_codes():
    assert compute_exit_code([("a", ok("")), ("b", not_here(""))], strict=True) == 0
    assert compute_exit_code([("a", warn("", "x"))], strict=False) == 0
    assert compute_exit_code([("a", warn("", "x"))], strict=True) == 1
    assert compute_exit_code([("a", ok("")), ("b", warn("", "x"))], strict=True) == 1
    assert compute_exit_code([("a", warn("", "x")), ("b", fail("", "x"))], strict=True) == 6
    other = ("coordinator", Finding("fail", "", "", intercepted=True))
    assert compute_exit_code([("a", ok("")), other], strict=True) == 9
    assert compute_exit_code([other, ("local-network", fail("", "x"))], strict=True) == 10
    assert compute_exit_code([("local-network", warn("", "x"))], strict=False) == 0


def test_check_settings_warns_of_changes_since_the_start(tmp_path: Path):
    rows = [
        {"key": "memory.cap", "value": "80%", "origin": "--set", "description": ""},
        {"key": "sharing.when", "value": "always", "origin": "default", "description": ""},
    ]
    given = BY_ID["settings"].run(pretended(tmp_path, running={"settings": rows, "drift": []}))
    assert given.result == "ok"
    assert (
        given.text
        == "settings that are not the default: 1; the running processes have memory.cap from flags or their environment"
    )
    drift = [{"key": "sharing.when", "running": "always", "now": "idle"}]
    found = BY_ID["settings"].run(pretended(tmp_path, running={"settings": rows, "drift": drift}))
    assert found.result == "warn"
    assert "config.toml has sharing.when = idle, the running process uses always" in found.text
    assert "service restart" in found.fix
