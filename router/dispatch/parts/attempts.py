"""Attempts: a request on a node, from its reservation to its release.

Every attempt gets new numbers. Late frames about an earlier attempt therefore have unknown numbers and are ignored. A
node is believed only about requests that are on it.
"""

from collections.abc import Callable

from router.admission.cache_scope import CacheScopes
from router.dispatch.accounting import compute_max_prompt_tokens
from router.dispatch.active_request import ActiveRequest
from router.dispatch.circuit_breaker import CircuitBreakers
from router.dispatch.counters import Counters
from router.dispatch.parts.placer import Placer
from router.dispatch.parts.wakeups import DrainWaits, NodeChanges
from router.dispatch.request import EmbeddingInput
from router.dispatch.request_events import CancelAttempt, PrefillDone, RecordPrompt, Release, StartAttempt
from router.placement.cluster_view import NodeView
from router.placement.prefix_affinity import PrefixAffinity
from router.placement.reservations import ReservationLedger
from wire.frames import Cancel, Embed, Frame, Generate
from wire.identity import NodeId
from wire.models.version import UNKNOWN_VERSION


class Attempts:
    """Current attempts of all requests, by number.

    `send` writes a frame to a node's link and returns whether there is a link. `clock` returns monotonic seconds.
    """

    def __init__(
        self,
        send: Callable[[NodeId, Frame], bool],
        clock: Callable[[], float],
        *,
        placer: Placer,
        ledger: ReservationLedger,
        breakers: CircuitBreakers[NodeId],
        affinity: PrefixAffinity,
        counters: Counters,
        scopes: CacheScopes,
        changes: NodeChanges,
        drains: DrainWaits,
    ) -> None:
        self._send = send
        self._clock = clock
        self._placer = placer
        self._ledger = ledger
        self._breakers = breakers
        self._affinity = affinity
        self._counters = counters
        self._scopes = scopes
        self._changes = changes
        self._drains = drains
        self.live: dict[int, ActiveRequest] = {}
        """Requests on nodes, by attempt number."""

    def list_on_node(self, node: NodeId) -> list[ActiveRequest]:
        """Return the requests on a node, oldest first."""
        return sorted(
            (request for request in self.live.values() if request.node == node), key=lambda request: request.number
        )

    def reserve(self, request: ActiveRequest, action: StartAttempt) -> None:
        """Reserve memory, prefill and rows on the node of an attempt, and add the attempt to `live`.

        Also count the attempt, and record it in the node's circuit breaker and in the steps of the request. If the
        answer is not resumed, set the version of the model.
        """
        placed = action.placed
        attempt, chosen, need = placed.attempt, placed.chosen, placed.need
        node, model, prefill_tokens = chosen.node, chosen.model, chosen.prefill_tokens
        resumed = not action.first and request.tokens.longest > 0
        self._counters.count_attempt(node, first=action.first, resumed=resumed)
        if not resumed and model is not None:
            request.set_version(model.version)
        self._ledger.reserve(
            node,
            attempt,
            placed.seq,
            need,
            prefill_tokens,
            min(need, chosen.weights) if chosen.weights else 0,
            0.0 if model is None else prefill_tokens / model.prefill_speed,
            request.spec.demand.choices,
        )
        if resumed:
            self._ledger.mark_prefilled(attempt)
        self.live[attempt] = request
        now = self._clock()
        if self._breakers.by_node:
            self._breakers.record_attempt(node, attempt, now)
        request.add_step(now, "resumed" if resumed else "sent", chosen.name)

    def send(self, request: ActiveRequest, action: StartAttempt) -> bool:
        """Send the request of an attempt to its node. Return False if the node has no link.

        Received tokens are sent with it, so that the node resumes the answer. A request for embeddings or scores starts
        again: once it is sent, the vectors of an earlier attempt are discarded.
        """
        spec, placed = request.spec, action.placed
        if spec.embed is not None:
            sent = self._send(placed.chosen.node, _build_embed(request, action, spec.embed, self._scopes.scope))
            if sent:  # else an earlier attempt, from which the request was to move, continues
                request.answer.discard()
            return sent
        known = () if action.first else request.tokens.get_ids()
        version = request.version if known else UNKNOWN_VERSION
        frame = Generate(  # by position: with names it takes ten times as long
            placed.attempt,
            placed.seq,
            spec.request_id,
            spec.demand.model,
            spec.messages,
            request.params,
            spec.created,
            placed.chosen.output_tokens,
            spec.stream,
            spec.tools,
            spec.template,
            known,
            spec.text,
            spec.ids,
            request.weighted_key,
            version.fingerprint,
            self._scopes.scope,
            self._scopes.has_shared_prompt(spec.messages),
            version.content,
            spec.context_limit,
        )
        return self._send(placed.chosen.node, frame)

    def record_undelivered(self, request: ActiveRequest, node: NodeId, name: str) -> None:
        """Exclude a node without a link until its next report, and record a step. `name` is the name of the node."""
        request.tried.mark_refused(node, self._placer.get_report_time(node))
        request.add_step(self._clock(), "no link", name)

    def release(self, _: ActiveRequest, action: Release) -> None:
        """End an attempt, and release its reservation. Reservations are released only here.

        Also mark the node as changed, and end the waits for its drain if no request is left on it. If the attempt was
        the probe of the node's breaker, end the probe.
        """
        self.live.pop(action.attempt, None)
        self._ledger.release(action.attempt)
        if self._breakers.by_node:
            self._breakers.record_departure(action.node, action.attempt)
        if self._drains.waits:
            self._drains.notify(action.node)
        self._changes.mark(action.node)

    def cancel(self, _: ActiveRequest, action: CancelAttempt) -> None:
        """Send a cancel of an attempt to its node."""
        self._send(action.node, Cancel(action.attempt))

    def record_prompt(self, request: ActiveRequest, action: RecordPrompt) -> None:
        """Record the prompt tokens that the node counted, limited to the number that the request can have.

        Also mark the reservation as admitted, and add the prompt to the index of cached prompts.
        """
        frame = action.frame
        self._ledger.mark_admitted(frame.request)
        prompt, cached = frame.prompt_tokens, frame.cached_tokens
        if prompt > request.spec.demand.prompt_bytes:  # else below the maximum: each byte may be a token
            prompt = min(prompt, compute_max_prompt_tokens(request))
        request.record_prefill(prompt, cached if cached < prompt else prompt)
        if request.chain is not None:
            self._affinity.record_prefill(request.chain, action.node, frame.prompt_hash, *request.prompt_counts)

    def record_prefill_end(self, request: ActiveRequest, action: PrefillDone) -> None:
        """Record that the prompt of an attempt is prefilled.

        For the first tokens of a request, also record the time to the first token.
        """
        self._ledger.mark_first_token(action.attempt)
        if not action.first:
            return
        now = self._clock()
        request.add_step(now, "first token", request.life.node_name)
        self._counters.count_first_token(
            action.node, request.demand.model, request.prompt_counts[0], now - request.arrived
        )

    def release_reported_weights(self, node: NodeView) -> None:
        """Release the reserved weights of each load that the node's report already counts (`NodeView.is_loading`)."""
        loading = {model.name for model in node.models.values() if node.is_loading(model)}
        if loading:
            for request in self.live.values():
                if request.node == node.id and request.demand.model in loading:
                    self._ledger.release_weights(request.attempt)


def _build_embed(request: ActiveRequest, action: StartAttempt, embed: EmbeddingInput, scope: str) -> Embed:
    return Embed(
        request=action.placed.attempt,
        seq=action.placed.seq,
        request_id=request.spec.request_id,
        model=request.spec.demand.model,
        texts=embed.texts,
        ids=embed.ids,
        dimensions=embed.dimensions,
        truncate=embed.truncate,
        prompt=embed.prompt,
        weighted_key=request.weighted_key,
        query=embed.query,
        max_tokens=embed.max_tokens,
        cache_scope=scope,
    )
