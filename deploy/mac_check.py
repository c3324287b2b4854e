"""Run the checks that need a Mac (`make mac-check`), print their outcomes, and write a report.

The page docs/macos-checklist.md describes each entry under its id: its meaning, the expected result, and the remedy for
a different result. Manual entries are in the report with a box to fill in. The exit code is 0 if no entry failed, 1 if
an entry failed, and 2 if this machine is not a Mac.
"""

import argparse
import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from deploy import apple_layouts, mac_engine, mac_machine, mac_network, mac_pool, mac_wired_stress
from deploy.outcome import Outcome, ToolError, create_outcome, create_skip, run_tool

REPORT = Path("mac-check-report.md")
NO_MAC = "this check needs a Mac: it runs on macOS on Apple silicon"


@dataclass(frozen=True, slots=True)
class Entry:
    """Entry of the Mac check: one automatic or manual check."""

    id: str
    """Name on the command line and in docs/macos-checklist.md."""
    title: str
    """Heading for a person."""
    run: Callable[[], Outcome] | None = None
    """Function that runs the check; None for a manual check."""
    risky: bool = False
    """Whether the check may panic the Mac, and therefore runs only if it is named on the command line."""

    @property
    def mode(self) -> Literal["automatic", "manual", "by name only"]:
        """How the check is run; `by name only` for a risky check."""
        return "by name only" if self.risky else "automatic" if self.run else "manual"


ENTRIES = (
    Entry("footprint", "Footprint of a process that holds 1 GiB", mac_machine.check_footprint),
    Entry("total-memory", "RAM", mac_machine.check_total_memory),
    Entry("wired-limit", "Metal's wired limit, if it was set", mac_machine.check_wired_limit),
    Entry(
        "metal-share", "The assumed value of Metal's limit before an engine reports it", mac_machine.check_metal_share
    ),
    Entry("reclaimable", "Memory that the system can free", mac_machine.check_reclaimable),
    Entry("layouts", "Layout definitions, compared with the headers of this Mac", apple_layouts.check_layouts),
    Entry("chip", "Name of the chip", mac_machine.check_chip),
    Entry("machine-id", "Identity of the machine", mac_machine.check_identity),
    Entry("clocks", "The event loop and time.monotonic use the same clock", mac_machine.check_clocks),
    Entry("notsent-lowat", "TCP_NOTSENT_LOWAT on a link", mac_network.check_notsent_lowat),
    Entry("child-eof", "The engine ends with its socket", mac_network.check_child_eof),
    Entry("local-network", "Local network privacy", mac_network.check_local_network),
    Entry("bonjour", "Bonjour, both ways, with goodbye", mac_network.check_bonjour),
    Entry("local-name", "The endpoint under NAME.local", mac_pool.check_local_name),
    Entry("trust-ca", "HTTPS with our own authority"),
    Entry("help-cpu", "CPU of cluster --help", mac_pool.check_help_cpu),
    Entry("engine", "The engine answers on Metal", mac_engine.check_engine_answers),
    Entry("engine-pressure", "A prompt that does not fit is refused, not paged"),
    Entry("interval-height", "The interval high-water mark of a footprint"),
    Entry("worker-group", "The process group of a video worker, and its start time"),
    Entry("video-worker", "A clip of Wan2.2, its peak and its wired limit"),
    Entry("local-ray", "Ray on one Mac, without open ports on the network"),
    Entry("model-trial", "The test of a model's template and tokenizer"),
    Entry("pressure-level", "The system's level of memory pressure"),
    Entry("wired-weights", "Memory that the engine keeps wired"),
    Entry(
        "wired-panic",
        "Two streams with buffer churn, unwired and wired",
        mac_wired_stress.check_wired_stress,
        risky=True,
    ),
    Entry("footprint-falls", "Time until freed memory leaves the footprint", mac_engine.check_footprint_falls),
    Entry("rows-alone", "Concurrent requests to a model that cannot be batched"),
    Entry("device-error", "A kernel that macOS ends on the GPU", mac_engine.check_device_error, risky=True),
    Entry("prefill-transients", "Temporary memory of a prefill on Metal, compared with the estimate"),
    Entry("soft-end", "A terminated engine returns its memory", mac_engine.check_soft_end),
    Entry("wired-after-end", "Wired memory after an engine with a large model ends"),
    Entry("memory-returns", "The memory of an unloaded model is free again"),
    Entry("speeds", "Cost of rows, waves of prompts and long prompts on Metal"),
    Entry("idle-agent", "CPU and wake-ups of an idle agent"),
    Entry("service", "The service under launchd"),
    Entry("doctor", "Every check of the doctor on a Mac"),
    Entry("power", "Power source, battery and last input", mac_machine.check_power),
    Entry("awake", "A Mac stays awake while it works"),
    Entry("sleep-wake", "A node sleeps and wakes"),
    Entry("join-by-code", "A second Mac joins by code"),
    Entry("pull-and-quantize", "Two Macs pull a model, and one of them quantizes it"),
    Entry("embeddings", "Embeddings of a real model during chats"),
    Entry("disk-cache", "Prompts of preempted requests return from the disk cache"),
)
"""All entries, in the order in which they run."""


def run_entry(entry: Entry, *, is_named: bool = False) -> Outcome:
    """Run one entry and return its outcome.

    The outcome is `skip` for a manual entry, and for a risky entry that is not named on the command line (`is_named`).
    The outcome is `fail` if the entry raises an error.
    """
    if entry.run is None:
        return create_skip(f"by hand: docs/macos-checklist.md, {entry.id}")
    if entry.risky and not is_named:
        return create_skip(f"it can panic this Mac, so it runs only by name: python -m deploy.mac_check {entry.id}")
    try:
        return entry.run()
    except Exception as error:  # one entry must not end the check
        return create_outcome(good=False, text=f"{type(error).__name__}: {error}")


def render_report(outcomes: list[tuple[Entry, Outcome]]) -> str:
    """Return outcomes as a Markdown page. A `|` in their texts becomes `/`."""
    memory = next((outcome.text for entry, outcome in outcomes if entry.id == "total-memory"), "")
    lines = [
        "# Mac check",
        "",
        f"macpool {version('macpool')} ({_describe_commit()}), macOS {platform.mac_ver()[0]}, {platform.machine()}, "
        f"Python {platform.python_version()}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC. {memory}",
        "",
        "| entry | outcome | numbers |",
        "|---|---|---|",
        *(
            f"| {entry.id} | {_format_outcome(entry, outcome)} | {outcome.text.replace('|', '/')} |"
            for entry, outcome in outcomes
        ),
    ]
    return "\n".join(lines) + "\n"


def _format_outcome(entry: Entry, outcome: Outcome) -> str:
    return "[ ] by hand" if entry.mode == "manual" else outcome.status


def _describe_commit() -> str:
    try:
        return run_tool("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty").strip()
    except ToolError:
        return "no git"


def main() -> int:
    """Run the entries on the command line, or without any all entries that are not risky. Return the exit code.

    Print the outcomes and write the report. Raise OSError if the report cannot be written, SystemExit for an unknown
    entry.
    """
    parser = argparse.ArgumentParser(prog="mac_check", description="Run the checks that need a Mac.")
    parser.add_argument("entries", nargs="*", metavar="ID", help=", ".join(entry.id for entry in ENTRIES))
    parser.add_argument("--report", type=Path, default=REPORT, help="file of the report (%(default)s)")
    options = parser.parse_args()
    if sys.platform != "darwin":
        print(NO_MAC, file=sys.stderr)
        return 2
    unknown = set(options.entries) - {entry.id for entry in ENTRIES}
    if unknown:
        parser.error(f"there is no entry {', '.join(sorted(unknown))}")
    outcomes: list[tuple[Entry, Outcome]] = []
    for entry in ENTRIES:
        if not options.entries or entry.id in options.entries:
            outcomes.append((entry, run_entry(entry, is_named=entry.id in options.entries)))
            print(f"{outcomes[-1][1].status:<5} {entry.id:<14} {outcomes[-1][1].text}", flush=True)
    options.report.write_text(render_report(outcomes))
    failed = sum(outcome.status == "fail" for _, outcome in outcomes)
    print(f"{failed} failed; the report is in {options.report}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
