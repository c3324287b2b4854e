"""Run membership scenarios: a text of commands, each followed by its expected results, indented.

    # a comment
    0 connect a              → actions, then the member when it changed
        changed a
        a joining link 1

Verbs: enrol, connect NODE [INSTANCE] [takeover], report NODE [draining|paused], end NODE [link N], goodbye NODE REASON,
cordon, uncordon, remove NODE, restore NODE…. `tick` ticks once, and `until T` ticks at every deadline up to T seconds.
The number before a verb is the time. An event that is not allowed prints `illegal`.

`MACPOOL_REWRITE=1 pytest tests/sim` writes the actual results; review the difference.
"""

from collections.abc import Iterator

from coordinator.cluster.member_state import (
    Action,
    CloseLink,
    DeleteMember,
    Event,
    Member,
    MemberConnected,
    MemberCordoned,
    MemberDisconnected,
    MemberEnrolled,
    MemberGoodbye,
    MemberRemoved,
    MemberReported,
    MemberUncordoned,
    PublishMember,
    ResumeRequests,
)
from coordinator.cluster.membership import Membership, advance, next_deadline, restore_membership, tick
from tests.sim.script import play_script
from wire.identity import NodeId
from wire.state_machine import IllegalEventError


def play(script: str) -> str:
    """Return the script with the results after every command."""
    return play_script(script, _Story().do)


class _Story:
    def __init__(self) -> None:
        self.pool = Membership()
        self._links = 0

    def do(self, line: str) -> Iterator[str]:
        time, verb, *words = line.split()
        now = float(time)
        if verb == "restore":
            before, self.pool = self.pool, restore_membership([NodeId(word) for word in words], now)
            yield from self._told((), before)
        elif verb == "tick":
            before = self.pool
            self.pool, actions = tick(self.pool, now)
            yield from self._told(actions, before)
        elif verb == "until":
            yield from self._until(now, float(words[0]))
        else:
            yield from self._event(NodeId(words[0]), self._read(verb, words), now)

    def _event(self, node: NodeId, event: Event, now: float) -> Iterator[str]:
        before = self.pool
        try:
            self.pool, actions = advance(self.pool, node, event, now)
        except IllegalEventError:
            yield "illegal"
            return
        yield from self._told(actions, before)

    def _until(self, now: float, end: float) -> Iterator[str]:
        while (due := next_deadline(self.pool, now)) is not None and due <= end:
            before, now = self.pool, due
            self.pool, actions = tick(self.pool, now)
            told = list(self._told(actions, before))
            yield from (f"{now:g}: {line}" for line in told)

    def _told(self, actions: tuple[Action, ...], before: Membership) -> Iterator[str]:
        self.pool.check()
        yield from map(_action, actions)
        for node, member in self.pool.members.items():
            shown = _member(member)
            if node not in before.members or _member(before.members[node]) != shown:
                yield shown
        if before.self_suspect != self.pool.self_suspect:
            yield "the coordinator suspects itself" if self.pool.self_suspect else "the coordinator trusts itself"

    def _read(self, verb: str, words: list[str]) -> Event:
        node, *rest = words
        member = self.pool.members.get(NodeId(node))
        link = int(rest[-1]) if rest and rest[0] == "link" else member.newest if member else 0
        match verb:
            case "connect":
                self._links += 1
                instance = rest[0] if rest and rest[0] != "takeover" else "i1"
                return MemberConnected(self._links, instance, "takeover" in rest)
            case "report":
                return MemberReported(link, draining="draining" in rest or "paused" in rest, paused="paused" in rest)
            case "end":
                return MemberDisconnected(link)
            case "goodbye":
                return MemberGoodbye(link, rest[0])
            case _:
                return {
                    "enrol": MemberEnrolled(),
                    "cordon": MemberCordoned(),
                    "uncordon": MemberUncordoned(),
                    "remove": MemberRemoved(),
                }[verb]


def _action(action: Action) -> str:
    match action:
        case CloseLink():
            return f"close link {action.link} of {action.node}: {action.reason}"
        case ResumeRequests():
            return f"gone {action.node}: {action.reason}"
        case PublishMember():
            return f"changed {action.node}"
        case DeleteMember():
            return f"forget {action.node}"


def _member(member: Member) -> str:
    words = [str(member.node), str(member.state)]
    words += [f"link {member.link}"] if member.link else []
    words += ["cordoned"] if member.cordoned else []
    words += [] if member.enrolled else ["no-member"]
    words += [f"({member.reason})"] if member.reason else []
    return " ".join(words)
