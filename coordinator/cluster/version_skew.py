"""What every member of the cluster runs, and what to do about it. Pure.

Coordinator and nodes of one version and the one before work together, whichever is newer; frames of one protocol are
understood whatever the version, because fields are only ever added at their end.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from wire.identity import OLDEST_PROTOCOL, PROTOCOL

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class Running:
    """One member: its name, the version it runs (empty: it was not here since the coordinator started), the protocol
    it speaks (0: unknown), its state."""

    name: str
    version: str
    protocol: int
    state: str


@dataclass(frozen=True, slots=True)
class Line:
    """A member and what to do: nothing (`ok`), or a step for a person."""

    running: Running
    ok: bool
    advice: str


def read_version(text: str) -> tuple[int, ...]:
    """Give a version's numbers; what is no version is older than all."""
    release = re.split(r"[^0-9.]", text, maxsplit=1)[0]
    return tuple(int(number) for number in _NUMBER.findall(release)[:4])


def compare(coordinator: str, members: Iterable[Running]) -> list[Line]:
    """Say of every member how it stands to the coordinator's version."""
    return [_line(read_version(coordinator), one) for one in members]


def _line(ours: tuple[int, ...], one: Running) -> Line:
    if one.protocol and not OLDEST_PROTOCOL <= one.protocol <= PROTOCOL:
        where = "there" if one.protocol < OLDEST_PROTOCOL else "on the coordinator"
        return Line(one, False, f"cannot take part: protocol {one.protocol}; update macpool {where}")
    if not one.version:
        return Line(one, False, "not seen since the coordinator started")
    theirs = read_version(one.version)
    if theirs == ours:
        return Line(one, True, "")
    if theirs > ours:
        return Line(one, False, "newer than the coordinator: update the coordinator first")
    return Line(
        one, False, f"older: `cluster node drain {one.name} --wait 10m`, update macpool there, restart its node"
    )
