"""Access of the doctor to the machine: tools, sockets, child processes, files, and the coordinator's API.

Every check uses one `HostProbe` for all access. Tests can therefore simulate a Mac: platform, tools and connections are
parameters. Every tool, connection and request has a timeout. A missing tool, file or coordinator never raises an error.
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
from host.local_names import list_addresses
from host.power import PowerState, read_power
from host.subprocesses import run_process

TOOL_TIMEOUT_SECONDS = 2.5
"""Maximum duration of a tool's run, in seconds."""
CHILD_MARGIN_SECONDS = 0.7
"""Seconds by which the time limit of a child process is below the time limit of all checks."""
DIAL_TIMEOUT_SECONDS = 1.5
ANSWER_TIMEOUT_SECONDS = 2.5

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """Result of a system tool that ended."""

    code: int
    """Exit code of the tool."""
    text: str
    """Text of the tool's standard output."""
    error: str = ""
    """Text of the tool's standard error."""


RunTool = Callable[[tuple[str, ...], float], ToolOutput | None]
"""Function that runs a command for at most a number of seconds.

The result is None if the tool is missing or does not end in time.
"""
Dial = Callable[[str, int], int]
"""Function that connects to a host and port by TCP, and then disconnects.

The result is 0 on success, the errno of a failure, or -1 after a timeout or for a failure without errno.
"""


def run_tool(command: tuple[str, ...], seconds: float) -> ToolOutput | None:
    """Run a system tool for at most `seconds`. Return None if it is missing or does not end in time."""
    try:
        done = run_process(command, seconds)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ToolOutput(done.returncode, done.stdout, done.stderr)


def dial_tcp(host: str, port: int) -> int:
    """Connect to a host and port by TCP, for at most `DIAL_TIMEOUT_SECONDS`, and disconnect.

    Return 0 on success, the errno of a failure, or -1 after a timeout or for a failure without errno.
    """
    try:
        socket.create_connection((host, port), DIAL_TIMEOUT_SECONDS).close()
    except TimeoutError:
        return -1
    except OSError as error:
        return error.errno or -1
    return 0


class Lazy(Generic[T]):
    """Value that `make` computes at its first use. Several threads may use it, and only one of them computes it.

    If `make` raises an error, the error is raised, and the next use calls `make` again.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._values: list[T] = []

    def __call__(self) -> T:
        """Return the value. The first call computes it, while concurrent calls wait."""
        with self._lock:
            if not self._values:
                self._values.append(self._make())
            return self._values[0]


@dataclass(frozen=True, slots=True)
class HostProbe:
    """Access of all checks to this machine, or in tests to a simulated one."""

    session: ApiSession
    """Options that select the coordinator: the state folder, and optionally a URL and a key file."""
    platform: str = sys.platform
    """Name of the operating system, as in `sys.platform`."""
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment variables of the doctor's process, by name."""
    run: RunTool = run_tool
    """Function that runs tools and child processes."""
    dial: Dial = dial_tcp
    """Function that connects to a host and port by TCP."""
    root: Path = Path("/")
    """Folder that is used in place of `/`."""
    get_power: Callable[[], PowerState] = read_power
    """Function that reads power source and battery."""
    timeout_seconds: float = 4.5
    """Time limit of all checks, in seconds from their common start. A check that has not ended is then abandoned."""
    list_addresses: Callable[[], list[str]] = list_addresses
    """Function that lists the addresses of this machine on the local network."""
    read_inspection: Lazy[dict[str, Any] | None] = field(init=False)
    """Report of `node.inspect.report`; None if that process fails or does not end in time."""
    read_device: Lazy[dict[str, Any] | None] = field(init=False)
    """MLX and its device, from `node.engine.process.device_info`; None if that process fails or is too slow."""
    read_version: Lazy["CoordinatorAnswer"] = field(init=False)
    """Answer of the coordinator's `/api/v1/version`, or the failure of the request."""
    read_nodes: Lazy["CoordinatorAnswer"] = field(init=False)
    """Answer of the coordinator's `/api/v1/nodes`, or the failure of the request."""

    def __post_init__(self) -> None:
        """Create the values that are computed at their first use."""
        children = {
            "read_inspection": ("node.inspect.report", "--state", str(self.state)),
            "read_device": ("node.engine.process.device_info",),
        }
        for name, command in children.items():
            object.__setattr__(self, name, Lazy(partial(self._run_child, *command)))
        for name in ("version", "nodes"):
            object.__setattr__(self, f"read_{name}", Lazy(partial(self.get, f"/api/v1/{name}")))

    @property
    def state(self) -> Path:
        """State folder of the session."""
        return self.session.state

    @property
    def mac(self) -> bool:
        """Whether the operating system is macOS."""
        return self.platform == "darwin"

    @property
    def knows_coordinator(self) -> bool:
        """Whether a coordinator is known to the session.

        True as well if a file of the state folder cannot be read. The failure of each request then names the file.
        """
        try:
            return self.session.running
        except CommandError:
            return True

    @property
    def has_cluster(self) -> bool:
        """Whether the state folder contains the state of a coordinator."""
        return (self.state / "cluster.db").exists()

    @property
    def has_node(self) -> bool:
        """Whether a node has joined from the state folder."""
        return (self.state / "node" / "identity" / "identity.json").exists()

    def run_tool(self, *command: str) -> str:
        """Run a command and return its standard output; empty if it is missing, fails, or does not end in time."""
        result = self.run(command, TOOL_TIMEOUT_SECONDS)
        return result.text if result is not None and result.code == 0 else ""

    def get(self, path: str) -> "CoordinatorAnswer":
        """Send a GET request to the coordinator's API. Return its answer, or exit code and message of a failure.

        An answer that takes longer than `ANSWER_TIMEOUT_SECONDS` is a failure.
        """
        try:
            return CoordinatorAnswer(self.session.request_json("GET", path, timeout=ANSWER_TIMEOUT_SECONDS))
        except (CommandError, OSError, ValueError) as error:
            code = error.exit_code if isinstance(error, CommandError) else 1
            return CoordinatorAnswer(None, code, str(getattr(error, "message", error)))

    def _run_child(self, module: str, *arguments: str) -> dict[str, Any] | None:
        """Run a module of this project as a child process, and return the JSON object in its last line.

        Return None if the child fails, does not end in time, or prints no such object.
        """
        result = self.run(
            (sys.executable, "-P", "-m", module, *arguments), max(1.0, self.timeout_seconds - CHILD_MARGIN_SECONDS)
        )
        if result is None or result.code != 0:
            return None
        try:
            decoded: Any = json.loads(result.text.splitlines()[-1])
        except (ValueError, IndexError):
            return None
        return cast("dict[str, Any]", decoded) if isinstance(decoded, dict) else None

    def find_variables(self, *names: str) -> list[str]:
        """Return those of `names` whose environment variable is set and not empty, in upper or lower case."""
        return [name for name in names if self.environ.get(name) or self.environ.get(name.lower())]


@dataclass(frozen=True, slots=True)
class CoordinatorAnswer:
    """Answer of the coordinator's API, or the failure of the request."""

    value: dict[str, Any] | None
    """JSON of the answer; None after a failure."""
    code: int = 0
    """Exit code of the failure; 0 without one."""
    problem: str = ""
    """Message of the failure; empty without one."""
