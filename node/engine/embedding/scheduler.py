"""Scheduler of requests for embeddings: the choice of the next texts, and the handling of refusals and faults.

    start ─► forwards of texts, or of chunks of a long text ─► Vectors … ─► Finished
                 └── waits while other work may release memory ◄─┘   └► Refusal (no room), Failed (fault)

Rules
- Gate: every part of a forward is checked before it runs (`runner`). A batch is halved before it is refused.
- Turns: a turn is one part of a forward, or all remaining parts while no row decodes. The engine alternates these turns
  with the turns of prefills.
- Time: while rows decode, a part may take `PART_PER_STEP` times a decode step, which bounds the gaps between tokens. A
  forward over several texts may take at most `MAX_PARTS` of these times, because later requests wait for its end.
- Fairness: `chunk_policy.next_prefill` chooses the next request, as it chooses the next prefill.
- Batches: the shortest texts of a request run together. Texts of other requests for the same model join them if these
  are not longer.
- Shared beginning: it runs once for all texts of a request (`shared_beginning`), and its texts run after it. It is
  stored for later requests (`beginning_store`).
- Faults: if a forward over several requests raises, each of these requests runs alone from then on. A request whose own
  forward raises fails.
"""

import time
from collections.abc import Sequence
from itertools import count

import structlog

from node.engine.embedding.beginning_store import BeginningStore
from node.engine.embedding.forward import EmbeddingForward, WaitingText
from node.engine.embedding.request import EmbeddingRequest, EmbeddingTable
from node.engine.embedding.runner import EmbeddingRunner
from node.engine.memory.gated_forward import GatedForwards
from node.engine.process.device_errors import raise_if_device_lost
from node.engine.scheduling.batch_recovery import format_error
from node.engine.scheduling.rules.chunk_policy import IDLE_CHUNK_SECONDS, next_prefill
from node.engine.scheduling.rules.commitment_length import GATE_RETRY_SECONDS
from node.engine.scheduling.scheduler import Scheduler
from wire.capacity.fairness import PrefillFairness
from wire.frames import Failed, Frame, Refusal
from wire.refusals import FailureCode, RefusalCode, Refused

PART_PER_STEP = 0.25
"""Expected seconds of one part of a forward, per second of a decode step. The limit bounds the gaps between tokens."""
MAX_PARTS = 8
"""Maximum time of a forward over several texts while rows decode, in parts of `PART_PER_STEP` decode steps. With more
texts, the weights are read less often per text, but a later request waits longer. One long text may take more parts."""

log = structlog.get_logger("engine.embedding")


class EmbeddingScheduler:
    """Scheduler of the requests for embeddings or scores of all models.

    `table` has the live requests, `scheduler` the rows that decode, and `beginnings` the cached shared beginnings.
    `chunk`: maximum tokens of a forward. `floor`: tokens of the smallest chunk. `now` is in monotonic seconds in all
    methods.
    """

    def __init__(
        self,
        table: EmbeddingTable,
        forwards: GatedForwards,
        scheduler: Scheduler,
        beginnings: BeginningStore,
        chunk: int,
        floor: int,
    ) -> None:
        self._table = table
        self._beginnings = beginnings
        self._forwards = forwards
        self._scheduler = scheduler
        self._chunk = chunk
        self._floor = floor
        self._runner = EmbeddingRunner(forwards, floor)
        self._fairness = PrefillFairness()
        self._turns = count(1)
        self._forward: EmbeddingForward | None = None
        self._output: list[Frame] = []

    # state

    def next_step_at(self, now: float) -> float | None:
        """Return the monotonic time of the next turn: `now` if a turn is due or output is pending, later while no
        request may run. Return None without a request."""
        if self._output:
            return now
        times = (max(now, request.retry_at) for request in self._list_next())
        return min(times, default=None)

    def has_work(self, now: float) -> bool:
        """Return whether a part of a forward may run at the monotonic time `now`."""
        return any(request.retry_at <= now for request in self._list_next())

    def _list_next(self) -> Sequence[EmbeddingRequest]:
        """Return the candidates for the next turn: the first request of the forward in progress, or all requests."""
        return list(self._table) if self._forward is None else self._forward.requests[:1]

    # events

    def cancel(self, number: int, now: float) -> bool:
        """Cancel the request with this number, and send no further frame for it. Return False if it has ended or is
        unknown."""
        request = self._table.find(number)
        if request is not None:
            self._remove(request, now)
        return request is not None

    def end_newest(self, refused: Refused, now: float) -> bool:
        """Refuse the newest request with `refused`, to release its memory, and count it as shed. Return False if there
        is no request."""
        newest = max(self._table, key=lambda request: request.arrived, default=None)
        if newest is not None:
            self._forwards.count_shed()
            self._refuse(newest, refused, now)
        return newest is not None

    def drain_output(self) -> list[Frame]:
        """Return the frames to send that were produced since the last call."""
        frames, self._output = self._output, []
        return frames

    def close(self, now: float) -> None:
        """Remove all requests and release their memory, because the process ends. Send no frames for them."""
        for request in self._table:
            self._remove(request, now)

    # turns

    def run_turn(self, now: float) -> None:
        """Run one part of a forward at the monotonic time `now`, or all remaining parts if no row decodes. Do nothing
        if no request may start or continue. Raise `Halted` if the engine was halted, and `DeviceLost` for a failed
        command buffer.

        A request without room waits if other work may free memory; otherwise it is refused. If a forward of one request
        raises, the request fails. If a forward of several requests raises, each of them runs alone from then on. Refuse
        the newest request if memory is above the cap after the part.
        """
        choices = [request for request in self._list_next() if request.retry_at <= now]
        if not choices:
            return
        waiting = [(request.left, request.arrived, request.weighted_key) for request in choices]
        first = choices[0 if self._forward else next_prefill(waiting, next(self._turns), self._fairness)]
        self._scheduler.synchronize()
        step = self._scheduler.sum_step_seconds()
        involved = [first]
        try:
            refused = None
            if self._forward is None:
                if first.needs_beginning:
                    self._beginnings.restore(first)
                tokens = self._compute_tokens(first, step)
                texts = self._select_texts(first, choices, tokens)
                involved = list(dict.fromkeys(text.request for text in texts)) or involved
                refused = self._begin(first, texts, tokens, step, now)
            else:
                involved = list(self._forward.requests)
            before = {request.number: request.left for request in involved}
            refused = refused or self._run_part(first, step)
        except Exception as error:
            raise_if_device_lost(error)
            self._handle_fault(involved, error, now)
            return
        if self._forward is None:
            for request in involved:
                self._fairness.count_prefilled(request.weighted_key, before[request.number] - request.left)
                if request.has_ended:
                    self._output.append(request.build_finished(time.monotonic()))
                    self._remove(request, now)
        over = self._forwards.check_cap() if refused is None else None
        if over is not None:
            self.end_newest(over, now)
        if refused is not None:
            self._delay(first, refused, now)

    def _begin(
        self, first: EmbeddingRequest, texts: Sequence[WaitingText], tokens: int, step: float, now: float
    ) -> Refused | None:
        """Begin a forward: of whole texts if any fit, else of the next chunk of `first`, of about `tokens` tokens.

        Return the refusal if there is no room. `step`: seconds of a decode step; 0: no row decodes.
        """
        fitting, seconds = self._runner.select_fitting(texts), PART_PER_STEP * step
        if fitting:
            self._forward = self._runner.begin_texts(fitting, seconds, now)
            return None
        begun = self._runner.begin_chunk(first, max(self._floor, tokens), seconds, now)
        if isinstance(begun, Refused):
            return begun
        self._forward = begun
        return None

    def _run_part(self, first: EmbeddingRequest, step: float) -> Refused | None:
        """Run the next part of the forward in progress; all parts that are left if no row decodes (`step` is 0).

        Return the refusal if the part has no room; the forward then stays in progress. After the last part, output its
        frames and store a shared beginning that `first` has completed.
        """
        assert self._forward is not None  # noqa: S101 it has begun
        forward, had_beginning = self._forward, bool(first.beginning_cache)
        frames = self._runner.run_part(forward, rest=not step)
        if isinstance(frames, Refused):
            return frames
        if forward.has_ended:
            self._forward = None
            if first.beginning_cache and not had_beginning:
                self._beginnings.store(first)
            self._output += frames
        return None

    def _compute_tokens(self, request: EmbeddingRequest, step: float) -> int:
        """Return the tokens that fit into the time of the next forward. `step`: seconds of a decode step; 0: no row
        decodes."""
        head = request.loaded_model.head
        parts = MAX_PARTS if head is None else min(MAX_PARTS, head.layers)
        seconds = min(IDLE_CHUNK_SECONDS, PART_PER_STEP * step * parts) if step else IDLE_CHUNK_SECONDS
        past = request.count_beginning() if request.partial is None else request.partial.stored_tokens
        return request.loaded_model.stats.pace.fit_tokens(seconds, past, self._chunk)

    def _select_texts(
        self, first: EmbeddingRequest, choices: Sequence[EmbeddingRequest], tokens: int
    ) -> list[WaitingText]:
        """Return the texts to run in one forward, of at most `tokens` tokens with padding.

        These are the texts of `first`, the shortest first, then texts of other requests that are not longer. One text
        of at most the smallest chunk may exceed `tokens`. Texts after a shared beginning run only with texts of the
        same request. Return none if the next text has more tokens or is in progress, or if the shared beginning must
        run first.
        """
        if first.partial is not None or first.needs_beginning:
            return []
        chosen: list[WaitingText] = []
        others: Sequence[EmbeddingRequest] = () if first.alone or first.beginning else choices
        longest = 0
        for request in (first, *(other for other in others if other is not first)):
            if request is not first and (
                request.alone or request.beginning or request.loaded_model is not first.loaded_model
            ):
                continue
            for place in reversed(request.waiting):
                size = max(longest, request.count_own_tokens(place))
                most = tokens if chosen else max(tokens, self._floor)
                if (len(chosen) + 1) * size > most or (request is not first and size > longest):
                    break
                chosen.append(WaitingText(request, place))
                longest = size
        return chosen

    # ends

    def _handle_fault(self, involved: Sequence[EmbeddingRequest], error: Exception, now: float) -> None:
        first, self._forward = involved[0], None
        self._beginnings.invalidate(first.loaded_model.name)
        log.error("forward", request=first.number, requests=len(involved), error=format_error(error), exc_info=error)
        if len(involved) > 1:
            for request in involved:
                request.run_alone()
            return
        text = f"the forward of its texts failed: {format_error(error)}"
        self._output.append(Failed(first.number, FailureCode.ENGINE_ERROR, text))
        self._forwards.count_failure(by_engine=True)
        self._remove(first, now)

    def _delay(self, request: EmbeddingRequest, refused: Refused, now: float) -> None:
        """Delay a request that has no room now if other work may release memory; otherwise refuse the request.

        While its forward is in progress, no other texts run. A refusal discards the forward.
        """
        others = self._forward is None and any(other is not request and other.retry_at <= now for other in self._table)
        waits = others or self._scheduler.next_step_at(now) is not None
        if refused.code is RefusalCode.NO_ROOM and (waits or self._forwards.find_peak_expiry() is not None):
            request.delay(now + GATE_RETRY_SECONDS)
        else:
            self._forward = None
            self._refuse(request, refused, now)

    def _refuse(self, request: EmbeddingRequest, refused: Refused, now: float) -> None:
        self._output.append(Refusal(request.number, refused))
        self._remove(request, now)

    def _remove(self, request: EmbeddingRequest, now: float) -> None:
        """Remove a request that has ended. Discard the forward in progress if no other request needs it."""
        self._table.remove(request, now)
        if self._forward is not None:
            self._forward.remove_request(request)
            if not self._forward.requests:
                self._forward = None
