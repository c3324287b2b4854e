"""Plan of the service before any file is written: user, program and state folder. Pure."""

from dataclasses import dataclass, field
from typing import Literal

LABEL = "org.macpool"
"""Name of the launchd job."""
WIRED_LABEL = "org.macpool.wired-limit"
UNIT = "macpool.service"
MODULE = "coordinator.cli"
"""Module that starts every program of this project. A unit without it is foreign."""
STOP_TIMEOUT_SECONDS = 45
"""Longer than both drains: requests end, then the local node does."""
THROTTLE_SECONDS = 10
MAX_OPEN_FILES = 8192

Role = Literal["coordinator", "node"]


@dataclass(frozen=True, slots=True)
class ServicePlan:
    """One service. Paths are absolute; `arguments` go to `cluster up` or `join`; `wired_limit_mb` 0: not changed."""

    role: Role
    python: str
    user: str
    group: str
    home: str
    state: str
    logs: str
    arguments: tuple[str, ...] = ()
    wired_limit_mb: int = 0

    @property
    def program(self) -> tuple[str, ...]:
        """The command, without a shell."""
        verb = "up" if self.role == "coordinator" else "join"
        return (self.python, "-P", "-m", MODULE, verb, "--state", self.state, *self.arguments)

    @property
    def environment(self) -> dict[str, str]:
        """Return the complete environment. It has no proxy, because a proxy would receive requests for machines of the
        local network."""
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
    """State of the service: loaded, running with a process id, and its last exit."""

    loaded: bool = False
    running: bool = False
    pid: int | None = None
    last_exit: str = ""
    properties: dict[str, str] = field(default_factory=dict[str, str])


def refused_arguments(arguments: tuple[str, ...]) -> str | None:
    """Return why these arguments cannot be in a unit, which every user of the machine can read; None if they can."""
    for one in arguments:
        name = one.partition("=")[0]
        if name in ("--token", "--token-file", "--state"):
            return f"{name} cannot be passed to a service: " + (
                "use the option of `cluster service install`"
                if name == "--state"
                else "every user of this machine could read it; join once by hand "
                "(`cluster join URL --token-file FILE`), then install the service"
            )
        if any(not letter.isprintable() for letter in one):
            return "an argument contains an unprintable character"
    return None


def clamp_wired_limit(wanted: int, safe_bytes: int) -> str | None:
    """Return why a wired limit in MiB is not allowed; None if it leaves the system its reserve."""
    safe = safe_bytes >> 20
    if safe <= 0:
        return "the RAM of this machine cannot be read: no wired limit is known to be safe"
    if wanted > safe:
        return f"{wanted} MB leaves too little memory for the system, which may panic: use at most {safe} MB"
    return None
