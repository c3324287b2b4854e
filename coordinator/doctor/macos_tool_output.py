"""Parsers for the output of macOS's tools. The parsers do no I/O, and were not run on macOS (docs/macos-checklist.md).

The texts in the tests come from the tools' manuals and public reports. For missing data, every parser returns None or
an empty value. macOS changes such texts between versions, and a guess is worse than no answer.
"""

import re
from dataclasses import dataclass
from itertools import pairwise

NO_ROUTE = 65
"""EHOSTUNREACH on macOS: the immediate error of a connection that local network privacy blocks."""
REFUSED = 61
"""ECONNREFUSED on macOS: the machine exists and answers."""
MIN_MACOS_VERSION = 14
"""First version of macOS on which nodes run."""

MAX_PANIC_CHARS = 120
GPU_PANICS = r"IOGPU|completeMemory\(\)|prepare count underflow|\b(?:un)?wired?\b"
"""Regular expression for panics of the GPU or wired memory (https://github.com/ml-explore/mlx/issues/3186)."""


def parse_version(listing: str) -> tuple[str, str]:
    """Return the version and build of macOS from the output of `sw_vers`; empty texts if they are missing."""
    fields = dict(re.findall(r"^(ProductVersion|BuildVersion):\s*(\S+)", listing, re.MULTILINE))
    return fields.get("ProductVersion", ""), fields.get("BuildVersion", "")


def parse_power_settings(listing: str) -> dict[str, int]:
    """Return the numeric settings in the output of `pmset -g`, by name. `sleep` is in minutes; a switch is 0 or 1."""
    return {name: int(value) for name, value in re.findall(r"^ ?(\w+)\s+(\d+)\b", listing, re.MULTILINE)}


def parse_firewall(listing: str) -> bool | None:
    """Return whether the application firewall is on, from `socketfilterfw --getglobalstate`; None if unknown."""
    match = re.search(r"State = (\d)", listing)
    return None if match is None else match[1] != "0"


def parse_block_all(listing: str) -> bool | None:
    """Return whether the firewall blocks all incoming connections, from `socketfilterfw --getblockall`.

    Return None if the output does not mention this setting.
    """
    text = listing.casefold()
    if "block all" not in text:
        return None
    return "enabled" in text or "set to block all" in text


def parse_blocked(listing: str, program: str) -> bool | None:
    """Return whether the firewall blocks a program (path), from `socketfilterfw --listapps`; None if not listed."""
    lines = listing.splitlines()
    for line, after in pairwise(lines):
        if line.partition(":")[2].strip() == program:
            return "block" in after.casefold()
    return None


def parse_filevault(listing: str) -> bool | None:
    """Return whether FileVault is on, from the output of `fdesetup status`; None if the output has no state."""
    match = re.search(r"FileVault is (On|Off)", listing)
    return None if match is None else match[1] == "On"


def parse_lid(listing: str) -> bool | None:
    """Return whether the lid is closed, from `ioreg -r -k AppleClamshellState`; None if there is no lid."""
    match = re.search(r'"AppleClamshellState"\s*=\s*(Yes|No)', listing)
    return None if match is None else match[1] == "Yes"


def parse_gateway(listing: str) -> str | None:
    """Return the address of the gateway from the output of `route -n get default`; None if there is none."""
    match = re.search(r"gateway:\s+(\S+)", listing)
    return None if match is None else match[1]


def parse_neighbours(listing: str, gateway: str | None) -> list[str]:
    """Return the IPv4 addresses in the output of `arp -an`, except the gateway, broadcast and multicast."""
    addresses = re.findall(r"\((\d+\.\d+\.\d+\.\d+)\) at [0-9a-f]+:", listing)
    return [
        address
        for address in addresses
        if address != gateway and not address.endswith(".255") and int(address.split(".")[0]) < 224
    ]


@dataclass(frozen=True, slots=True)
class Reachability:
    """Results of TCP connections in the local network.

    A result is 0 on success, an errno, or -1 after a timeout or for a failure without errno.
    """

    gateway: int | None
    """Result for the gateway; None if no connection was tried."""
    others: tuple[tuple[str, int], ...]
    """Address and result of each other machine to which a connection was tried."""


def is_answer(code: int | None) -> bool:
    """Return whether a result in `Reachability` means that a machine answered. A refused connection is an answer."""
    return code in (0, REFUSED)


def is_blocked(reach: Reachability) -> bool:
    """Return whether macOS's local network privacy blocks this process.

    That is the case if only the gateway answers, and a connection to another machine failed with `NO_ROUTE`. If the
    gateway does not answer, the same errno means a cable, Wi-Fi or firewall fault.
    """
    refused = any(code == NO_ROUTE for _, code in reach.others)
    return refused and is_answer(reach.gateway) and not any(is_answer(code) for _, code in reach.others)


def find_responsible_program(environ: "dict[str, str]") -> str:
    """Return the name of the program, SSH session or launchd job that started a process with this environment.

    macOS applies the permissions of that program. Return "the program that started this" if the environment does not
    name it.
    """
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


def is_exempt(environ: "dict[str, str]") -> bool:
    """Return whether a process with this environment needs no permission for the local network (TN3179).

    That is the case if Terminal or an SSH session started it.
    """
    return find_responsible_program(environ) in ("Terminal", "the SSH session")


def parse_panic(report: str) -> tuple[str, bool]:
    """Return the message of a panic report (empty if it has none), and whether the message names the GPU's memory.

    The rest of the report is ignored, because every report lists the GPU's driver among the loaded kernel extensions.
    """
    match = re.search(r"panic\(cpu[^)]*\):? *(.*?)(?:\\n|\n|$)", report)
    message = match[1].replace('\\"', '"').strip() if match else ""
    return message[:MAX_PANIC_CHARS], re.search(GPU_PANICS, message) is not None
