"""Machine id: a hash that stays the same as long as the hardware does.

macOS: IOPlatformUUID (unverified on macOS). Linux: /etc/machine-id or D-Bus's copy, which a cloned disk copies. On
Linux the check therefore protects only against a copied state folder. Without either, the id follows from the MAC
address.
"""

import hashlib
import re
import sys
import uuid
from pathlib import Path

from host.subprocesses import run_tool

_LINUX = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))


def compute_machine_id(override: str = "") -> str:
    """Return the id of this machine: 32 hex digits of a hash of the platform's machine id.

    Without a platform id, the MAC address is hashed. `override` (setting `node.machine`) replaces both if not empty,
    for several nodes on one machine.
    """
    raw = (
        override
        or (_read_platform_uuid() if sys.platform == "darwin" else _read_linux_id())
        or f"mac:{uuid.getnode():x}"
    )
    return hashlib.sha256(b"macpool machine" + raw.encode()).hexdigest()[:32]


def _read_platform_uuid() -> str:
    return parse_platform_uuid(run_tool(("/usr/sbin/ioreg", "-rd1", "-c", "IOPlatformExpertDevice")))


def parse_platform_uuid(listing: str) -> str:
    """Return IOPlatformUUID from the output of `ioreg`; empty if it is missing."""
    match = re.search(r'"IOPlatformUUID"\s*=\s*"([0-9A-Fa-f-]{36})"', listing)
    return match[1] if match else ""


def _read_linux_id() -> str:
    for path in _LINUX:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text and text != "uninitialized":
            return text
    return ""
