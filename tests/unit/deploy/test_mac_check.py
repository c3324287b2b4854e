import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy import mac_engine, mac_machine, mac_network
from deploy.mac_check import ENTRIES, NO_MAC, Entry, report, run
from deploy.outcome import Outcome, ToolError, number_in, size_in
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
def test_an_entry_says_command_expectation_and_what_to_change(entry: Entry):
    section = sections()[entry.id]
    assert section.startswith(f"{entry.title} ({entry.how}")
    assert [part for part in PARTS if part not in section] == []
    if entry.how == "automatic":
        assert f"`.venv/bin/python -m deploy.mac_check {entry.id}`" in section


def test_every_file_that_is_to_be_changed_exists():
    text = (ROOT / "docs" / "macos-checklist.md").read_text()
    named = set(re.findall(r"`((?:coordinator|node|router|wire)/[\w/]+\.py)`", text))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


@pytest.mark.skipif(sys.platform == "darwin", reason="a Mac can run it")
def test_other_systems_are_told_that_it_needs_a_mac():
    done = subprocess.run([sys.executable, "-m", "deploy.mac_check"], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", NO_MAC + "\n")


@pytest.mark.parametrize(
    "check", [mac_machine.identity, mac_network.notsent_lowat, mac_network.child_eof, mac_engine.engine_answers]
)
def test_what_can_be_seen_on_any_system_passes_here(check):
    outcome = check()
    assert outcome.status == "pass", outcome.text


def test_the_child_holds_what_it_promises():
    import psutil

    with mac_machine.gibibyte() as pid:
        assert GIB <= psutil.Process(pid).memory_info().rss < GIB + 64 * MIB


def test_sizes_are_read_as_the_tools_write_them():
    assert size_in("python3.11 [512]: 64-bit    Footprint: 1034 MB (16384 bytes per page)", "Footprint") == 1034 * MIB
    assert size_in("Physical footprint:         1.0G\nPhysical footprint (peak):  1.2G", "Physical footprint") == GIB
    assert number_in("Pages free:                    12345.\n", r"^Pages free:\s+(\d+)") == 12345
    with pytest.raises(ToolError, match="Footprint"):
        size_in("nothing", "Footprint")


def test_an_entry_that_breaks_fails_and_says_why():
    def broken() -> Outcome:
        raise ToolError("vm_stat: not found")

    assert run(Entry("x", "X", broken)) == Outcome("fail", "ToolError: vm_stat: not found")


def test_the_report_has_a_box_for_what_is_done_by_hand():
    automatic = Entry("a", "A", lambda: Outcome("pass", ""))
    page = report([(automatic, Outcome("pass", "1|2")), (ENTRIES[-1], Outcome("skip", ""))])
    assert "| a | pass | 1/2 |" in page
    assert f"| {ENTRIES[-1].id} | [ ] by hand |" in page
