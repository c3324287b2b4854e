"""Entries of the Mac check about the machine, with fixed readings and the output of tools on a Mac."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from deploy import mac_machine
from deploy.outcome import ToolError, is_near
from host.power import PowerState
from wire.units import GIB, MIB

FOOTPRINT, VMMAP = "/usr/bin/footprint", "/usr/bin/vmmap"
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                1000.
Pages active:                              4000.
Pages inactive:                            3000.
Pages speculative:                          500.
Pages throttled:                              0.
"""
THEIRS = (1000 + 500 + 3000 + 2000) * 16384
"""Bytes that `VM_STAT` says can be freed."""
Tools = Callable[..., None]


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Tools:
    """Return a function that sets the output of tools by their path. A tool without output fails."""

    def provide(**readings: Any) -> None:
        outputs: dict[str, str] = readings.pop("outputs", {})

        def run_tool(*command: str) -> str:
            found = outputs.get(command[0]) or outputs.get(command[-1])
            if found is None:
                raise ToolError(f"{command[0]}: not found")
            return found

        @contextmanager
        def hold() -> Generator[int]:
            yield 7

        system = SimpleNamespace(
            read_footprint=lambda pid: readings.get("footprint") if pid == 7 else None,
            read_wired_limit=lambda: readings.get("wired"),
            read_chip_name=lambda: readings.get("chip", ""),
        )
        monkeypatch.setattr(mac_machine, "run_tool", run_tool)
        monkeypatch.setattr(mac_machine, "hold_gibibyte", hold)
        monkeypatch.setattr(mac_machine, "LibSystem", lambda: system)
        monkeypatch.setattr(mac_machine, "describe_machine", lambda: SimpleNamespace(memory=readings.get("memory")))
        monkeypatch.setattr(mac_machine, "read_virtual_memory", lambda: readings.get("pages"))

    return provide


def print_footprint(megabytes: int) -> str:
    return f"python3.11 [7]: 64-bit    Footprint: {megabytes} MB (16384 bytes per page)"


def print_vmmap(gigabytes: float) -> str:
    return f"Physical footprint:         {gigabytes}G\nPhysical footprint (peak):  9.0G"


@pytest.mark.parametrize(
    ("ours", "footprint", "vmmap", "status"),
    [
        (1034 * MIB, 1034, 1.0, "pass"),
        (1034 * MIB, None, 1.0, "pass"),
        (1034 * MIB, 1034, None, "pass"),
        (1034 * MIB, None, None, "skip"),
        (None, 1034, 1.0, "fail"),
        (GIB - 1, 1024, 1.0, "fail"),
        (GIB + 256 * MIB, 1280, 1.25, "pass"),
        (GIB + 257 * MIB, 1281, 1.25, "fail"),
        (1034 * MIB, 1101, 1.0, "fail"),
        (1034 * MIB, 1034, 1.1, "fail"),
    ],
)
def test_a_footprint_is_a_gibibyte_and_near_to_that_of_each_tool(
    tools: Tools, ours: int | None, footprint: int | None, vmmap: float | None, status: str
):
    outputs = {FOOTPRINT: footprint and print_footprint(footprint), VMMAP: vmmap and print_vmmap(vmmap)}
    tools(footprint=ours, outputs=outputs)
    outcome = mac_machine.check_footprint()
    assert outcome.status == status, outcome.text
    if ours is not None:
        assert [f"no answer: {tool}" in outcome.text for tool in outputs] == [not output for output in outputs.values()]
    assert ("run the check with sudo" in outcome.text) is (status == "skip")


@pytest.mark.parametrize(("ours", "status"), [(128 * GIB, "pass"), (128 * GIB - 1, "fail")])
def test_the_ram_is_that_of_sysctl(tools: Tools, ours: int, status: str):
    tools(memory=ours, outputs={"hw.memsize": f"{128 * GIB}\n"})
    assert mac_machine.check_total_memory().status == status


@pytest.mark.parametrize(
    ("ours", "megabytes", "status"),
    [
        (None, 0, "pass"),
        (100 * MIB, 100, "pass"),
        (None, 100, "fail"),
        (100 * MIB, 0, "fail"),
        (101 * MIB, 100, "fail"),
    ],
)
def test_the_wired_limit_is_that_of_sysctl_where_0_is_none(tools: Tools, ours: int | None, megabytes: int, status: str):
    tools(wired=ours, outputs={"iogpu.wired_limit_mb": f"{megabytes}\n"})
    assert mac_machine.check_wired_limit().status == status


def test_the_metal_limit_is_that_of_a_child_and_skipped_without_mlx(tools: Tools):
    tools(memory=128 * GIB, wired=112 * GIB, outputs={mac_machine.METAL_PROGRAM: f"{112 * GIB}\n"})
    assert mac_machine.check_metal_share().status == "pass"
    tools(memory=128 * GIB, wired=100 * GIB, outputs={mac_machine.METAL_PROGRAM: f"{112 * GIB}\n"})
    assert mac_machine.check_metal_share().status == "fail"
    tools(memory=128 * GIB)
    skipped = mac_machine.check_metal_share()
    assert (skipped.status, "install the extra `node`" in skipped.text) == ("skip", True)


@pytest.mark.parametrize(
    ("available", "active", "status"),
    [
        (THEIRS - 1000, 2000, "pass"),
        (int(THEIRS * 0.951), 0, "pass"),
        (int(THEIRS * 0.949), 0, "fail"),
        (int(THEIRS * 1.06), 0, "fail"),
        (int(THEIRS * 0.8), int(THEIRS * 0.4), "pass"),
    ],
)
def test_reclaimable_memory_is_near_to_the_pages_of_vm_stat(tools: Tools, available: int, active: int, status: str):
    tools(pages=SimpleNamespace(available=available, active=active), outputs={"/usr/bin/vm_stat": VM_STAT})
    assert mac_machine.check_reclaimable().status == status
    tools(pages=None, outputs={"/usr/bin/vm_stat": VM_STAT})
    assert mac_machine.check_reclaimable().status == "fail"


@pytest.mark.parametrize(
    ("ours", "theirs", "status"),
    [("Apple M4 Max", "Apple M4 Max", "pass"), ("Apple M4", "Apple M4 Max", "fail"), ("Intel", "Intel", "fail")],
)
def test_the_chip_is_that_of_sysctl_and_from_apple(tools: Tools, ours: str, theirs: str, status: str):
    tools(chip=ours, outputs={"machdep.cpu.brand_string": f"{theirs}\n"})
    assert mac_machine.check_chip().status == status


@pytest.mark.parametrize(
    ("state", "status", "text"),
    [
        (PowerState(True, 80.0, 1.5), "pass", "plugged True, battery 80 %, last input 1.5 s ago"),
        (PowerState(False, None, 0.0), "pass", "plugged False, no battery, last input 0.0 s ago"),
        (PowerState(None, 80.0, 1.5), "fail", "plugged None, battery 80 %, last input 1.5 s ago"),
        (PowerState(True, 80.0, None), "fail", "plugged True, battery 80 %, last input unknown"),
    ],
)
def test_power_needs_the_source_and_the_last_input(
    monkeypatch: pytest.MonkeyPatch, state: PowerState, status: str, text: str
):
    monkeypatch.setattr(mac_machine, "read_power", lambda: state)
    outcome = mac_machine.check_power()
    assert (outcome.status, outcome.text) == (status, text)


@pytest.mark.parametrize(("other", "near"), [(94, True), (93, False), (106, True), (107, False), (100, True)])
def test_sizes_are_near_within_a_share_of_the_larger(other: int, near: bool):
    assert is_near(100, other, 0.06) is near
