"""Result of a check of the doctor, and the exit code for all results. No I/O.

A check always returns ok, warn, fail, or "not here" with the reason. A fault has a next step. The ids of checks are
stable, because scripts and the manual use them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Result = Literal["ok", "warn", "fail", "not here"]
"""Result of a check. `warn`: something works but needs attention. `not here`: the check does not apply here."""
CLEAN, WARNED, FAILED, PIN, BLOCKED = 0, 1, 6, 9, 10
"""Exit codes of the doctor.

In order: no failed check; warnings but no failed check (with `--strict`); a failed check. Then: a peer other than the
coordinator answers; macOS blocks the local network.
"""
LOCAL_NETWORK, LINK = "local-network", "coordinator"
"""Ids of the checks of the local network and of the coordinator.

A failure of `LOCAL_NETWORK` has the exit code `BLOCKED`.
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check of the doctor."""

    result: Result
    text: str
    """Description of the result, as one sentence for a person."""
    fix: str = ""
    """Next step; empty if there is nothing to do."""
    numbers: Mapping[str, float | str | None] = field(default_factory=dict[str, "float | str | None"])
    """Values by name, for programs: bytes, seconds, counts or texts."""
    intercepted: bool = False
    """Whether a peer answers that is not this node's coordinator."""


def ok(text: str, **numbers: float | str | None) -> Finding:
    """Return a finding without a fault. `numbers` are values for programs, by name."""
    return Finding("ok", text, "", numbers)


def warn(text: str, fix: str, **numbers: float | str | None) -> Finding:
    """Return a finding about something that works but needs attention. `fix` is the next step.

    `numbers` are values for programs, by name.
    """
    return Finding("warn", text, fix, numbers)


def fail(text: str, fix: str, **numbers: float | str | None) -> Finding:
    """Return a finding about something that does not work. `fix` is the next step.

    `numbers` are values for programs, by name.
    """
    return Finding("fail", text, fix, numbers)


def not_here(why: str) -> Finding:
    """Return a finding for a check that does not apply to this machine. `why` is the reason, as text for a person."""
    return Finding("not here", why)


def compute_exit_code(findings: Iterable[tuple[str, Finding]], *, strict: bool) -> int:
    """Return the doctor's exit code for findings with the ids of their checks.

    The first of these codes applies: `BLOCKED` if `LOCAL_NETWORK` failed, `PIN` if a peer is not the coordinator,
    `FAILED` after any other failure. Without these, warnings have the code `WARNED` with `strict`. Otherwise return
    `CLEAN`.
    """
    all_findings = list(findings)
    failed = {name for name, finding in all_findings if finding.result == "fail"}
    if LOCAL_NETWORK in failed:
        return BLOCKED
    if any(finding.intercepted for _, finding in all_findings):
        return PIN
    if failed:
        return FAILED
    return WARNED if strict and any(finding.result == "warn" for _, finding in all_findings) else CLEAN
