"""Access of the doctor to the machine: tools, sockets, child processes, files, and the coordinator's API.

Every check uses one `HostProbe` for all access. Tests can therefore simulate a Mac: platform, tools and connections are
parameters. No call waits longer than a few seconds, and none raises because something is missing.
"""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from coordinator.client.api_client import ApiSession
from coordinator.client.errors import CommandError
from host.power import PowerState, read_power
from host.settings_loader import OUTSIDE

TOOL_TIMEOUT_SECONDS = 2.5
CHILD_MARGIN_SECONDS = 0.7
"""Seconds by which a child process must end before the whole examination."""
DIAL_TIMEOUT_SECONDS = 1.5
ANSWER_TIMEOUT_SECONDS = 2.5

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """Result of a tool: standard output, exit code and standard error."""

    code: int
    text: str
    error: str = ""


RunTool = Callable[[tuple[str, ...], float], ToolOutput | None]
"""Runs a tool with a timeout in seconds. Returns None if the tool is missing or did not end."""
Dial = Callable[[str, int], int]
"""Connects to a host and port, then disconnects. Returns 0 or the errno."""


def run_tool(command: tuple[str, ...], seconds: float) -> ToolOutput | None:
    """Run a tool of the system."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ToolOutput(done.returncode, done.stdout, done.stderr)


def run_dial(host: str, port: int) -> int:
    """Connect by TCP."""
    try:
        socket.create_connection((host, port), DIAL_TIMEOUT_SECONDS).close()
    except TimeoutError:
        return -1
    except OSError as error:
        return error.errno or -1
    return 0


class Lazy(Generic[T]):
    """Lazy value that several threads use and one computes."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._made: list[T] = []

    def __call__(self) -> T:
        """Return the value."""
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]


@dataclass(frozen=True, slots=True)
class HostProbe:
    """This machine, or a simulated one."""

    session: ApiSession
    platform: str = sys.platform
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    run: RunTool = run_tool
    dial: Dial = run_dial
    root: Path = Path("/")
    power: Callable[[], PowerState] = read_power
    seconds: float = 4.5
    """Time limit for all checks, in seconds."""
    examined: Lazy[dict[str, Any] | None] = field(init=False)
    device: Lazy[dict[str, Any] | None] = field(init=False)
    version: Lazy["CoordinatorAnswer"] = field(init=False)
    nodes: Lazy["CoordinatorAnswer"] = field(init=False)

    def __post_init__(self) -> None:
        """Set up values that are computed once."""
        children = {
            "examined": ("node.inspect.report", "--state", str(self.state)),
            "device": ("node.engine.process.device_info",),
        }
        for name, command in children.items():
            object.__setattr__(self, name, Lazy(partial(self._child, *command)))
        for name in ("version", "nodes"):
            object.__setattr__(self, name, Lazy(partial(self.get, f"/api/v1/{name}")))

    @property
    def state(self) -> Path:
        """The state folder."""
        return self.session.state

    @property
    def mac(self) -> bool:
        """Whether this is macOS."""
        return self.platform == "darwin"

    @property
    def has_cluster(self) -> bool:
        """Whether the state folder holds a cluster."""
        return (self.state / "cluster.db").exists()

    @property
    def has_node(self) -> bool:
        """Whether a node joined from the state folder."""
        return (self.state / "node" / "identity" / "identity.json").exists()

    def run_tool(self, *command: str) -> str:
        """Return the output of a tool; empty if it is missing or failed."""
        found = self.run(command, TOOL_TIMEOUT_SECONDS)
        return found.text if found is not None and found.code == 0 else ""

    def get(self, path: str) -> "CoordinatorAnswer":
        """Send a GET request to the coordinator. A refusal is also an answer."""
        try:
            return CoordinatorAnswer(self.session.call("GET", path, timeout=ANSWER_TIMEOUT_SECONDS))
        except (CommandError, OSError, ValueError) as error:
            code = error.exit_code if isinstance(error, CommandError) else 1
            return CoordinatorAnswer(None, code, str(getattr(error, "message", error)))

    def _child(self, module: str, *arguments: str) -> dict[str, Any] | None:
        """Run a module of this project as a child process. Return None if it does not answer in time."""
        found = self.run(
            (sys.executable, "-P", "-m", module, *arguments), max(1.0, self.seconds - CHILD_MARGIN_SECONDS)
        )
        if found is None or found.code != 0:
            return None
        try:
            decoded: Any = json.loads(found.text.splitlines()[-1])
        except (ValueError, IndexError):
            return None
        return cast("dict[str, Any]", decoded) if isinstance(decoded, dict) else None

    def variables(self, *names: str) -> list[str]:
        """Return the environment variables among `names` that are set."""
        return [name for name in names if self.environ.get(name) or self.environ.get(name.lower())]

    def stray_variables(self) -> list[str]:
        """Return the MACPOOL_ variables in the environment that are settings."""
        return sorted(name for name in self.environ if name.startswith("MACPOOL_") and name not in OUTSIDE)


@dataclass(frozen=True, slots=True)
class CoordinatorAnswer:
    """Answer of the coordinator, or the exit code and message of the failure."""

    value: dict[str, Any] | None
    code: int = 0
    problem: str = ""
