"""What became of the newest requests: every step with its time, every decision with all its numbers, and its end.

Kept in bounded rings, so that a person can ask why a request went where it went (`cluster explain`), and so that the
decisions of a day can be written to a file and taken again by another policy (`replay`). A request that was refused
before it had a place in the queue, because its body was wrong, has a ring of its own: a client that sends nothing else
evicts no other request.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import msgspec

from router.errors import Problem
from router.placement.place import Candidate, Demand, NoPlacement, Placement, Policy, explain
from wire.frames import Timings
from wire.identity import NodeId
from wire.refusals import Refused

STORIES_KEPT = 1000
REFUSALS_KEPT = 500
DECISIONS_KEPT = 1000
ROWS_KEPT = 16
"""Nodes kept of each decision: enough to explain, bounded in a large cluster."""
LONGEST_LINE = 4 * 2**20
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_NAME = re.compile(r"[A-Za-z0-9_.:/=-]{1,64}")


class Decision(msgspec.Struct, frozen=True, gc=False):
    """One placement as it was made. `at` in monotonic seconds; `nodes` is how many the cluster had."""

    at: float
    request_id: str
    key: str
    demand: Demand
    candidates: tuple[Candidate, ...]
    chosen: NodeId | None = None
    refused: Refused | None = None
    nodes: int = 0

    def rows(self) -> list[dict[str, object]]:
        """Give every node's arithmetic as plain rows."""
        return explain(self.candidates, self.chosen)


class Story(msgspec.Struct, frozen=True, gc=False):
    """A request from its arrival (monotonic seconds) to its end, `seconds` later. `steps`: seconds after it came, what,
    on which node. `timings` are its last node's; `ignored` are the fields and tools
    of its body that changed nothing."""

    request_id: str
    key: str
    model: str
    stream: bool
    arrived: float
    seconds: float
    outcome: str
    message: str
    steps: tuple[tuple[float, str, str], ...]
    prompt_tokens: int | None = None
    cached_tokens: int = 0
    completion_tokens: int = 0
    timings: Timings | None = None
    ignored: tuple[str, ...] = ()


class History:
    """The rings."""

    def __init__(self) -> None:
        self.stories: deque[Story] = deque(maxlen=STORIES_KEPT)
        self.refusals: deque[Story] = deque(maxlen=REFUSALS_KEPT)
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS_KEPT)

    def decided(
        self, at: float, request_id: str, key: str, demand: Demand, result: Placement | NoPlacement, nodes: int
    ) -> None:
        """Keep a decision; of a large cluster the node that was chosen and some others."""
        kept = result.candidates
        if isinstance(result, NoPlacement):
            self.decisions.append(Decision(at, request_id, key, demand, kept[:ROWS_KEPT], None, result.refused, nodes))
            return
        chosen = result.chosen
        if len(kept) > ROWS_KEPT:
            kept = (chosen, *(one for one in kept[:ROWS_KEPT] if one is not chosen))
        self.decisions.append(Decision(at, request_id, key, demand, kept, chosen.node, None, nodes))

    def refused(self, at: float, request_id: str, key: str, problem: Problem) -> None:
        """Keep a request that was refused for what it is, `at` in monotonic seconds."""
        reason = unquoted(problem.message, problem.param or "")
        self.refusals.append(Story(request_id, key, "", False, at, 0.0, problem.code, reason, ()))

    def newest(self, count: int) -> list[Story]:
        """Return the newest requests that have ended, refused ones included, oldest first."""
        ended = list(self.stories)[-count:] + list(self.refusals)[-count:]
        return sorted(ended, key=lambda story: story.arrived + story.seconds)[-count:]

    def told(self, request_id: str) -> list[Story]:
        """Give the kept stories of a request id, oldest first: a client may use one id twice."""
        return [story for story in (*self.refusals, *self.stories) if story.request_id == request_id]

    def decided_on(self, request_id: str) -> list[Decision]:
        """Give the kept decisions about one request, oldest first."""
        return [decision for decision in self.decisions if decision.request_id == request_id]

    def lines(self) -> Iterator[bytes]:
        """Give every kept decision as a line of JSON."""
        return (msgspec.json.encode(decision) + b"\n" for decision in tuple(self.decisions))


class Replayed(msgspec.Struct, frozen=True):
    """How another policy would have decided: `same` of `decisions` alike, and every node that would have been taken
    instead, with what was."""

    decisions: int
    same: int
    refused: int
    instead: tuple[tuple[str, str, str], ...]
    """(request id, node taken, node that the other policy takes)"""
    waits: tuple[float, float]
    """Mean of the expected seconds to the first token as decided, and by the other policy."""


def unquoted(message: str, param: str) -> str:
    """Return a message without what it quotes of a request, but names: a prompt in a wrong place is not kept."""
    for step in re.split(r"[.\[\]]+", param):
        if step and not _NAME.fullmatch(step):
            message = message.replace(step, "…")
    return _QUOTED.sub(lambda quoted: quoted[0] if _NAME.fullmatch(quoted[0][1:-1]) else "'…'", message)


def read_line(line: bytes) -> Decision:
    """Read one line of `History.lines`. ValueError says what is wrong with it."""
    if len(line) > LONGEST_LINE:
        raise ValueError(f"the line has {len(line)} bytes, at most {LONGEST_LINE} are read")
    try:
        return msgspec.json.decode(line, type=Decision)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None


def replay(decisions: Iterable[Decision], policy: Policy, draw: Callable[[], float]) -> Replayed:
    """Take every decision again, each on what was known then; what other decisions would have changed later is not
    modelled (`cluster simulate` does that)."""
    count = same = refused = 0
    instead: list[tuple[str, str, str]] = []
    was: list[float] = []
    would: list[float] = []
    for one in decisions:
        count += 1
        feasible = [candidate for candidate in one.candidates if candidate.feasible]
        taken = next((candidate for candidate in feasible if candidate.node == one.chosen), None)
        if taken is None:
            refused += 1
            continue
        best = min(feasible, key=lambda node: (*policy.score(node, one.demand), draw()))
        was.append(taken.expected_ttft)
        would.append(best.expected_ttft)
        if policy.score(best, one.demand) == policy.score(taken, one.demand):
            same += 1
        else:
            instead.append((one.request_id, taken.name, best.name))
    return Replayed(count, same, refused, tuple(instead), (_mean(was), _mean(would)))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
