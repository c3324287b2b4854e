"""Common interface to the system's service manager: launchctl on macOS, systemctl on Linux.

Tools have absolute paths, because this code runs as root. In tests, a `ServiceHost` has other tools and another root.
"""

import grp
import os
import pwd
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from coordinator.service import launchd, systemd
from coordinator.service.plan import LABEL, STOP_TIMEOUT_SECONDS, UNIT, WIRED_LABEL, ServicePlan, ServiceState
from host.subprocesses import run_process

TOOL_TIMEOUT_SECONDS = 60.0
"""Maximum duration of a tool's run, in seconds."""
UNLOAD_TIMEOUT_SECONDS = STOP_TIMEOUT_SECONDS + 15.0
"""Maximum seconds until launchd has unloaded a job. launchd kills the job after `STOP_TIMEOUT_SECONDS`."""
UNLOAD_POLL_SECONDS = 0.5
TOOLS = {
    "launchctl": "/bin/launchctl",
    "plutil": "/usr/bin/plutil",
    "systemctl": "/usr/bin/systemctl",
    "journalctl": "/usr/bin/journalctl",
    "tail": "/usr/bin/tail",
}


class ServiceError(Exception):
    """Raised if an operation on the service fails. The text has the reason and, if known, the next step.

    `code` is the exit code of the command.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code
        """Exit code of the command."""


@dataclass(frozen=True, slots=True)
class ServiceHost:
    """Service manager of this system, or in tests of a simulated system below another root."""

    platform: str = sys.platform
    root: Path = Path("/")
    """Folder that is used in place of `/` for units and logs."""
    tools: Mapping[str, str] = field(default_factory=lambda: TOOLS)
    """Paths of the tools, by name."""
    uid: int = field(default_factory=os.geteuid)
    """User id under which the command runs."""

    @property
    def mac(self) -> bool:
        """Whether the manager is launchd."""
        return self.platform == "darwin"

    @property
    def unit(self) -> Path:
        """Path of the service's launchd job or systemd unit."""
        return self.root / launchd.FOLDER / f"{LABEL}.plist" if self.mac else self.root / systemd.FOLDER / UNIT

    @property
    def wired_unit(self) -> Path:
        """Path of the launchd job that sets Metal's wired limit, on macOS."""
        return self.root / launchd.FOLDER / f"{WIRED_LABEL}.plist"

    @property
    def logs(self) -> Path:
        """Folder of the service's output under launchd. (systemd has its journal.)"""
        return self.root / launchd.LOGS.removeprefix("/")

    def render_unit(self, plan: ServicePlan) -> str:
        """Return the text of the launchd job or systemd unit for a plan."""
        return launchd.render_property_list(launchd.build_job(plan)) if self.mac else systemd.render_unit(plan)

    def run_tool(self, tool: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run a tool of `tools` and return its result, whether it succeeded or not.

        Raise `ServiceError` if the tool is missing, cannot be executed, or runs longer than `TOOL_TIMEOUT_SECONDS`.
        """
        command = [self.tools[tool], *arguments]
        try:
            return run_process(command, TOOL_TIMEOUT_SECONDS)
        except FileNotFoundError:
            raise ServiceError(
                1, f"this system has no {command[0]}: `--dry-run` prints the unit for use with another service manager"
            ) from None
        except OSError as error:
            raise ServiceError(1, f"{command[0]} cannot be run: {error.strerror}: check its mode") from None
        except subprocess.TimeoutExpired:
            raise ServiceError(7, f"{' '.join(command)} did not end within {TOOL_TIMEOUT_SECONDS:.0f} s") from None

    def run_tool_checked(self, tool: str, *arguments: str) -> None:
        """Run a tool of `tools`. Raise `ServiceError` with the tool's message if its exit code is not 0.

        The error is also raised if the tool is missing, cannot be executed, or runs longer than `TOOL_TIMEOUT_SECONDS`.
        """
        done = self.run_tool(tool, *arguments)
        if done.returncode:
            message = (done.stderr.strip() or done.stdout.strip() or "no message")[:500]
            hint = _explain_code(done.returncode)
            raise ServiceError(1, f"{tool} {' '.join(arguments)} failed with {done.returncode}: {message}{hint}")

    # -- commands to the manager -------------------------------------------------------------------

    def read_state(self) -> ServiceState:
        """Return the state of the service, as the service manager reports it.

        Raise `ServiceError` if launchctl or systemctl cannot be run, or does not end in time.
        """
        if self.mac:
            done = self.run_tool("launchctl", "print", f"{launchd.DOMAIN}/{LABEL}")
            return launchd.parse_state(done.returncode, done.stdout)
        return systemd.parse_state(
            self.run_tool("systemctl", "show", UNIT, f"--property={','.join(systemd.SHOWN)}").stdout
        )

    def load_unit(self) -> None:
        """Make the manager read the unit, and start the service now and at each boot.

        On Linux, a running service is restarted. Raise `ServiceError` if launchctl or systemctl fails, and on macOS
        also if the job is already loaded.
        """
        if self.mac:
            self.run_tool("launchctl", "enable", f"{launchd.DOMAIN}/{LABEL}")
            self.run_tool_checked("launchctl", "bootstrap", launchd.DOMAIN, str(self.unit))
            return
        self.run_tool_checked("systemctl", "daemon-reload")
        self.run_tool_checked("systemctl", "enable", UNIT)
        self.run_tool_checked("systemctl", "restart", UNIT)

    def unload_unit(self, label: str = LABEL) -> None:
        """Stop the service and wait for its end. On macOS, unload the job `label`. On Linux, disable the unit.

        A disabled unit no longer starts at boot. Linux ignores `label`. If the job or unit is not loaded, nothing is
        done. Raise `ServiceError` if launchctl or systemctl fails, or if the job does not end.
        """
        if self.mac:
            self._unload_job(f"{launchd.DOMAIN}/{label}")
        elif self.read_state().loaded:
            self.run_tool_checked("systemctl", "disable", "--now", UNIT)

    def _unload_job(self, target: str) -> None:
        """Unload a launchd job and wait for its end. Raise `ServiceError` if launchctl fails or the job does not end.

        `bootout` may return before the job has ended. Before its end, launchd refuses to load a job of this name.
        """
        done = self.run_tool("launchctl", "bootout", target)
        if done.returncode in launchd.NOT_LOADED:
            return
        if done.returncode not in (0, launchd.IN_PROGRESS):
            raise ServiceError(1, f"launchctl bootout failed with {done.returncode}: {done.stderr.strip()[:300]}")
        pause, deadline = threading.Event(), time.monotonic() + UNLOAD_TIMEOUT_SECONDS
        while self.run_tool("launchctl", "print", target).returncode not in launchd.NOT_LOADED:
            if time.monotonic() >= deadline:
                raise ServiceError(
                    7,
                    f"launchd did not unload {target} within {UNLOAD_TIMEOUT_SECONDS:.0f} s: wait until "
                    f"`launchctl print {target}` does not find it, and run the command again",
                )
            pause.wait(UNLOAD_POLL_SECONDS)

    def restart_service(self) -> None:
        """Stop the service gracefully and start it again.

        Raise `ServiceError` if launchctl or systemctl fails, or if the service does not end in time.
        """
        if self.mac:  # `kickstart -k` would kill the service, and its requests would be lost
            self.unload_unit()
            self.load_unit()
        else:
            self.run_tool_checked("systemctl", "restart", UNIT)

    def reload_manager(self) -> None:
        """Reload systemd after the unit's file was removed. Do nothing on macOS, because launchd needs no reload.

        Raise `ServiceError` if systemctl fails.
        """
        if not self.mac:
            self.run_tool_checked("systemctl", "daemon-reload")


def _explain_code(code: int) -> str:
    """Return the meaning of an exit code of launchctl, which launchctl does not print; empty if unknown."""
    hints = {
        5: " (often: the job is loaded already, or users other than root can write its file)",
        125: " (this domain cannot be reached from here: use sudo)",
    }
    return hints.get(code, "")


def find_group_name(gid: int) -> str:
    """Return the name of a group. Raise `ServiceError` if the system has no group with this id."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        raise ServiceError(5, f"group {gid}, the user's primary one, has no name on this machine: create it") from None


def find_account(user: str) -> tuple[int, int, str]:
    """Return user id, group id and home folder of an account.

    Raise `ServiceError` if the account does not exist or is root.
    """
    try:
        account = pwd.getpwnam(user)
    except KeyError:
        raise ServiceError(5, f"there is no user {user!r} on this machine") from None
    if account.pw_uid == 0:
        raise ServiceError(6, "the service does not run as root: name another user with --user")
    return account.pw_uid, account.pw_gid, account.pw_dir
