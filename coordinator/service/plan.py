"""What the service shall be, before any file is written: who runs what, with which state. Pure."""

from dataclasses import dataclass, field
from typing import Literal

LABEL = "org.macpool"
"""Name of the launchd job."""
WIRED_LABEL = "org.macpool.wired-limit"
UNIT = "macpool.service"
MODULE = "coordinator.cli"
"""What every program of ours is started by; a unit without it is not ours."""
STOP_SECONDS = 45
"""Longer than both drains: requests end, then the local node does."""
THROTTLE_SECONDS = 10
MOST_FILES = 8192

Role = Literal["coordinator", "node"]


@dataclass(frozen=True, slots=True)
class Plan:
    """One service. Paths are absolute; `arguments` go to `cluster up` or `join`; `wired_limit_mb` 0: left as it is."""

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
        """The whole environment. A proxy would be asked for machines of the local network, so there is none."""
        return {
            "HOME": self.home, "LANG": "en_US.UTF-8", "NO_COLOR": "1", "NO_PROXY": "*",
            "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Standing:
    """What the system says of the service: loaded, running with a process id, and how it ended last."""

    loaded: bool = False
    running: bool = False
    pid: int | None = None
    last_exit: str = ""
    told: dict[str, str] = field(default_factory=dict[str, str])


def refused_arguments(arguments: tuple[str, ...]) -> str | None:
    """Say why these arguments cannot stand in a unit, which everybody on the machine can read; None when they can."""
    for one in arguments:
        name = one.partition("=")[0]
        if name in ("--token", "--token-file", "--state"):
            return f"{name} cannot be given to a service: " + (
                "use the option of `service install` itself" if name == "--state" else
                "everybody could read it; join once by hand, `cluster join URL --token-file FILE`, then install the "
                "service"
            )  # fmt: skip
        if any(not letter.isprintable() for letter in one):
            return "an argument holds a character that cannot be printed"
    return None


def clamp_wired_limit(wanted: int, safe_bytes: int) -> str | None:
    """Say why a wired limit in MiB cannot be kept; None when it leaves the system its reserve."""
    safe = safe_bytes >> 20
    if safe <= 0:
        return "the RAM of this machine cannot be read, so no wired limit is known to be safe"
    if wanted > safe:
        return f"{wanted} MB would leave the system too little: at most {safe} MB on this machine, or it may panic"
    return None
