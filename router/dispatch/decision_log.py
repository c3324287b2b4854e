"""History of recent requests: their steps and outcomes, and the placement decisions with the numbers behind them.

The history is kept in bounded rings. `cluster explain` shows why a request was placed on its node. The stored decisions
can be written to a file and evaluated with another policy (`replay`). Requests with an invalid body, and refused token
counts, have a separate ring. A client that sends only such requests therefore evicts no other request.
"""

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

import msgspec

from router.dispatch.aliases.candidates import PassedOver
from router.errors import Problem
from router.placement.candidate import Candidate, NoPlacement, Placement, ResourceDemand, explain
from router.placement.policies import Policy
from wire.frames import Timings
from wire.identity import NodeId
from wire.refusals import Refused

MAX_REQUESTS_KEPT = 1000
"""Maximum ended requests in the history."""
MAX_INVALID_KEPT = 500
"""Maximum invalid requests and refused token counts in the history."""
MAX_DECISIONS_KEPT = 1000
"""Maximum placement decisions in the history."""
MAX_CANDIDATES_KEPT = 16
"""Maximum nodes stored with each decision, which is bounded also in a large cluster."""
MAX_LINE_BYTES = 4 * 2**20
"""Maximum length in bytes of a line that `parse_line` accepts."""
_QUOTED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\"""")
_NAME = re.compile(r"[A-Za-z0-9_.:/=-]{1,64}")


class PlacementDecision(msgspec.Struct, frozen=True, gc=False):
    """Record of one placement decision: the demand, the candidates, and the chosen node or the refusal."""

    at: float
    """Time of the decision in monotonic seconds."""
    request_id: str
    key: str
    demand: ResourceDemand
    candidates: tuple[Candidate, ...]
    chosen: NodeId | None = None
    """Chosen node; None if no node could take the request."""
    refused: Refused | None = None
    """Refusal; None if a node was chosen."""
    nodes: int = 0
    """Number of nodes in the cluster at the time of the decision."""

    def to_rows(self) -> list[dict[str, object]]:
        """Return the rows of `router.placement.candidate.explain` for the recorded candidates.

        Sizes are in bytes, times in seconds.
        """
        return explain(self.candidates, self.chosen)


class RequestRecord(msgspec.Struct, frozen=True, gc=False):
    """History of one request from its arrival to its end."""

    request_id: str
    key: str
    """Id of the API key, or the name of the local key."""
    model: str
    stream: bool
    arrived: float
    """Arrival of the request in monotonic seconds."""
    seconds: float
    """Duration of the request in seconds."""
    outcome: str
    """`ok`, or the code of the refusal or failure."""
    message: str
    """Message of the refusal or failure, without text of the client's request; empty for `ok`."""
    steps: tuple[tuple[float, str, str], ...]
    """Steps as (seconds after arrival, event, node)."""
    prompt_tokens: int | None = None
    """Prompt tokens; None if they are unknown."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    timings: Timings | None = None
    """Timings reported by the request's last node; None without a complete answer."""
    ignored: tuple[str, ...] = ()
    """Fields and tools of the request's body that had no effect."""
    alias: str = ""
    """Alias that the client named; empty without one."""
    profile: str = ""
    """Profile that the client named; empty without one."""
    passed_over: tuple[PassedOver, ...] = ()
    """Models of the alias that were passed over before the request used its model or upstream."""


class DecisionLog:
    """Bounded history: `records` of ended requests, `refusals`, and placement `decisions`.

    `refusals` are the records of invalid requests and of refused token counts.
    """

    def __init__(self) -> None:
        self.records: deque[RequestRecord] = deque(maxlen=MAX_REQUESTS_KEPT)
        self.refusals: deque[RequestRecord] = deque(maxlen=MAX_INVALID_KEPT)
        self.decisions: deque[PlacementDecision] = deque(maxlen=MAX_DECISIONS_KEPT)

    def record_decision(
        self, at: float, request_id: str, key: str, demand: ResourceDemand, result: Placement | NoPlacement, nodes: int
    ) -> None:
        """Record a placement decision made at `at` (monotonic seconds), in a cluster of `nodes` nodes.

        At most `MAX_CANDIDATES_KEPT` candidates are stored. The chosen node is always one of them.
        """
        candidates = result.candidates
        if not isinstance(result, Placement):
            self.decisions.append(
                PlacementDecision(
                    at, request_id, key, demand, candidates[:MAX_CANDIDATES_KEPT], None, result.refused, nodes
                )
            )
            return
        chosen = result.chosen
        if len(candidates) > MAX_CANDIDATES_KEPT:
            others = (candidate for candidate in candidates if candidate is not chosen)
            candidates = (chosen, *islice(others, MAX_CANDIDATES_KEPT - 1))
        self.decisions.append(PlacementDecision(at, request_id, key, demand, candidates, chosen.node, None, nodes))

    def record_invalid(self, at: float, request_id: str, key: str, problem: Problem) -> None:
        """Record an invalid request or a refused token count at `at` (monotonic seconds).

        Text of the body that the message quotes is removed first.
        """
        reason = remove_quoted_text(problem.message, problem.param or "")
        self.refusals.append(RequestRecord(request_id, key, "", False, at, 0.0, problem.code, reason, ()))

    def list_newest(self, count: int) -> list[RequestRecord]:
        """Return the `count` requests that ended last, including invalid requests, oldest first. 0 returns all."""
        ended = list(self.records)[-count:] + list(self.refusals)[-count:]
        return sorted(ended, key=lambda story: story.arrived + story.seconds)[-count:]

    def find_requests(self, request_id: str) -> list[RequestRecord]:
        """Return the stored requests with a request id, invalid requests first; empty if there are none.

        There may be several, because a client may use an id twice.
        """
        return [record for record in (*self.refusals, *self.records) if record.request_id == request_id]

    def find_decisions(self, request_id: str) -> list[PlacementDecision]:
        """Return the stored decisions about all requests with a request id, oldest first; empty if there are none."""
        return [decision for decision in self.decisions if decision.request_id == request_id]

    def encode_lines(self) -> Iterator[bytes]:
        """Return an iterator over the stored decisions, each as a line of JSON, oldest first."""
        return (msgspec.json.encode(decision) + b"\n" for decision in tuple(self.decisions))


class ReplayResult(msgspec.Struct, frozen=True):
    """Result of `replay`: recorded decisions compared with the decisions of another policy."""

    decisions: int
    """Number of all decisions, including those of `refused`."""
    same: int
    """Number of decisions in which the other policy scores its own choice and the recorded choice equally."""
    refused: int
    """Number of decisions without a chosen node among their feasible candidates. They are not compared."""
    instead: tuple[tuple[str, str, str], ...]
    """Decisions that differ, as (request id, name of the recorded node, name of the other policy's node)."""
    waits: tuple[float, float]
    """Mean expected seconds to the first token, as recorded and with the other policy; zeros if nothing was compared.
    """


def remove_quoted_text(message: str, param: str) -> str:
    """Return an error message without text of the request. A prompt in a wrong place must not be stored.

    Quoted names are kept; other quoted text becomes `…`. `param` is the path of the wrong field. Each key of the path
    that is not a name is removed from the message as well.
    """
    for step in re.split(r"[.\[\]]+", param):
        if step and not _NAME.fullmatch(step):
            message = message.replace(step, "…")
    return _QUOTED.sub(lambda quoted: quoted[0] if _NAME.fullmatch(quoted[0][1:-1]) else "'…'", message)


def parse_line(line: bytes) -> PlacementDecision:
    """Parse one line of `DecisionLog.encode_lines`.

    Raise `ValueError` with the reason if the line is invalid or longer than `MAX_LINE_BYTES`.
    """
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"the line has {len(line)} bytes, at most {MAX_LINE_BYTES} are read")
    try:
        return msgspec.json.decode(line, type=PlacementDecision)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from None


def replay(decisions: Iterable[PlacementDecision], policy: Policy, draw: Callable[[], float]) -> ReplayResult:
    """Return how another policy would have made each decision, with the state known at that time.

    `draw` returns numbers in [0, 1), which decide ties. Effects of a different choice on later decisions are not
    modelled. `cluster simulate` models them.
    """
    count = same = refused = 0
    instead: list[tuple[str, str, str]] = []
    recorded_seconds: list[float] = []
    replayed_seconds: list[float] = []
    for decision in decisions:
        count += 1
        feasible = [candidate for candidate in decision.candidates if candidate.feasible]
        taken = next((candidate for candidate in feasible if candidate.node == decision.chosen), None)
        if taken is None:
            refused += 1
            continue
        best = min(feasible, key=lambda node: (*policy.score(node, decision.demand), draw()))
        recorded_seconds.append(taken.expected_ttft)
        replayed_seconds.append(best.expected_ttft)
        if policy.score(best, decision.demand) == policy.score(taken, decision.demand):
            same += 1
        else:
            instead.append((decision.request_id, taken.name, best.name))
    return ReplayResult(
        count, same, refused, tuple(instead), (_compute_mean(recorded_seconds), _compute_mean(replayed_seconds))
    )


def _compute_mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
