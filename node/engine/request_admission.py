"""Admission of requests in the engine: from a prepared request to its start in the scheduler, or to its refusal.

    UntokenizedPrompt ─► room for its tokenization ─► tokenized ─┐
                             └ Refusal                           │
    PreparedRequest ─────────────────────────────────────────────┴─► preflight, commit ─► scheduler
                                                                   │        └ Refusal
                                                                   └ its model is not loaded: waits for the load

Requests for embeddings take the same path, and enter the `EmbeddingTable` in place of the scheduler. The rules are in
`admission_rules`. A request whose number is already known, or that was cancelled, is ignored.
"""

import os
from collections.abc import Collection

from msgspec.structs import replace

from node.engine.admission_rules import (
    AdmissionCost,
    RequestLimits,
    build_refusal,
    compute_admission_cost,
    compute_waiting_bytes,
    refuse_before_load,
    refuse_embedding,
    refuse_improper,
    refuse_other_model,
    refuse_unknown_model,
)
from node.engine.embedding.beginning_store import BeginningStore
from node.engine.embedding.request import EmbeddingRequest, EmbeddingTable
from node.engine.kv.commitments import Commitment
from node.engine.memory.gate import GateSite
from node.engine.memory.gated_forward import GatedForwards
from node.engine.model_describer import ModelDescriber
from node.engine.models.loaded_model import LoadedModel
from node.engine.models.model_manager import ModelManager
from node.engine.models.model_table import ModelTable
from node.engine.models.model_wiring import ModelWiring
from node.engine.process.interface import MAX_CANCELLED_REMEMBERED
from node.engine.requests import preflight
from node.engine.requests.prepared import PreparedEmbedding, PreparedRequest
from node.engine.requests.sequence import Row, Sequence
from node.engine.requests.tokenize_admission import UntokenizedPrompt, refuse_too_long
from node.engine.requests.waiting_requests import WaitingForModel, WaitingRequests
from node.engine.scheduling.sampling import resolve_sampling
from node.engine.scheduling.scheduler import Scheduler
from node.engine.scheduling.step_output import build_finished
from node.models.catalogue import ModelCatalogue
from wire.capacity.fairness import WeightedKey
from wire.frames import Admitted, Frame, Refusal
from wire.refusals import RefusalCode, Refused
from wire.report import Memory, Model

PREEMPTION_INTERVAL_SECONDS = 1.0
"""Minimum seconds between two preemptions at admission. Memory may be returned with a delay. Without the pause, more
requests than needed would be preempted."""


class RequestAdmission:
    """Admission of requests in the engine.

    `embeddings` are the live requests for embeddings, and `beginnings` is the cache of their shared beginnings. `floor`
    is the smallest prefill chunk in tokens. `now` is in monotonic seconds in all methods. `acked` is the highest
    sequence number (`Generate.seq`, `Embed.seq`) of a request that was passed to `admit_or_queue`; 0 before the first.
    """

    def __init__(
        self,
        table: ModelTable,
        catalogue: ModelCatalogue,
        manager: ModelManager,
        describer: ModelDescriber,
        waiting: WaitingRequests,
        scheduler: Scheduler,
        forwards: GatedForwards,
        wiring: ModelWiring,
        limits: RequestLimits,
        embeddings: EmbeddingTable,
        beginnings: BeginningStore,
        floor: int,
    ) -> None:
        self._table = table
        self._catalogue = catalogue
        self._manager = manager
        self._describer = describer
        self._waiting = waiting
        self._scheduler = scheduler
        self._forwards = forwards
        self._wiring = wiring
        self._limits = limits
        self._embeddings = embeddings
        self._beginnings = beginnings
        self._floor = floor
        self.acked = 0
        self._cancelled: dict[int, None] = {}
        self._preempt_at = 0.0

    # tokenization

    def admit_tokenization(self, prompt: UntokenizedPrompt, now: float) -> Collection[Frame | UntokenizedPrompt]:
        """Admit a prompt to tokenization by a prompt thread if there is room for that, and reserve the memory.

        Return the prompt, or its `Refusal`; an empty list if its request was cancelled or is already known. Until the
        tokenization ends, `prompt.need` bytes are reserved, and the prompt's model is not unloaded if it is loaded.
        """
        number = prompt.frame.request
        if self._take_cancellation(number) or self._is_known(number) or number in self._waiting.in_tokenization:
            return []
        refused = self._forwards.gate.refuse_unless_ready() or refuse_too_long(
            prompt.frame, prompt.need, self._forwards.read_memory(now)
        )
        if refused is not None:
            return [Refusal(number, refused)]
        loaded_model = self._table.loaded.get(prompt.frame.model)
        hold = None if loaded_model is None else loaded_model.usage.hold()
        self._waiting.begin_tokenization(number, hold)
        refused = self._forwards.check(GateSite.PREFLIGHT, prompt.need) if prompt.need else None
        if refused is not None:
            self._waiting.end_tokenization(number)
            return [Refusal(number, refused)]
        self._waiting.reserve(number, prompt.need)
        return [prompt]

    def _take_cancellation(self, number: int) -> bool:
        """Return whether a request was cancelled before it arrived, and clear that cancellation."""
        if number not in self._cancelled:
            return False
        del self._cancelled[number]
        return True

    def _is_known(self, number: int) -> bool:
        return self._scheduler.has_request(number) or number in self._embeddings or number in self._waiting

    # requests

    def admit_or_queue(self, prepared: PreparedRequest | PreparedEmbedding, now: float) -> list[Frame]:
        """Admit a request, queue it until its model is loaded, or refuse it.

        Return `Admitted` (and `Finished` if nothing is left to generate) or `Refusal`; an empty list for a queued
        request. Return an empty list as well for a request that is already known or was cancelled. In all cases,
        `acked` includes the sequence number of the request.
        """
        request = prepared.request
        self.acked = max(self.acked, request.seq)
        if self._take_cancellation(request.request) or self._is_known(request.request):
            return []
        refused = (
            self._forwards.gate.refuse_unless_ready()
            or prepared.refused
            or refuse_other_model(request, self._catalogue.find(request.model))
        )
        if refused is not None:
            return [Refusal(request.request, refused)]
        loaded_model = self._table.loaded.get(request.model)
        if loaded_model is not None:
            return self.admit(loaded_model, prepared, now, now)
        return self._await_model(prepared, now)

    def _await_model(self, prepared: PreparedRequest | PreparedEmbedding, now: float) -> list[Frame]:
        """Queue a request until its model is loaded; refuse it if the model cannot be loaded."""
        request = prepared.request
        found = self._catalogue.find(request.model)
        if found is None:
            return [Refusal(request.request, refuse_unknown_model(request.model))]
        shape, model = self._limits.compute_shape(prepared, found), self._describer.describe(found, now)
        refused = refuse_before_load(request, shape, model, self._forwards.read_memory(now), self._limits.batch)
        if refused is not None:
            return [build_refusal(prepared, refused)]
        self._waiting.add(request.request, WaitingForModel(prepared, now, compute_waiting_bytes(shape, found)))
        self._manager.request_load(found)
        return []

    def admit(
        self, loaded_model: LoadedModel, prepared: PreparedRequest | PreparedEmbedding, arrived: float, now: float
    ) -> list[Frame]:
        """Check a request against the current memory, commit its memory and start it, or refuse it. Return `Admitted`,
        followed by `Finished` if nothing is left to generate, or `Refusal`.

        `arrived` is the arrival of the request in monotonic seconds. During the call the model is held, so that it is
        not unloaded to make room for its own request.
        """
        with loaded_model.usage.hold():
            return self._admit(loaded_model, prepared, arrived, now)

    def _admit(
        self, loaded_model: LoadedModel, prepared: PreparedRequest | PreparedEmbedding, arrived: float, now: float
    ) -> list[Frame]:
        if isinstance(prepared, PreparedEmbedding):
            return self._admit_embedding(loaded_model, prepared, arrived, now)
        request, number = prepared.request, prepared.request.request
        shape = self._limits.compute_shape(prepared, loaded_model.descriptor)
        model = self._describer.describe(loaded_model.descriptor, now)
        refused = refuse_improper(prepared, shape, model, loaded_model.vocabulary, self._limits.batch)
        if refused is not None:
            return [Refusal(number, refused, shape.prompt)]
        sequence = _create_sequence(loaded_model, prepared, shape, arrived)
        active = list(sequence.iterate_active_rows())
        if not active:  # the whole answer was sent by another node, and only its end is missing
            sequence.mark_begun(now)
            sequence.mark_joined(now)
            return [Admitted(number, shape.prompt), build_finished(sequence, now)]
        shape_left = shape.replace_choices(len(active))
        cost = compute_admission_cost(shape_left, loaded_model.ledger, model)
        refused = self._make_room_or_refuse(model, shape_left, cost, now, request.weighted_key)
        if refused is not None:
            return [Refusal(number, refused, shape.prompt)]
        for row, commitment in zip(active, loaded_model.ledger.commit(shape.length, len(active)), strict=True):
            row.commit(commitment)
        text = sum(len(message.content.encode()) for message in request.messages) + len(request.text.encode())
        loaded_model.stats.record_text(text, len(prepared.ids))
        self._scheduler.begin_request(loaded_model, sequence)
        return [Admitted(number, shape.prompt, sequence.prompt_cached, sequence.prompt_hash)]

    def _admit_embedding(
        self, loaded_model: LoadedModel, prepared: PreparedEmbedding, arrived: float, now: float
    ) -> list[Frame]:
        """Check a request for embeddings against the current memory, and start or refuse it."""
        number, head = prepared.request.request, loaded_model.head
        assert head is not None  # noqa: S101 the preparer refuses models of another kind
        refused = refuse_embedding(prepared, head.layout, head.dimensions, loaded_model.vocabulary)
        if refused is not None:
            return [Refusal(number, refused)]
        cached = self._beginnings.count_cached(prepared)
        request = EmbeddingRequest(prepared, loaded_model, loaded_model.usage.hold(), arrived, self._floor, cached)
        first = prepared.longest if head.runs_whole_texts else min(prepared.longest, self._floor)
        held = request.compute_reserved_bytes()
        total = held + loaded_model.estimator.estimate_chunk(first, 0) + head.estimate_bytes(first)
        shape = self._limits.compute_shape(prepared, loaded_model.descriptor)
        model = self._describer.describe(loaded_model.descriptor, now)
        refused = self._make_room_or_refuse(
            model, shape, AdmissionCost(held, total), now, prepared.request.weighted_key
        )
        if refused is not None:
            request.hold.release()
            return [Refusal(number, refused)]
        text = sum(len(text.encode()) for text in prepared.request.texts)
        loaded_model.stats.record_text(text, prepared.tokens)
        self._embeddings.add(request)
        return [Admitted(number, prepared.tokens)]

    def _make_room_or_refuse(
        self, model: Model, shape: preflight.RequestShape, costs: AdmissionCost, now: float, key: WeightedKey
    ) -> Refused | None:
        """Return the refusal if there is no room for a request of this key; None if there is room. Before a refusal,
        evict cached prefixes and unload idle models. If that does not suffice, preempt requests of keys that hold more
        memory."""
        gate = self._forwards.gate
        rows, cost = costs
        answer = preflight.refuse_without_room(shape, self.read_offered_memory(now, key.name), model, cost, gate)
        if answer is None or answer.code is not RefusalCode.NO_ROOM:
            return answer
        wanted = cost + self._scheduler.compute_required_bytes(key.name)
        if self._manager.free_memory(wanted) or self._preempt_for_key(key, rows, cost, now):
            self._forwards.wait_until_settled()
            return preflight.refuse_without_room(shape, self.read_offered_memory(now, key.name), model, cost, gate)
        return answer

    def _preempt_for_key(self, key: WeightedKey, rows: int, cost: int, now: float) -> bool:
        """Preempt requests of keys that hold more memory than `key` would hold with its new request.

        Return whether a request was preempted. The new request commits `rows` bytes. Its admission needs `cost` bytes,
        which include the transient bytes of its forwards. Return False if the memory cannot be read, and within
        `PREEMPTION_INTERVAL_SECONDS` after the last preemption for a key.
        """
        headroom = self.read_offered_memory(now, key.name).headroom
        if (
            headroom is None
            or now < self._preempt_at
            or not self._scheduler.preempt_for_key(key, rows, cost - headroom)
        ):
            return False
        self._preempt_at = now + PREEMPTION_INTERVAL_SECONDS
        self._wiring.on_released()
        return True

    def read_offered_memory(self, now: float, key: str | None = None) -> Memory:
        """Read the memory, and return it as offered to a new request of the API key `key`; None: of any key.

        Bytes that earlier requests need first count as reserved (`Scheduler.compute_required_bytes`).
        """
        memory, wanted = self._forwards.read_memory(now), self._scheduler.compute_required_bytes(key)
        left = None if memory.headroom is None else memory.headroom - wanted
        return replace(memory, reserved=memory.reserved + wanted, headroom=left)

    def cancel(self, number: int, now: float) -> None:
        """Cancel a chat that waits for its model or was started, or a request for embeddings that waits for its model.
        Send no further frame.

        The number of any other request is recorded, and the request is ignored at its arrival or after its
        tokenization. At most `MAX_CANCELLED_REMEMBERED` numbers are recorded.
        """
        if self._waiting.remove(number) or self._scheduler.cancel(number, now):
            return
        self._cancelled[number] = None
        while len(self._cancelled) > MAX_CANCELLED_REMEMBERED:
            del self._cancelled[next(iter(self._cancelled))]


def _create_sequence(
    loaded_model: LoadedModel, prepared: PreparedRequest, shape: preflight.RequestShape, arrived: float
) -> Sequence:
    """Create the rows of a request, without commitments. Resumed rows contain their known tokens."""
    request = prepared.request
    assert prepared.create_pipeline is not None  # noqa: S101 only a refused request has none
    seed = _draw_seed() if request.params.seed is None else request.params.seed
    sequence = Sequence(
        request, prepared, shape, resolve_sampling(request.params, loaded_model.defaults), seed, arrived
    )
    for choice in range(shape.choices):
        row = Row(sequence, choice, Commitment(0), prepared.create_pipeline(choice))
        row.replay(request.get_known_ids(choice))
        sequence.rows.append(row)
    return sequence


def _draw_seed() -> int:
    return int.from_bytes(os.urandom(8), "big")
