"""Entries of the Mac check about memory and the machine, which compare Macpool's readings with the system's tools."""

import asyncio
import platform
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

from deploy.outcome import Outcome, ToolError, create_outcome, create_skip, is_near, parse_number, parse_size, run_tool
from host.event_loop import run_event_loop
from host.power import read_power
from host.sleep_watch import system_clocks
from node.agent.machine_id import compute_machine_id, parse_platform_uuid
from node.memory.cap import estimate_metal_limit
from node.memory.darwin import LibSystem
from node.memory.sensor import describe_machine, read_virtual_memory
from wire.units import GIB, MIB, show_size

ALLOCATE_PROGRAM = "import os, sys; block = os.urandom(2**20) * 1024; print(len(block), flush=True); sys.stdin.read()"
"""Program of a child that writes 1 GiB of memory, prints the size, and holds the memory until its input ends."""
ACTIVE_SHARE = 0.5
"""Share of the active pages that counts as reclaimable."""
MAX_CLOCK_DIFFERENCE_SECONDS = 0.5
"""Maximum difference in seconds between the clock of the event loop and `time.monotonic`."""
MAX_METAL_DIFFERENCE = 0.03
"""Maximum difference between the assumed Metal limit and that of the device, as a share."""
METAL_PROGRAM = (
    "import mlx.core as mx; "
    "print((mx.device_info if hasattr(mx, 'device_info') else mx.metal.device_info)()"
    "['max_recommended_working_set_size'])"
)
"""Program of a child that prints the Metal limit in bytes. This process itself does not import MLX."""


@contextmanager
def hold_gibibyte() -> Generator[int]:
    """Yield the process id of a child that uses 1 GiB of written memory while the block runs."""
    with subprocess.Popen(
        [sys.executable, "-c", ALLOCATE_PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None  # noqa: S101  it was asked for
        child.stdout.readline()
        yield child.pid


def check_footprint() -> Outcome:
    """Check Macpool's footprint of a child that uses 1 GiB against the tools `footprint` and `vmmap -summary`.

    Each difference may be up to 6 %, and the footprint must be from 1 to 1.25 GiB. The entry is skipped if neither tool
    prints a footprint.
    """
    with hold_gibibyte() as pid:
        ours = LibSystem().read_footprint(pid)
        if ours is None:
            return create_outcome(good=False, text="proc_pid_rusage gives nothing for a child of the same user")
        theirs: dict[str, int] = {}
        silent: list[str] = []
        for title, command in (
            ("Footprint", ("/usr/bin/footprint", str(pid))),
            ("Physical footprint", ("/usr/bin/vmmap", "-summary", str(pid))),
        ):
            try:
                theirs[command[0]] = parse_size(run_tool(*command), title)
            except ToolError as error:
                silent.append(str(error))
    says = "; ".join([f"ours {show_size(ours)}", *(f"{tool} {show_size(size)}" for tool, size in theirs.items())])
    says += "".join(f"; no answer: {why}" for why in silent)
    if not theirs:
        return create_skip(f"{says}; run the check with sudo, so that the tools may look at the child")
    plausible = GIB <= ours <= GIB + 256 * MIB
    return create_outcome(plausible and all(is_near(ours, size, 0.06) for size in theirs.values()), says)


def check_total_memory() -> Outcome:
    """Check Macpool's reading of the RAM against `sysctl hw.memsize`. Raise `ToolError` if sysctl fails."""
    ours, theirs = describe_machine().memory, int(run_tool("/usr/sbin/sysctl", "-n", "hw.memsize"))
    return create_outcome(ours == theirs, f"ours {ours} bytes, sysctl {theirs}")


def check_wired_limit() -> Outcome:
    """Check Macpool's reading of the wired limit against `sysctl iogpu.wired_limit_mb`, where 0 means not set.

    Raise `ToolError` if sysctl fails.
    """
    ours, theirs = LibSystem().read_wired_limit(), int(run_tool("/usr/sbin/sysctl", "-n", "iogpu.wired_limit_mb"))
    return create_outcome(ours == (theirs * MIB or None), f"ours {show_size(ours)}, sysctl {theirs} MB (0: not set)")


def check_metal_share() -> Outcome:
    """Check the Metal limit that a node assumes against the device's, which MLX reads in a child process.

    The limit of the device is recommendedMaxWorkingSetSize. The entry is skipped without MLX.
    """
    system = LibSystem()
    try:
        reported = int(run_tool(sys.executable, "-c", METAL_PROGRAM))
    except ToolError as error:
        return create_skip(f"MLX gives no answer, install the extra `node`: {error}")
    return compare_metal(
        reported, describe_machine().memory, system.read_wired_limit(), f"macOS {platform.mac_ver()[0]}"
    )


def compare_metal(reported: int, total: int, wired: int | None, system: str) -> Outcome:
    """Return the outcome of the comparison of the Metal limit that the device reports with the assumed limit.

    The assumed limit is `wired`. If that is None, it is the estimate for `total` bytes of RAM with the system `system`,
    such as "macOS 26.1". All sizes are in bytes. The difference may be up to `MAX_METAL_DIFFERENCE`.
    """
    assumed, source = (
        (estimate_metal_limit(total, system), f"guess for {system}") if wired is None else (wired, "sysctl")
    )
    says = f"Metal {show_size(reported)} = {reported / max(total, 1):.1%} of {show_size(total)}"
    return create_outcome(
        is_near(reported, assumed, MAX_METAL_DIFFERENCE), f"{says}, assumed {show_size(assumed)} ({source})"
    )


def check_reclaimable() -> Outcome:
    """Check Macpool's reading of reclaimable memory against the pages that `vm_stat` counts at about the same moment.

    The difference may be up to 5 %. `vm_stat` excludes speculative pages from the free pages; psutil's `available`
    includes them. Raise `ToolError` if `vm_stat` fails.
    """
    listing, pages = run_tool("/usr/bin/vm_stat"), read_virtual_memory()
    ours = None if pages is None else int(pages.available + pages.active * ACTIVE_SHARE)
    size = parse_number(listing, r"page size of (\d+) bytes")
    free, speculative, inactive, active = (
        parse_number(listing, rf"^Pages {name}:\s+(\d+)") for name in ("free", "speculative", "inactive", "active")
    )
    theirs = int((free + speculative + inactive + active * ACTIVE_SHARE) * size)
    if ours is None:
        return create_outcome(good=False, text="psutil reads nothing")
    says = f"ours {show_size(ours)}, vm_stat {show_size(theirs)} (free + speculative + inactive + half of active)"
    return create_outcome(is_near(ours, theirs, 0.05), says)


def check_chip() -> Outcome:
    """Check Macpool's name of the chip against `sysctl machdep.cpu.brand_string`.

    The name must also begin with "Apple". Raise `ToolError` if sysctl fails.
    """
    ours, theirs = LibSystem().read_chip_name(), run_tool("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string").strip()
    return create_outcome(ours == theirs and ours.startswith("Apple "), f"ours {ours!r}, sysctl {theirs!r}")


def check_identity() -> Outcome:
    """Check that the machine id is derived from IOPlatformUUID, and is equal in another process.

    On systems other than macOS, compare only the two processes. Raise `ToolError` if the process or `ioreg` fails.
    """
    code = "from node.agent.machine_id import compute_machine_id; print(compute_machine_id())"
    again = run_tool(sys.executable, "-c", code).strip()
    ours = compute_machine_id()
    says = f"{ours[:8]}… here, {again[:8]}… in another process"
    if sys.platform != "darwin":
        return create_outcome(ours == again, says)
    uuid = parse_platform_uuid(run_tool("/usr/sbin/ioreg", "-rd1", "-c", "IOPlatformExpertDevice"))
    says += ", from IOPlatformUUID" if uuid else ", but ioreg shows no IOPlatformUUID"
    return create_outcome(bool(uuid) and ours == again == compute_machine_id(uuid), says)


def check_power() -> Outcome:
    """Check that the power source and the time since the last input can be read. A Mac without a battery passes."""
    now = read_power()
    charge = "no battery" if now.battery is None else f"battery {now.battery:.0f} %"
    touched = "last input unknown" if now.idle_s is None else f"last input {now.idle_s:.1f} s ago"
    return create_outcome(
        now.plugged is not None and now.idle_s is not None, f"plugged {now.plugged}, {charge}, {touched}"
    )


def check_clocks() -> Outcome:
    """Check that the clock of the event loop is `time.monotonic`.

    The check is meaningful only if this Mac has slept since its start, because only a sleep makes clocks differ.
    """

    async def compare() -> float:
        return asyncio.get_running_loop().time() - time.monotonic()

    difference = abs(run_event_loop(compare()))
    on, off = system_clocks()
    text = f"the clocks differ by {difference:.3f} s; this Mac slept for {on() - off():.0f} s since its start"
    return create_outcome(difference <= MAX_CLOCK_DIFFERENCE_SECONDS, text)
