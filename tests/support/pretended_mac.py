"""A Mac as the doctor sees it, built from known output of the tools of macOS."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.client.api_client import ApiSession
from coordinator.doctor.host_probe import HostProbe, ToolOutput
from host.power import PowerState
from wire.units import GIB

FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"
TOOLS: dict[str, str] = {
    "/usr/bin/sw_vers": "ProductName:\t\tmacOS\nProductVersion:\t\t15.5\nBuildVersion:\t\t24F74\n",
    "/usr/sbin/sysctl -n iogpu.wired_limit_mb": "0\n",
    "/usr/bin/pmset -g": "System-wide power settings:\nCurrently in use:\n standby 0\n Sleep On Power Button 1\n"
    " womp                 1\n autorestart          1\n sleep                0 (sleep prevented by powerd)\n"
    " displaysleep         10\n",
    "/usr/sbin/ioreg -r -k AppleClamshellState -d 4": "",
    "/usr/bin/fdesetup status": "FileVault is Off.\n",
    f"{FIREWALL} --getglobalstate": "Firewall is disabled. (State = 0)\n",
    f"{FIREWALL} --getblockall": "Firewall has block all state set to disabled.\n",
    f"{FIREWALL} --listapps": "Total number of apps = 0 \n",
    "/sbin/route -n get default": "   route to: default\n    gateway: 192.168.1.1\n  interface: en0\n",
    "/usr/sbin/arp -an": "? (192.168.1.1) at a4:b1:c1:0:0:1 on en0 ifscope [ethernet]\n"
    "? (192.168.1.20) at a4:b1:c1:0:0:2 on en0 ifscope [ethernet]\n? (224.0.0.251) at 1:0:5e:0:0:fb on en0\n",
    "/bin/launchctl print system/org.macpool": "",
}
"""A Mac Studio without a firewall that never sleeps: it has no findings."""
EXAMINED: dict[str, Any] = {
    "error": "",
    "faults": [],
    "settings": [],
    "machine": "m",
    "engine": "mlx",
    "sections": [],
    "folders": [],
    "missing_folders": [],
    "hardware": {"chip": "Apple M3 Ultra"},
    "video": {"enabled": False, "first_port": 6480},
    "memory": {
        "total": 128 * GIB,
        "metal": 96 * GIB,
        "container": None,
        "safe": 120 * GIB,
        "error": "",
        "metal_reported": True,
        "cap": 96 * GIB,
        "bound_by": "static",
        "remedy": "",
        "warning": "",
        "margin": 10 * GIB,
        "guard": "on",
    },
    "identity": None,
    "identity_error": "",
    "dialled": [],
}
PLUGGED = PowerState(plugged=True)
DEVICE = {
    "installed": True,
    "error": "",
    "version": "0.32.4",
    "models": "0.32.2",
    "device": "Apple M3 Ultra",
    "metal": True,
    "most": 96 * GIB,
}


def pretended(
    state: Path,
    tools: Mapping[str, str | None] | None = None,
    *,
    reach: Mapping[str, int] | None = None,
    environ: Mapping[str, str] | None = None,
    platform: str = "darwin",
    power: PowerState = PLUGGED,
    **examined: Any,
) -> HostProbe:
    """Return a Mac on which some tools print other texts (None: the tool fails). `reach` has the errno of each host."""
    said = {**TOOLS, **(tools or {})}

    def ask(command: tuple[str, ...], _: float) -> ToolOutput | None:
        if command[0] == sys.executable:
            told = DEVICE if "node.engine.process.device_info" in command else {**EXAMINED, **examined}
            return ToolOutput(0, json.dumps(told))
        text = said.get(" ".join(command))
        return None if text is None else ToolOutput(0, text)

    def dial(host: str, _: int) -> int:
        return (reach or {}).get(host, 61)

    here = HostProbe(
        ApiSession(state, None, None, "text"),
        platform,
        environ or {"TERM_PROGRAM": "Apple_Terminal"},
        ask,
        dial,
        state,
        get_power=lambda: power,
    )
    if state.is_dir():
        state.chmod(0o700)
    return here
