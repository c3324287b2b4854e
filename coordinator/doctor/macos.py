"""Parsers of macOS's tools. Pure; unverified on macOS until the entries of the checklist are done.

The texts in the tests come from the tools' manuals and public reports. Every parser returns None for missing data,
because macOS changes such texts between versions and a guess is worse than no answer.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

NO_ROUTE = 65
"""EHOSTUNREACH on macOS: the immediate result of a connection that local network privacy blocks."""
REFUSED = (61, 111)
"""ECONNREFUSED, on macOS and on Linux: the machine exists and answers."""
MIN_MACOS_VERSION = 14
"""First macOS that nodes run on."""

MAX_PANIC_CHARS = 120
GPU_PANICS = r"IOGPU|completeMemory\(\)|prepare count underflow|\b(?:un)?wired?\b"
"""Pattern of panics of the GPU and of wired memory (https://github.com/ml-explore/mlx/issues/3186)."""


def version_in(listing: str) -> tuple[str, str]:
    """Parse `sw_vers`: version and build; empty if missing."""
    found = dict(re.findall(r"^(ProductVersion|BuildVersion):\s*(\S+)", listing, re.MULTILINE))
    return found.get("ProductVersion", ""), found.get("BuildVersion", "")


def power_settings_in(listing: str) -> dict[str, int]:
    """Parse `pmset -g`: the active settings, minutes and switches by name."""
    return {name: int(value) for name, value in re.findall(r"^ ?(\w+)\s+(\d+)\b", listing, re.MULTILINE)}


def firewall_in(listing: str) -> bool | None:
    """Parse `socketfilterfw --getglobalstate`: whether the application firewall is on."""
    found = re.search(r"State = (\d)", listing)
    return None if found is None else found[1] != "0"


def blocks_all_in(listing: str) -> bool | None:
    """Parse `socketfilterfw --getblockall`: whether it blocks all incoming connections."""
    text = listing.casefold()
    if "block all" not in text:
        return None
    return "enabled" in text or "set to block all" in text


def blocked_in(listing: str, program: str) -> bool | None:
    """Parse `socketfilterfw --listapps`: whether a program is blocked; None if it is not in the list."""
    lines = listing.splitlines()
    for line, after in pairwise(lines):
        if program in line:
            return "block" in after.casefold()
    return None


def filevault_in(listing: str) -> bool | None:
    """Parse `fdesetup status`."""
    found = re.search(r"FileVault is (On|Off)", listing)
    return None if found is None else found[1] == "On"


def lid_in(listing: str) -> bool | None:
    """Parse `ioreg -r -k AppleClamshellState`: whether the lid is closed; None without a lid."""
    found = re.search(r'"AppleClamshellState"\s*=\s*(Yes|No)', listing)
    return None if found is None else found[1] == "Yes"


def gateway_in(listing: str) -> str | None:
    """Parse `route -n get default`."""
    found = re.search(r"gateway:\s+(\S+)", listing)
    return None if found is None else found[1]


def neighbours_in(listing: str, gateway: str | None) -> list[str]:
    """Parse `arp -an`: machines of the local network other than the gateway."""
    found = re.findall(r"\((\d+\.\d+\.\d+\.\d+)\) at [0-9a-f]+:", listing)
    return [one for one in found if one != gateway and not one.endswith(".255") and int(one.split(".")[0]) < 224]


@dataclass(frozen=True, slots=True)
class Reachability:
    """Results of connections to the gateway and to machines of the local network: 0 or an errno; None: not tried."""

    gateway: int | None
    others: tuple[tuple[str, int], ...]


def answers(code: int | None) -> bool:
    """Return whether a machine answered. A refused connection is an answer."""
    return code == 0 or code in REFUSED


def is_blocked(reach: Reachability) -> bool:
    """Return whether local network privacy blocks: no route to a machine of this network, while the gateway answers.

    If the gateway does not answer, the same errno means a cable, Wi-Fi or firewall fault.
    """
    refused = any(code == NO_ROUTE for _, code in reach.others)
    return refused and answers(reach.gateway) and not any(answers(code) for _, code in reach.others)


def responsible(environ: "dict[str, str]") -> str:
    """Return the program whose permission applies: macOS uses the one that started this process."""
    if environ.get("XPC_SERVICE_NAME", "0") not in ("", "0"):
        return f"the launchd job {environ['XPC_SERVICE_NAME']}"
    if environ.get("SSH_CONNECTION"):
        return "the SSH session"
    program = environ.get("TERM_PROGRAM", "")
    names = {
        "Apple_Terminal": "Terminal",
        "iTerm.app": "iTerm",
        "vscode": "Visual Studio Code",
        "tmux": "tmux",
        "WarpTerminal": "Warp",
    }
    return names.get(program, program) or "the program that started this"


def exempt(environ: "dict[str, str]") -> bool:
    """Return whether macOS permits local network access without a prompt for processes started here (TN3179)."""
    return responsible(environ) in ("Terminal", "the SSH session")


def panic_in(report: str) -> tuple[str, bool]:
    """Return the message of a panic report, and whether it names the GPU's memory; empty where there is no message.

    Only the message counts: every report lists the GPU's driver among the loaded kernel extensions.
    """
    found = re.search(r"panic\(cpu[^)]*\):? *(.*?)(?:\\n|\n|$)", report)
    message = found[1].replace('\\"', '"').strip() if found else ""
    return message[:MAX_PANIC_CHARS], re.search(GPU_PANICS, message) is not None
