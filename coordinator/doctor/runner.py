"""Concurrent run of all checks with a time limit. Findings are in the order of `CHECKS`.

A check that hangs becomes a finding, and the doctor continues without it. Threads are daemons, because a thread that is
blocked in the kernel on a dead disk must not keep the command from ending.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.doctor import machine_checks, network_checks, pool_checks, service_checks
from coordinator.doctor.finding import Finding, warn
from coordinator.doctor.host_probe import HostProbe


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the doctor."""

    id: str
    """Stable name of the check, which scripts and the manual use."""
    title: str
    """Subject of the check, for `--list`."""
    run: Callable[[HostProbe], Finding]
    """Function that does the check."""


CHECKS = (
    Check("system", "The system's version", machine_checks.check_system),
    Check("python", "The interpreter", machine_checks.check_python),
    Check("mlx", "MLX and its device", machine_checks.check_mlx),
    Check("memory", "RAM, cap and margin", machine_checks.check_memory),
    Check("wired-limit", "Metal's wired limit", machine_checks.check_wired_limit),
    Check("disk", "Free disk space", machine_checks.check_disk),
    Check("files", "Permissions of the secrets", machine_checks.check_files),
    Check("open-files", "Files and connections", machine_checks.check_open_files),
    Check("settings", "The settings", pool_checks.check_settings),
    Check("coordinator", "Coordinator reachable", pool_checks.check_coordinator),
    Check("local-network", "Local network privacy", network_checks.check_local_network),
    Check("bonjour", "Multicast, on UDP 5353", network_checks.check_bonjour),
    Check("firewall", "The application firewall", machine_checks.check_firewall),
    Check("certificates", "Expiry of the certificates", pool_checks.check_certificates),
    Check("clock", "The clock", pool_checks.check_clock),
    Check("protocol", "Versions and protocol", pool_checks.check_protocol),
    Check("identity", "The node's identity", pool_checks.check_identity),
    Check("service", "The service", service_checks.check_service),
    Check("started-from", "Responsible program for macOS", machine_checks.check_started_from),
    Check("sleep", "Sleep settings", machine_checks.check_sleep),
    Check("power", "Power, battery, lid", machine_checks.check_power),
    Check("filevault", "FileVault", machine_checks.check_filevault),
    Check("panics", "Kernel panics", machine_checks.check_panics),
    Check("video", "Ray's ports", pool_checks.check_video),
    Check("proxy", "Proxies in the environment", network_checks.check_proxy),
    Check("errors", "Errors in the logs", pool_checks.check_log_errors),
)
"""All checks, in the order in which their findings are printed."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """A check with its finding, and its duration in seconds."""

    check: Check
    finding: Finding
    seconds: float

    def to_row(self) -> dict[str, Any]:
        """Return the result as a JSON object, for `-o json` and the bundle."""
        finding = self.finding
        return {
            "id": self.check.id,
            "title": self.check.title,
            "result": finding.result,
            "text": finding.text,
            "fix": finding.fix,
            "numbers": dict(finding.numbers),
            "seconds": round(self.seconds, 3),
        }


def run_checks(here: HostProbe, checks: Sequence[Check] = CHECKS) -> Iterator[CheckResult]:
    """Start all `checks`, and yield their results in order, each as soon as it is available.

    A check that has not ended after `here.timeout_seconds` is abandoned, and a check that raises does not end the run.
    Both yield a warning.
    """
    began = time.monotonic()
    running = [_RunningCheck(check, here) for check in checks]
    for order in running:
        yield order.wait_for_result(began + here.timeout_seconds - time.monotonic())


class _RunningCheck:
    """One check in its own thread."""

    def __init__(self, check: Check, here: HostProbe) -> None:
        self._check = check
        self._here = here
        self._results: list[CheckResult] = []
        self._began = time.monotonic()
        self._done = threading.Event()
        threading.Thread(target=self._run, name=check.id, daemon=True).start()

    def _run(self) -> None:
        try:
            finding = self._check.run(self._here)
        except Exception as error:  # an exception of one check must not hide the findings of the rest
            finding = warn(
                f"the check itself failed: {type(error).__name__}: {error}",
                "this is a fault of macpool: report it with `cluster doctor --bundle`",
            )
        self._results.append(CheckResult(self._check, finding, time.monotonic() - self._began))
        self._done.set()

    def wait_for_result(self, seconds: float) -> CheckResult:
        """Wait at most `seconds` for the end of the check; below 0, do not wait.

        Return the result; a warning if the check has not ended.
        """
        if self._done.wait(seconds):
            return self._results[0]
        late = warn("the check did not end in time", "run it again; if this repeats, a system tool or disk hangs")
        return CheckResult(self._check, late, time.monotonic() - self._began)
