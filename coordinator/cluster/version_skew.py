"""Comparison of the versions of the cluster's members, with the update step for each. Pure.

Coordinator and nodes work together if the coordinator supports the protocol of the node, whichever is newer. Frames of
one protocol are readable across versions, because fields are only added at their end.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from wire.identity import OLDEST_PROTOCOL, PROTOCOL

_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True)
class MemberVersion:
    """Member of the cluster with the versions of its software."""

    name: str
    """Display name of the node."""
    version: str
    """Version of Macpool; empty if the node has not linked since the coordinator started."""
    protocol: int
    """Protocol version of the node; 0 if unknown."""
    state: str
    """State of the node, as in `wire.node_state.NodeState`."""


@dataclass(frozen=True, slots=True)
class SkewAdvice:
    """Result of the version comparison for one member."""

    member: MemberVersion
    ok: bool
    """Whether no update is needed."""
    advice: str
    """Description of the difference, with the next step if there is one; empty if `ok`."""
    joinable: bool = True
    """Whether the coordinator supports the member's protocol."""


def parse_version(text: str) -> tuple[int, ...]:
    """Parse a version into at most four numbers, without a suffix such as `rc1`.

    Return `()`, which is less than any version, for a text that does not begin with a number, such as `v1.2`.
    """
    release = re.split(r"[^0-9.]", text, maxsplit=1)[0]
    return tuple(int(number) for number in _NUMBER.findall(release)[:4])


def compare_versions(coordinator: str, members: Iterable[MemberVersion]) -> list[SkewAdvice]:
    """Compare the version of each member with `coordinator`, and its protocol with the supported protocols.

    Return one result per member, in the order of `members`.
    """
    return [_compare_member(parse_version(coordinator), member) for member in members]


def _compare_member(coordinator: tuple[int, ...], member: MemberVersion) -> SkewAdvice:
    if member.protocol and not OLDEST_PROTOCOL <= member.protocol <= PROTOCOL:
        where = "there" if member.protocol < OLDEST_PROTOCOL else "on the coordinator"
        text = f"cannot take part: protocol {member.protocol}; update macpool {where}"
        return SkewAdvice(member, False, text, joinable=False)
    if not member.version:
        return SkewAdvice(member, False, "not seen since the coordinator started")
    version = parse_version(member.version)
    if version == coordinator:
        return SkewAdvice(member, True, "")
    if version > coordinator:
        return SkewAdvice(member, False, "newer than the coordinator: update the coordinator first")
    return SkewAdvice(
        member, False, f"older: `cluster node drain {member.name} --wait 10m`, update macpool there, restart its node"
    )
