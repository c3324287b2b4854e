"""The report of a machine: settings with their sources, drift, memory limits, and answers of the coordinator."""

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.tls.cluster_ca import ClusterCa
from host.private_files import create_private_folder
from node.agent.identity import NodeIdentity, new_request, store_address, store_identity
from node.agent.machine_id import compute_machine_id
from node.inspect import report as report_module
from node.inspect.report import (
    dial_coordinator,
    main,
    report_identity,
    report_machine,
    report_memory,
    report_running,
    report_settings,
)
from node.inspect.running_settings import publish_settings
from node.memory.cap import MachineBounds, MetalDevice
from node.memory.metal_limit import write_device
from node.memory.sensor import describe_machine
from node.settings import SECTIONS, resolve_settings
from tests.support.cluster.enrolment import Wall, opened
from wire.identity import NodeId
from wire.units import GIB

SCRIPTED = 'engine.kind = "scripted"\nengine.scripted.memory = "32GiB"\n'


def find_rows(report: dict[str, Any]) -> dict[str, tuple[object, object]]:
    """Return value and origin of each setting that is no default, by key."""
    rows = report["settings"]
    return {row["key"]: (row["value"], row["origin"]) for row in rows if row["origin"] != "default"}


@contextlib.contextmanager
def running_node(state: Path, **layer: object) -> Iterator[None]:
    """Hold the lock of a node in a state folder, and publish its settings."""
    folder = create_private_folder(state / "node")
    settings = resolve_settings([("config.toml", {key.replace("__", "."): layer[key] for key in layer})])
    with (folder / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.write("7\n")
        file.flush()
        with publish_settings(folder, 7, settings):
            yield


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the settings that tests/conftest.py puts into the environment; restore it after the test."""
    for name in [name for name in os.environ if name.startswith("MACPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HUB_CACHE", "/hub-of-environment")


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(arguments) == 0
    return json.loads(capsys.readouterr().out)


def test_settings_come_from_file_environment_and_pairs_in_that_order(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[memory]\ncap = "9GiB"\nwire = "off"\nmargin = "1GiB"\n[router]\npolicy = "balanced"\n')
    environ = {"MACPOOL_MEMORY__CAP": "8GiB", "MACPOOL_MEMORY__MARGIN": "2GiB", "MACPOOL_ROUTER__POLICY": "x"}
    report = report_settings(file, environ, ["memory.cap=7GiB", "sharing.min_battery_percent=40"])
    assert (report["error"], report["faults"]) == ("", [])
    assert find_rows(report) == {
        "memory.cap": ("7GiB", "--set"),
        "memory.margin": ("2GiB", "environment"),
        "memory.wire": ("off", str(file)),
        "sharing.min_battery_percent": (40, "--set"),
    }
    assert report["made"].memory.cap == "7GiB"
    assert find_rows(report_settings(tmp_path / "absent.toml", {}, [])) == {}


def test_each_invalid_setting_is_a_fault_and_the_others_stay_in_force(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[memory]\ncap = "much"\nmargin = "1GiB"\nmergin = 1\n')
    report = report_settings(file, {"MACPOOL_SHARING__MIN_BATTERY_PERCENT": "x"}, ["engine.kind=other"])
    assert "memory.mergin" in report["error"]
    faults = {fault["key"]: fault for fault in report["faults"]}
    assert set(faults) == {"memory.cap", "memory.mergin", "sharing.min_battery_percent", "engine.kind"}
    assert faults["memory.mergin"]["near"] == "memory.margin"
    assert "'much'" in faults["memory.cap"]["text"]
    assert find_rows(report) == {"memory.margin": ("1GiB", str(file))}


def test_a_file_that_cannot_be_read_leaves_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    for content in (b"[memory", b"\xff"):
        file.write_bytes(content)
        report = report_settings(file, {"MACPOOL_MEMORY__CAP": "8GiB"}, [])
        assert report["error"]
        assert (report["faults"], find_rows(report)) == ([], {})
    file.write_text('memory.tier = "safe"\n')
    report = report_settings(file, {"MACPOOL_MEMORY__CAP": "8GiB"}, [])
    assert "contradicts" in report["error"]
    assert (report["faults"], find_rows(report)) == ([], {}), "each of the two would be valid alone"
    report = report_settings(tmp_path, {}, [])
    assert "directory" in report["error"].lower()
    report = report_settings(tmp_path / "absent", {}, ["memory.cap"])
    assert (report["error"], report["faults"]) == ("--set takes key=value, not 'memory.cap'", [])


def test_the_drift_of_a_running_node_is_what_a_restart_with_the_file_changes(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    now = resolve_settings([(str(file), {"memory.cap": "9GiB"}), ("--set", {"memory.margin": "1GiB"})])
    assert [row["drift"] for row in [report_running(now, tmp_path / "absent.toml")]] == [
        [
            {"key": "memory.cap", "running": "9GiB", "now": "auto"},
            {"key": "memory.tier", "running": "custom", "now": "balanced"},
        ]
    ]
    file.write_text('memory.cap = "8GiB"\nmemory.margin = "2GiB"\nmemory.tier = "custom"\nhttp.port = 1\n')
    report = report_running(now, file)
    assert report["drift"] == [{"key": "memory.cap", "running": "9GiB", "now": "8GiB"}]
    assert find_rows(report)["memory.cap"] == ("9GiB", str(file))
    for content in ("memory.cap = ", "memory.cop = 1", 'sharing.min_battery_percent = "x"'):
        file.write_text(content)
        report = report_running(now, file)
        assert report["drift"] == []
        assert find_rows(report)["memory.margin"] == ("1GiB", "--set")
    assert report_running(now, tmp_path)["drift"] == []


def test_the_program_prints_settings_and_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").write_text(SCRIPTED + f'models.huggingface_cache = "{tmp_path / "hub"}"\n')
    report = printed(capsys, "--state", str(tmp_path), "--set", "memory.cap=8GiB", "--set", "memory.margin=1GiB")
    assert (report["error"], report["running"], report["memory"]["cap"]) == ("", None, 8 * GIB)
    assert report["memory"]["margin"] == GIB
    assert report["hardware"]["memory"] == 32 * GIB
    assert report["folders"][-1] == str(tmp_path / "hub"), "child processes inherit the setting"
    assert "made" not in report
    other = tmp_path / "other.toml"
    other.write_text('memory.cap = "7GiB"\n')
    report = printed(capsys, "--state", str(tmp_path), "--file", str(other), "--settings-only")
    assert find_rows(report)["memory.cap"] == ("7GiB", str(other))
    assert set(report) == {"error", "faults", "settings", "running", "unsuitable"}
    assert report["unsuitable"] == ""
    other.write_text(SCRIPTED + 'memory.cap = "33GiB"\n')
    report = printed(capsys, "--state", str(tmp_path), "--file", str(other), "--settings-only")
    assert report["unsuitable"] == "setting memory.cap: 33.0 GiB is more than the RAM of 32.0 GiB"
    other.write_text('memory.cap = "no size"\n')
    report = printed(capsys, "--state", str(tmp_path), "--file", str(other), "--settings-only")
    assert ("no size" in report["error"], report["unsuitable"]) == (True, "")


def test_the_program_reports_the_machine_with_the_settings_of_the_running_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").write_text(SCRIPTED + 'memory.cap = "8GiB"\n')
    running = {"engine__kind": "scripted", "engine__scripted__memory": "64GiB", "memory__cap": "9GiB"}
    with running_node(tmp_path, **running):
        report = printed(capsys, "--state", str(tmp_path))
    assert (report["memory"]["cap"], report["memory"]["total"]) == (9 * GIB, 64 * GIB)
    assert {one["key"]: (one["running"], one["now"]) for one in report["running"]["drift"]} == {
        "memory.cap": ("9GiB", "8GiB"),
        "memory.tier": ("custom", "balanced"),
        "engine.scripted.memory": ("64GiB", "32GiB"),
    }
    assert find_rows(report)["memory.cap"][0] == "8GiB", "with these settings a node would start"


@pytest.mark.parametrize("arguments", [(), ("--state", "x", "y"), ("--sta", "x"), ("--state", "x", "--settings")])
def test_invalid_arguments_end_with_exit_code_2(arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


def test_the_machine_is_reported_with_its_folders_and_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    layer: dict[str, object] = {
        "engine.kind": "scripted",
        "engine.scripted.memory": "32GiB",
        "node.machine": "m-7",
        "models.folders": [str(tmp_path / "there"), "~/gone", str(tmp_path / "file")],
        "worker.enabled": False,
        "worker.ray_ports": 31000,
    }
    settings = resolve_settings([("x", layer)]).value
    report = report_machine(tmp_path, settings)
    assert report["machine"] == compute_machine_id("m-7")
    assert report["hardware"] == {
        name: getattr(describe_machine(32 * GIB), name) for name in ("chip", "memory", "cores", "system", "python")
    }
    assert report["engine"] == "scripted"
    assert report["video"] == {"enabled": False, "first_port": 31000}
    there, gone, file = str(tmp_path / "there"), str(Path.home() / "gone"), str(tmp_path / "file")
    assert report["folders"] == [there, gone, file, "/hub-of-environment"]
    assert report["missing_folders"] == [gone, file], "models are read from folders only"
    assert report["sections"] == sorted(SECTIONS)
    assert (report["identity"], report["identity_error"], report["dialled"]) == (None, "", [])
    assert report["memory"]["metal_reported"] is False
    device = MetalDevice(20 * GIB)
    write_device(tmp_path / "node", describe_machine(32 * GIB), device)
    settings = resolve_settings([("x", {**layer, "models.use_huggingface_cache": False})]).value
    report = report_machine(tmp_path, settings)
    assert (report["memory"]["metal_reported"], report["memory"]["metal"]) == (True, 20 * GIB)
    assert report["folders"] == [there, gone, file]


def test_memory_is_reported_with_cap_margin_and_warnings() -> None:
    bounds = MachineBounds(64 * GIB, 48 * GIB, 60 * GIB)
    report = report_memory(resolve_settings([]).value, bounds)
    assert {name: report[name] for name in ("total", "metal", "container", "safe", "error")} == {
        "total": 64 * GIB,
        "metal": 48 * GIB,
        "container": 60 * GIB,
        "safe": 56 * GIB,
        "error": "",
    }
    assert (report["cap"], report["bound_by"], report["warning"]) == (48 * GIB, "metal", "")
    assert "sysctl" in report["remedy"]
    assert (report["margin_measured"], report["guard"]) == (True, "on")
    assert 0 < report["margin"] < 48 * GIB
    layer: dict[str, object] = {"memory.cap": "50GiB", "memory.margin": "0", "memory.guard": "off"}
    report = report_memory(resolve_settings([("x", layer)]).value, bounds)
    assert (report["total"], report["safe"], "cap" in report) == (64 * GIB, int(0.95 * 64 * GIB), False)
    assert "above the Metal limit" in report["error"]
    layer["memory.allow_above_metal_limit"] = True
    report = report_memory(resolve_settings([("x", layer)]).value, bounds)
    assert (report["error"], report["cap"], report["margin"]) == ("", 50 * GIB, 0)
    assert "above the Metal limit" in report["warning"], "the warning of the cap comes first"
    assert (report["margin_measured"], report["guard"], report["bound_by"]) == (False, "off", "setting")
    layer["memory.cap"] = "40GiB"
    report = report_memory(resolve_settings([("x", layer)]).value, bounds)
    assert report["warning"].startswith("memory.margin is 0")
    report = report_memory(resolve_settings([("x", {"memory.tier": "safe"})]).value, bounds)
    assert report["safe"] == 52 * GIB
    report = report_memory(resolve_settings([("x", {"memory.cap": "40GiB"})]).value, bounds)
    assert report["margin_measured"] is True, "the cap is set, the margin is not"


def joined(folder: Path, authority: ClusterCa, *addresses: str) -> NodeIdentity:
    """Store the identity of a node of a cluster, which knows these addresses."""
    request = new_request("mini")
    signed = authority.sign_request(request.csr, NodeId("n-1"), "mini")
    identity = store_identity(folder, request, signed, authority.cluster, authority.ca, "m1")
    for address in reversed(addresses):
        identity = store_address(identity, address)
    return identity


@contextlib.contextmanager
def silent_server() -> Iterator[str]:
    """Accept connections without an answer; yield the address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


async def test_the_identity_is_reported_with_the_answers_of_all_its_addresses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report_module, "DIAL_TIMEOUT_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refusing = f"127.0.0.1:{closed.getsockname()[1]}"
    with silent_server() as silent:
        async with opened(tmp_path / "c") as door:
            authority = door.authority
            joined(tmp_path / "n", authority, door.address, refusing, silent, "a b", "a..b:1")
            report = await asyncio.to_thread(report_identity, tmp_path / "n", "m1")
    identity = report["identity"]
    assert report["identity_error"] == ""
    assert (identity["node"], identity["name"], identity["cluster"]) == ("n-1", "mini", authority.cluster)
    assert time.time() + 86400 < identity["expires"] < identity["authority_expires"]
    proven, refused, timeout, invalid, impossible = report["dialled"]
    assert [one["address"] for one in report["dialled"]] == [door.address, refusing, silent, "a b", "a..b:1"]
    assert (proven["errno"], proven["proven"], proven["error"]) == (0, True, "")
    assert 0 < proven["seconds"] < 30
    assert proven["expires"] > time.time()
    assert (refused["errno"], refused["seconds"], refused["proven"]) == (errno.ECONNREFUSED, None, None)
    assert refused["error"] == os.strerror(errno.ECONNREFUSED)
    assert (timeout["errno"], timeout["proven"], timeout["error"]) == (0, None, "no answer")
    assert (invalid["errno"], invalid["proven"], invalid["expires"]) == (None, None, None)
    assert "not an address" in invalid["error"]
    assert (impossible["errno"], "label empty" in impossible["error"]) == (None, True)


async def test_a_server_of_another_cluster_or_without_tls_proves_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        other = joined(tmp_path / "n", ClusterCa(tmp_path / "other", time.time), door.address)
        seen = await asyncio.to_thread(dial_coordinator, other, door.address)
        assert (seen["errno"], seen["proven"], seen["expires"]) == (0, False, None)
        assert "self-signed" in seen["error"] or "unable to get" in seen["error"]
        member = joined(tmp_path / "m", door.authority)

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)

        with socket.create_server(("127.0.0.1", 0)) as server:
            thread = threading.Thread(target=answer)
            thread.start()
            seen = await asyncio.to_thread(dial_coordinator, member, f"127.0.0.1:{server.getsockname()[1]}")
            await asyncio.to_thread(thread.join)
    assert (seen["errno"], seen["proven"]) == (0, None), "the connection itself succeeded"
    assert seen["error"]


async def test_a_wrong_clock_does_not_make_the_coordinator_a_stranger(tmp_path: Path) -> None:
    async with opened(tmp_path / "c", Wall(time.time() + 5 * 86400)) as door:
        member = joined(tmp_path / "n", door.authority, door.address)
        seen = await asyncio.to_thread(dial_coordinator, member, door.address)
    assert (seen["errno"], seen["proven"]) == (0, None), "its certificate is valid from a later time on"
    assert "correct it" in seen["error"]


def test_an_identity_of_another_machine_is_an_error_and_no_address_is_dialled(tmp_path: Path) -> None:
    with silent_server() as silent:
        joined(tmp_path / "n", ClusterCa(tmp_path / "c", time.time), silent)
        report = report_identity(tmp_path / "n", "m2")
    assert (report["identity"], report["dialled"]) == (None, [])
    assert "another machine" in report["identity_error"]
    joined(tmp_path / "o", ClusterCa(tmp_path / "c", time.time))
    report = report_identity(tmp_path / "o", "m1")
    assert (report["identity"]["name"], report["dialled"]) == ("mini", []), "no address is known"
