"""Plan of the service before any file is written: user, program and state folder. No I/O."""

from dataclasses import dataclass, field
from typing import Literal

LABEL = "org.macpool"
"""Name of the launchd job."""
WIRED_LABEL = "org.macpool.wired-limit"
"""Name of the launchd job that sets Metal's wired limit."""
UNIT = "macpool.service"
"""Name of the systemd unit."""
MODULE = "coordinator.cli"
"""Module that every service runs. A unit without it was not written by this program."""
STOP_TIMEOUT_SECONDS = 45
"""Seconds from the stop signal to a kill.

With default settings that is longer than the drain of the requests (`http.drain_seconds`, 20 s), followed by that of
the local node (20 s).
"""
THROTTLE_SECONDS = 10
"""Seconds that limit restarts.

With launchd, the minimum between two starts; with systemd, the pause between the end of the service and its next start.
"""
MAX_OPEN_FILES = 8192
"""Maximum open files of the service."""

Role = Literal["coordinator", "node"]


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """Service to install on this machine. Paths are absolute."""

    role: Role
    """Whether the service runs the coordinator or a node."""
    python: str
    """Path of the Python interpreter."""
    user: str
    """Account under which the service runs."""
    group: str
    """Primary group of `user`."""
    home: str
    """Home folder of `user`."""
    state: str
    """State folder of the coordinator or node that the service runs."""
    logs: str
    """Folder of the service's output under launchd."""
    arguments: tuple[str, ...] = ()
    """Further arguments of `cluster up` or `cluster join`."""
    wired_limit_mb: int = 0
    """Metal's wired limit to set, in MiB; 0 to leave it unchanged."""

    @property
    def program(self) -> tuple[str, ...]:
        """Command line of the service, which is run without a shell.

        It has `--allow-missing-folders`, because a disk that is not connected must not prevent the start. A node has
        `--joined-only`, because after `cluster leave` it must not ask to join again.
        """
        role = ("up",) if self.role == "coordinator" else ("join", "--joined-only")
        common = ("--state", self.state, "--allow-missing-folders")
        return (self.python, "-P", "-m", MODULE, *role, *common, *self.arguments)

    @property
    def environment(self) -> dict[str, str]:
        """Complete environment of the service.

        It has no proxy, because a proxy would receive requests to machines of the local network.
        """
        return {
            "HOME": self.home,
            "LANG": "en_US.UTF-8",
            "NO_COLOR": "1",
            "NO_PROXY": "*",
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "PYTHONUNBUFFERED": "1",
        }


@dataclass(frozen=True, slots=True)
class ServiceState:
    """State of the service, as the service manager reports it."""

    loaded: bool = False
    """Whether launchd has loaded the job, or systemd has read a unit of this name, even a disabled one."""
    running: bool = False
    """Whether the service has a process."""
    pid: int | None = None
    """Process id; None if no process runs."""
    last_exit: str = ""
    """Last signal, exit code or result; empty if the service has never exited.

    With systemd, it is also empty after an exit without an error.
    """
    properties: dict[str, str] = field(default_factory=dict[str, str])
    """Properties in the manager's output, by name."""


def explain_refused_arguments(arguments: tuple[str, ...]) -> str | None:
    """Return why these arguments are not allowed in a unit; None if they are allowed.

    Tokens are refused because every user of the machine can read a unit. `--state` and unprintable characters are
    refused as well.
    """
    for argument in arguments:
        name = argument.partition("=")[0]
        if name in ("--token", "--token-file", "--state"):
            return f"{name} cannot be passed to a service: " + (
                "use the option of `cluster service install`"
                if name == "--state"
                else "every user of this machine could read it; join once by hand "
                "(`cluster join URL --token-file FILE`), then install the service"
            )
        if any(not letter.isprintable() for letter in argument):
            return "an argument contains an unprintable character"
    return None


def explain_unsafe_wired_limit(wanted: int, safe_bytes: int) -> str | None:
    """Return why a wired limit of `wanted` MiB is not allowed; None if it is at most `safe_bytes`.

    If `safe_bytes` is below 1 MiB, no limit is allowed, because the RAM is unknown.
    """
    safe = safe_bytes >> 20
    if safe <= 0:
        return "the RAM of this machine cannot be read: no wired limit is known to be safe"
    if wanted > safe:
        return f"{wanted} MB leaves too little memory for the system, which may panic: use at most {safe} MB"
    return None
