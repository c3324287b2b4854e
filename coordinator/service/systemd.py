"""The service as a systemd unit, and parsing of systemctl's output. No I/O.

The hardening denies everything that no part needs: new privileges, capabilities, kernel settings and modules, other
address families. The home folder and /tmp stay open for models, state and Ray's sockets. Writable and executable memory
stays open, because MLX compiles kernels at first use, and Ray and ctypes make trampolines. All system calls of the
native architecture stay open.

An engine that the kernel's OOM killer ends must not stop the unit. The agent reports the death and restarts the engine,
hence OOMPolicy=continue. As under launchd, a service that ends with exit code 0 is not restarted. A node that has left
its cluster would otherwise ask to join again.
"""

import shlex

from coordinator.service.plan import (
    MAX_OPEN_FILES,
    MODULE,
    STOP_TIMEOUT_SECONDS,
    THROTTLE_SECONDS,
    ServicePlan,
    ServiceState,
)

FOLDER = "etc/systemd/system"
"""Folder of the units, relative to the root."""
NOTICE = "# Written by `cluster service install`. Run it again to change this file."
"""First line of every unit that this program writes."""
SHOWN = ("LoadState", "ActiveState", "SubState", "MainPID", "Result", "ExecMainStatus", "UnitFileState", "NRestarts")
"""Properties that `systemctl show` prints for `parse_state`."""
FINAL_EXIT_CODES = "2 6 8 9"
"""Exit codes after which systemd does not restart the service, because the next start would fail likewise.

- 2: invalid settings
- 6: superseded by another coordinator, or a node of another cluster
- 8: other protocol version
- 9: CA pin mismatch
"""
HARDENING = {
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "ProtectSystem": "full",
    "ProtectKernelTunables": "yes",
    "ProtectKernelModules": "yes",
    "ProtectControlGroups": "yes",
    "RestrictSUIDSGID": "yes",
    "RestrictRealtime": "yes",
    "LockPersonality": "yes",
    "SystemCallArchitectures": "native",
    "RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6 AF_NETLINK",
}
"""Settings of the unit that restrict the service."""


def render_unit(plan: ServicePlan) -> str:
    """Return the text of the systemd unit that runs the planned service."""
    program = plan.program
    if any(letter in plan.python for letter in "'\"\\"):  # systemd refuses these in the path of an executable
        program = ("/usr/bin/env", *program)
    command = " ".join(map(quote_word, program))
    pairs = (quote_word(f"{name}={value}", expanded=False) for name, value in plan.environment.items())
    variables = "".join(f"Environment={pair}\n" for pair in pairs)
    hardening = "".join(f"{name}={value}\n" for name, value in HARDENING.items())
    return f"""{NOTICE}
[Unit]
Description=Macpool, {plan.role}
After=network-online.target
Wants=network-online.target
StartLimitIntervalSec=0

[Service]
Type=exec
User={plan.user}
Group={plan.group}
WorkingDirectory={plan.home.replace("%", "%%")}
ExecStart={command}
{variables}Restart=on-failure
RestartSec={THROTTLE_SECONDS}
RestartPreventExitStatus={FINAL_EXIT_CODES}
TimeoutStopSec={STOP_TIMEOUT_SECONDS}
KillMode=mixed
UMask=0077
LimitNOFILE={MAX_OPEN_FILES}
OOMPolicy=continue
{hardening}
[Install]
WantedBy=multi-user.target
"""


def quote_word(word: str, *, expanded: bool = True) -> str:
    """Quote one word so that systemd neither splits nor expands it.

    With `expanded`, also escape `$`, because systemd expands variables in commands.
    """
    plain = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    plain = plain.replace("$", "$$") if expanded else plain
    return f'"{plain}"' if not word or any(letter in " \t'\";#" for letter in word) else plain


def split_command(command: str) -> tuple[str, ...]:
    """Return the words of a unit's command line, unquoted: the inverse of `quote_word` for each word.

    A command with unbalanced quotes, which this program did not write, is split at whitespace.
    """
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    return tuple(word.replace("%%", "%").replace("$$", "$") for word in words)


def parse_own_unit(content: str) -> dict[str, str] | None:
    """Return the settings of a unit by name, without `Environment`; None if this program did not write the unit."""
    if not content.startswith(NOTICE) or MODULE not in content:
        return None
    pairs = (line.split("=", 1) for line in content.splitlines() if "=" in line and not line.startswith("#"))
    return {name: value for name, value in pairs if name != "Environment"}


def parse_state(listing: str) -> ServiceState:
    """Return the state of the service from the output of `systemctl show` for the properties `SHOWN`."""
    properties = dict(line.split("=", 1) for line in listing.splitlines() if "=" in line)
    loaded = properties.get("LoadState") == "loaded"
    pid = int(properties["MainPID"]) if properties.get("MainPID", "").isdecimal() else 0
    ended = (
        ""
        if properties.get("Result", "success") == "success"
        else f"{properties['Result']} {properties.get('ExecMainStatus', '')}".strip()
    )
    return ServiceState(loaded, properties.get("ActiveState") == "active" and pid > 0, pid or None, ended, properties)
