"""Handlers of the frames from nodes about a request or command: `Admitted`, `Vectors`, `Finished`, `Refusal`, `Failed`.

After a refusal, the request is placed again (`Assignment.assign`), or ends if no node of the cluster would take it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from router.dispatch.accounting import bound_usage, compute_max_prompt_tokens
from router.dispatch.active_request import ActiveRequest
from router.dispatch.aliases.context_limit import refuse_beyond_limit
from router.dispatch.answer import VectorsAnswer
from router.dispatch.circuit_breaker import CircuitBreakers
from router.dispatch.counters import Counters
from router.dispatch.node_commands import NodeCommands
from router.dispatch.parts.assignment import Assignment
from router.dispatch.parts.attempts import Attempts
from router.dispatch.parts.endings import Endings
from router.dispatch.parts.losses import Losses
from router.dispatch.parts.placer import Placer
from router.dispatch.request_events import AttemptEnded, Event, NodeAdmitted, NodeRefused, Stopped
from router.dispatch.request_state import RequestState
from wire.frames import Admitted, Failed, Finished, Frame, Refusal, Vectors
from wire.identity import NodeId
from wire.refusals import FINAL, FailureCode, RefusalCode

ELSEWHERE = frozenset({RefusalCode.TOO_LARGE, RefusalCode.CONTEXT, RefusalCode.NO_MODEL, RefusalCode.LOAD_FAILED})
"""Codes of refusals that are final on one node, but not in the cluster.

Another node may have more memory, a longer context, the model, or a copy of it that can be loaded.
"""
RequestFrame = Finished | Admitted | Refusal | Failed | Vectors
"""Frames of a node about one request."""
Handler = Callable[[ActiveRequest, NodeId, Any], None]
"""Handler of one type of `RequestFrame`, called with the request, its node and the frame."""


class NodeFrames:
    """Handlers of frames about requests that are on the node. Frames about commands go to `commands`.

    `apply` applies an event to a request. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        apply: Callable[[ActiveRequest, Event], None],
        clock: Callable[[], float],
        *,
        attempts: Attempts,
        commands: NodeCommands,
        placer: Placer,
        assignment: Assignment,
        endings: Endings,
        losses: Losses,
        breakers: CircuitBreakers[NodeId],
        counters: Counters,
    ) -> None:
        self._apply = apply
        self._clock = clock
        self._live: Mapping[int, ActiveRequest] = attempts.live
        self._commands = commands
        self._placer = placer
        self._assignment = assignment
        self._endings = endings
        self._losses = losses
        self._breakers = breakers
        self._counters = counters
        self.receivers: Mapping[type[Frame], Callable[[NodeId, Any], None]] = {
            Admitted: partial(self._receive, self._handle_admitted),
            Vectors: partial(self._receive, self._handle_vectors),
            Finished: partial(self._receive, self._handle_finished),
            Refusal: partial(self._receive, self._handle_refusal),
            Failed: partial(self._receive, losses.handle_failure),
        }
        """Function that applies a frame from a node, by the type of `RequestFrame`."""

    def _receive(self, handle: Handler, node: NodeId, frame: RequestFrame) -> None:
        """Apply a frame about a request that is on the node with `handle`. Pass any other frame on to `commands`.

        `Vectors` of another request are ignored.
        """
        request = self._live.get(frame.request)
        if request is not None and request.node == node:
            handle(request, node, frame)
        elif not isinstance(frame, Vectors):
            self._commands.receive(node, frame)

    def _handle_admitted(self, request: ActiveRequest, _: NodeId, frame: Admitted) -> None:
        self._apply(request, NodeAdmitted(frame.request, frame))
        if request.spec.context_limit:
            refused = refuse_beyond_limit(request.spec, request.demand.prompt_tokens)
            if refused is not None:
                self._apply(request, Stopped(refused))

    def _handle_vectors(self, request: ActiveRequest, _: NodeId, frame: Vectors) -> None:
        if isinstance(request.answer, VectorsAnswer):
            request.answer.add_vectors(frame)

    def _handle_finished(self, request: ActiveRequest, node: NodeId, frame: Finished) -> None:
        answer = request.answer
        if isinstance(answer, VectorsAnswer) and not answer.complete:
            text = f"{request.node_name} did not send a valid vector for each text"
            self._losses.handle_failure(request, node, Failed(frame.request, FailureCode.ENGINE_ERROR, text))
            return
        if self._breakers.by_node:
            self._breakers.record_success(node, frame.request)
        frame = bound_usage(request, frame)
        self._counters.count_finished(frame.prompt_tokens, frame.cached_tokens, frame.completion_tokens)
        self._apply(request, AttemptEnded(frame.request, frame))

    def _handle_refusal(self, request: ActiveRequest, node: NodeId, frame: Refusal) -> None:
        """Place the request again after a refusal, or end it if no node of the cluster would take it."""
        refused = frame.refused
        self._counters.count_refusal(refused.code.value)
        request.add_step(self._clock(), f"refused: {refused.code}", request.node_name)
        numbers = refused.numbers if refused.code is RefusalCode.NO_ROOM else None
        self._apply(request, NodeRefused(frame.request, None if numbers is None else numbers.headroom))
        if request.state is not RequestState.NEW:
            return
        if refused.code in FINAL and refused.code not in ELSEWHERE:
            self._endings.deny(request, refused)
            return
        if frame.prompt_tokens is not None:
            request.set_prompt_tokens(min(frame.prompt_tokens, compute_max_prompt_tokens(request)))
            beyond = refuse_beyond_limit(request.spec, request.demand.prompt_tokens)
            if beyond is not None:
                self._endings.deny(request, beyond)
                return
        request.tried.mark_refused(node, self._placer.get_report_time(node), refused)
        self._assignment.assign(request)
