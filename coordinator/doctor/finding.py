"""Result of a check, and the exit code of all results. Pure.

A check returns ok, warn, fail, or "not here" with the reason; never nothing. Ids are stable, because scripts and the
manual use them. A fault comes with the next step.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Result = Literal["ok", "warn", "fail", "not here"]
CLEAN, WARNED, FAILED, PIN, BLOCKED = 0, 1, 6, 9, 10
"""Exit codes of the doctor."""
LOCAL_NETWORK, LINK = "local-network", "coordinator"
"""Checks whose failure has its own exit code."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check: finding with numbers (bytes, seconds, shares), and the next step unless ok."""

    result: Result
    text: str
    fix: str = ""
    numbers: Mapping[str, float | str | None] = field(default_factory=dict[str, "float | str | None"])
    intercepted: bool = False
    """Whether the peer is not the expected one."""


def ok(text: str, **numbers: float | str | None) -> Finding:
    """Return a finding without a fault."""
    return Finding("ok", text, "", numbers)


def warn(text: str, fix: str, **numbers: float | str | None) -> Finding:
    """Return a finding about something that works but needs attention."""
    return Finding("warn", text, fix, numbers)


def fail(text: str, fix: str, **numbers: float | str | None) -> Finding:
    """Return a finding about something that does not work."""
    return Finding("fail", text, fix, numbers)


def not_here(why: str) -> Finding:
    """Return a finding for a check that does not apply to this machine."""
    return Finding("not here", why)


def exit_code(findings: Iterable[tuple[str, Finding]], *, strict: bool) -> int:
    """Return the exit code for findings by id. The privacy block and the wrong peer come first, with their codes."""
    found = list(findings)
    failed = {name for name, one in found if one.result == "fail"}
    if LOCAL_NETWORK in failed:
        return BLOCKED
    if any(one.intercepted for _, one in found):
        return PIN
    if failed:
        return FAILED
    return WARNED if strict and any(one.result == "warn" for _, one in found) else CLEAN
