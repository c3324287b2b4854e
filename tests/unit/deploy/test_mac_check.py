import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from deploy import mac_engine, mac_machine, mac_network, mac_pool, mac_wired_stress
from deploy.mac_check import ENTRIES, NO_MAC, Entry, main, render_report, run_entry
from deploy.outcome import Outcome, ToolError, parse_number, parse_size
from tests.effort import thin_cases
from wire.codec import WireError
from wire.units import GIB, MIB

ROOT = Path(__file__).parents[3]
PARTS = ("- **Command**:", "- **Expect**:", "- **If it differs**:")


def sections() -> dict[str, str]:
    text = (ROOT / "docs" / "macos-checklist.md").read_text()
    found = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    return {part.split("\n", 1)[0]: part.split("\n", 1)[1] for part in found}


def test_every_entry_is_documented_in_the_same_order_and_nothing_else_is():
    assert list(sections()) == [entry.id for entry in ENTRIES]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.id)
def test_an_entry_has_its_command_expectation_and_remedy(entry: Entry):
    section = sections()[entry.id]
    assert section.startswith(f"{entry.title} ({entry.mode}")
    assert [part for part in PARTS if part not in section] == []
    if entry.run is not None:
        assert f".venv/bin/python -m deploy.mac_check {entry.id}`" in section


def test_every_file_that_is_to_be_changed_exists():
    text = (ROOT / "docs" / "macos-checklist.md").read_text()
    named = set(re.findall(r"`((?:coordinator|node|router|wire)/[\w/]+\.py)`", text))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac can run it")
def test_other_systems_get_an_error():
    done = subprocess.run([sys.executable, "-m", "deploy.mac_check"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", NO_MAC + "\n")


@pytest.mark.parametrize(
    "check",
    [
        mac_machine.check_identity,
        mac_machine.check_clocks,
        partial(mac_engine.check_footprint_falls, 64 * MIB),
        mac_network.check_notsent_lowat,
        mac_network.check_child_eof,
        *thin_cases([mac_engine.check_engine_answers, mac_engine.check_soft_end], 2),
    ],
)
def test_what_can_be_seen_on_any_system_passes_here(check):
    outcome = check()
    assert outcome.status == "pass", outcome.text


def test_the_child_holds_a_gibibyte():
    import psutil

    with mac_machine.hold_gibibyte() as pid:
        assert GIB <= psutil.Process(pid).memory_info().rss < GIB + 64 * MIB


def test_sizes_are_read_as_the_tools_write_them():
    assert (
        parse_size("python3.11 [512]: 64-bit    Footprint: 1034 MB (16384 bytes per page)", "Footprint") == 1034 * MIB
    )
    assert parse_size("Physical footprint:         1.0G\nPhysical footprint (peak):  1.2G", "Physical footprint") == GIB
    assert parse_number("Pages free:                    12345.\n", r"^Pages free:\s+(\d+)") == 12345
    with pytest.raises(ToolError, match="Footprint"):
        parse_size("nothing", "Footprint")


@pytest.mark.parametrize(
    ("reported", "wired", "system", "status"),
    [
        (107.52, None, "macOS 26.4", "pass"),
        (104.4, None, "macOS 26.4", "pass"),
        (104.2, None, "macOS 26.4", "fail"),
        (110.8, None, "macOS 26.4", "pass"),
        (110.9, None, "macOS 26.4", "fail"),
        (96, None, "macOS 26.4", "fail"),
        (96, None, "macOS 15.5", "pass"),
        (112, 112, "macOS 26.4", "pass"),
        (107.52, 112, "macOS 26.4", "fail"),
    ],
)
def test_an_assumed_metal_limit_that_is_three_per_cent_off_fails(
    reported: float, wired: int | None, system: str, status: str
):
    limit = None if wired is None else wired * GIB
    outcome = mac_machine.compare_metal(int(reported * GIB), 128 * GIB, limit, system)
    assert outcome.status == status, outcome.text
    assert f"Metal {reported:.1f} GiB" in outcome.text
    assert ("sysctl" if wired else f"guess for {system}") in outcome.text


def test_an_entry_that_raises_fails_with_the_error():
    def broken() -> Outcome:
        raise ToolError("vm_stat: not found")

    assert run_entry(Entry("x", "X", broken)) == Outcome("fail", "ToolError: vm_stat: not found")


@pytest.mark.parametrize("error", [AttributeError("no attribute rss"), WireError("unknown tag")])
def test_an_entry_that_raises_any_error_does_not_end_the_check(error: Exception):
    def broken() -> Outcome:
        raise error

    assert run_entry(Entry("x", "X", broken)) == Outcome("fail", f"{type(error).__name__}: {error}")


def test_a_coordinator_without_start_message_fails_the_check_of_the_name(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mac_pool, "CLI", (sys.executable, "-c", "import threading; threading.Event().wait()"))
    monkeypatch.setattr(mac_pool, "START_TIMEOUT_SECONDS", 0.2)
    outcome = mac_pool.check_local_name()
    assert outcome == Outcome("fail", "`cluster up` printed no NAME.local within 0.2 s")


def test_an_entry_whose_process_does_not_end_fails():
    def hang() -> Outcome:
        subprocess.run([sys.executable, "-c", "import threading; threading.Event().wait()"], timeout=0.1)
        return Outcome("pass", "")

    outcome = run_entry(Entry("x", "X", hang))
    assert outcome.status == "fail"
    assert outcome.text.startswith("TimeoutExpired")


def test_an_entry_that_can_panic_the_mac_runs_only_where_it_is_named():
    ran: list[bool] = []

    def runs() -> Outcome:
        ran.append(True)
        return Outcome("pass", "")

    risky = Entry("x", "X", runs, risky=True)
    assert (run_entry(risky).status, ran) == ("skip", [])
    assert "only by name" in run_entry(risky).text
    assert (run_entry(risky, is_named=True).status, ran) == ("pass", [True])
    assert [entry.id for entry in ENTRIES if entry.risky] == ["wired-panic", "device-error"]


def test_the_workload_of_the_panic_refuses_an_unknown_model(tmp_path: Path):
    with pytest.raises(ToolError, match="this node has no model nowhere"):
        mac_wired_stress.run_churn(tmp_path / "nowhere", "on", tmp_path / "progress")
    assert not (tmp_path / "progress").exists()


def test_the_workload_of_the_panic_runs_two_streams_and_overflows_the_prefix_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv(mac_wired_stress.MODEL_VARIABLE, raising=False)
    assert mac_wired_stress.check_wired_stress().status == "skip"
    progress = tmp_path / "progress"
    seen = mac_wired_stress.run_churn(mac_engine.MODEL, "on", progress, seconds=1.5, words=40, cache_size="1MiB")
    assert seen["requests"] >= 2
    assert seen["evictions"] >= 1
    assert progress.read_text().splitlines()[-1] == "memory.wire = on: ended well after 2 s"


def test_the_report_has_a_box_for_what_is_done_by_hand():
    automatic = Entry("a", "A", lambda: Outcome("pass", ""))
    page = render_report([(automatic, Outcome("pass", "1|2")), (ENTRIES[-1], Outcome("skip", ""))])
    assert "| a | pass | 1/2 |" in page
    assert f"| {ENTRIES[-1].id} | [ ] by hand |" in page


@pytest.mark.parametrize("entries", [("reclaimable", "rows-alone"), ("rows-alone",)])
def test_the_exit_code_and_the_report_are_those_of_the_named_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], entries: tuple[str, ...]
):
    """Without `vm_stat`, the first entry fails; on a Mac it passes."""
    report = tmp_path / "report.md"
    monkeypatch.setattr(sys, "argv", ["mac_check", *entries, "--report", str(report)])
    monkeypatch.setattr(sys, "platform", "darwin")
    code, lines = main(), capsys.readouterr().out.splitlines()
    failed = [line for line in lines if line.startswith("fail ")]
    assert [line.split()[1] for line in lines[:-1]] == list(entries)
    assert (code, lines[-1]) == (int(bool(failed)), f"{len(failed)} failed; the report is in {report}")
    assert [row.split()[1] for row in report.read_text().splitlines()[6:]] == list(entries)
    monkeypatch.setattr(sys, "argv", ["mac_check", "nothing"])
    with pytest.raises(SystemExit) as unknown:
        main()
    assert unknown.value.code == 2
