"""Machine id: a hash by which a node detects that its identity was copied to another machine.

On macOS the id is a hash of IOPlatformUUID (unverified on macOS). `ioreg` can fail on a Mac that has just started.
There is no substitute, because a node with another id would be refused as a copy.

On Linux the id is a hash of /etc/machine-id or of D-Bus's copy. A cloned disk has the same files, so that only a copied
state folder is detected. Without either file, the MAC address is hashed.
"""

import hashlib
import re
import sys
import uuid
from pathlib import Path

from host.subprocesses import RunTool, run_tool

MAX_TRIES = 3
"""Maximum number of runs of `ioreg`, each of at most `host.subprocesses.TOOL_TIMEOUT_SECONDS`."""
_LINUX = (Path("/etc/machine-id"), Path("/var/lib/dbus/machine-id"))


def compute_machine_id(override: str = "") -> str:
    """Return the id of this machine: 32 hex digits of a hash of the platform's machine id.

    On Linux without a platform id, the MAC address is hashed. `override` (setting `node.machine`) replaces both if not
    empty, for several nodes on one machine. Raise `OSError` if macOS does not print its id.
    """
    raw = override or (read_platform_uuid() if sys.platform == "darwin" else _read_linux_id())
    return hashlib.sha256(b"macpool machine" + raw.encode()).hexdigest()[:32]


def read_platform_uuid(run: RunTool = run_tool) -> str:
    """Return IOPlatformUUID of this Mac. `run` runs `ioreg`. Raise `OSError` if `MAX_TRIES` runs do not print it."""
    for _ in range(MAX_TRIES):
        if found := parse_platform_uuid(run(("/usr/sbin/ioreg", "-rd1", "-c", "IOPlatformExpertDevice"))):
            return found
    raise OSError(f"ioreg did not print the IOPlatformUUID of this Mac {MAX_TRIES} times: start the node again")


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
    return f"mac:{uuid.getnode():x}"
