"""Rules that refuse a request before or at its admission, and that compute the memory of a request. Pure."""

from typing import NamedTuple, Protocol

from node.engine.models.model_descriptor import ModelDescriptor
from node.engine.requests import preflight
from node.engine.requests.prepared import PreparedEmbedding, PreparedRequest
from node.models.embedding_layout import EmbeddingLayout
from wire.capacity.arithmetic import estimate_request_transient
from wire.capacity.batches import compute_row_bytes
from wire.frames import Embed, Generate, Refusal
from wire.models.version import ModelVersion
from wire.refusals import RefusalCode, Refused
from wire.report import Memory, Model


class RequestLimits(NamedTuple):
    """Limits of a request on this node, from the settings."""

    tokens: int
    """Maximum generated tokens of a request that sets no `max_tokens`."""
    context: int
    """Maximum tokens of a row, prompt and answer together; 0: the context of the model."""
    batch: int
    """Maximum rows that decode at once."""

    def get_max_row_tokens(self, descriptor: ModelDescriptor) -> int:
        """Return the maximum tokens of a row: the context of the model, or `context` if that is lower and not 0."""
        return min(descriptor.context, self.context or descriptor.context)

    def compute_shape(
        self, prepared: PreparedRequest | PreparedEmbedding, descriptor: ModelDescriptor
    ) -> preflight.RequestShape:
        """Return the size of a prepared request: its prompt tokens, answer tokens (limit and expected) and choices.

        For embeddings, the prompt is the longest text of the request, the answer has 0 tokens, and there is one choice.
        """
        if isinstance(prepared, PreparedEmbedding):
            return preflight.RequestShape(prepared.longest, 0, 0, 1)
        return preflight.compute_shape(
            prepared.request, prepared.tokens, self.tokens, self.get_max_row_tokens(descriptor)
        )


class CostLedger(Protocol):
    """Interface of a model's ledger of commitments, with the only method that `compute_admission_cost` uses."""

    def compute_cost(self, length: int, rows: int) -> int:
        """Return the bytes that `rows` equal rows of `length` tokens would add to the committed memory."""
        ...


class AdmissionCost(NamedTuple):
    """Memory that a request needs at its admission, in bytes."""

    rows: int
    """Bytes that the rows or texts of the request add to the committed memory, padding included."""
    total: int
    """`rows`, plus the transient bytes of one forward. For a chat this is the largest forward; for embeddings, the
    smallest forward with which the longest text can run."""


def compute_admission_cost(shape: preflight.RequestShape, ledger: CostLedger, model: Model) -> AdmissionCost:
    """Return the memory that a chat request of the size `shape` needs at its admission. Commit nothing.

    `ledger` has the commitments of the request's model, and `model` is the model's report.
    """
    rows = ledger.compute_cost(shape.length, shape.choices)
    return AdmissionCost(
        rows, rows + estimate_request_transient(model, shape.prompt, shape.answer_tokens, shape.choices)
    )


def compute_waiting_bytes(shape: preflight.RequestShape, descriptor: ModelDescriptor) -> int:
    """Return the KV bytes of all rows of a request whose model is not loaded yet, computed from the model's files."""
    return compute_row_bytes(descriptor.kv, shape.length) * shape.choices


def refuse_other_model(request: Generate | Embed, descriptor: ModelDescriptor | None) -> Refused | None:
    """Return the refusal of a request to resume an answer that a different model of this name began.

    Return None for any other request, or if `descriptor` is None. The router cannot prevent such requests, because it
    knows only the last report of this node, whose model may have changed since.
    """
    if isinstance(request, Embed) or not request.fingerprint or descriptor is None:
        return None
    if descriptor.version.is_same(ModelVersion(request.fingerprint, request.content)):
        return None
    return Refused(
        RefusalCode.NOT_READY, f"the model {request.model} of this node differs from the one that began the answer"
    )


def refuse_unknown_model(name: str) -> Refused:
    """Return the refusal of a request for the model `name`, which this node does not have."""
    return Refused(RefusalCode.NO_MODEL, f"this node has no model {name}")


def refuse_unloadable_model(name: str, cause: str) -> Refused:
    """Return the refusal of a request for the model `name`, which cannot be loaded because of `cause`."""
    return Refused(RefusalCode.LOAD_FAILED, f"{name} cannot be loaded: {cause}")


def refuse_before_load(
    request: Generate | Embed, shape: preflight.RequestShape, model: Model, memory: Memory, batch: int
) -> Refused | None:
    """Return the refusal of a request whose model is not loaded; None if the request may wait for the load.

    `model` is the model's report. Its `cause` is the reason why the model cannot be loaded, or empty. `memory` is the
    current reading, and `batch` the maximum number of rows that decode together.
    """
    if model.cause:
        return refuse_unloadable_model(model.name, model.cause)
    impossible = preflight.refuse_impossible(request, shape, model, batch) if isinstance(request, Generate) else None
    return impossible or preflight.refuse_too_large(shape, memory, model)


def refuse_improper(
    prepared: PreparedRequest, shape: preflight.RequestShape, model: Model, vocabulary: int, batch: int
) -> Refused | None:
    """Return the refusal of a request that this node can never serve, however much memory is free; otherwise None.

    Check the model, structured output, the limits of choices and context, and the token ids of prompt, logit bias and
    resumed answer. `vocabulary` is the model's number of token ids, `batch` the maximum rows that decode together.
    """
    request = prepared.request
    refused = preflight.refuse_impossible(request, shape, model, batch)
    if refused is not None:
        return refused
    resumed = (token for ids in request.resume for token in ids)
    biased = (token for token, _ in request.params.logit_bias)
    for token in (max(prepared.ids), *biased, *resumed):
        if not 0 <= token < vocabulary:
            return Refused(RefusalCode.INVALID, f"token id {token} is outside of 0..{vocabulary - 1}")
    return None


def build_refusal(prepared: PreparedRequest | PreparedEmbedding, refused: Refused) -> Refusal:
    """Return the `Refusal` frame of a tokenized request, with the number of its prompt tokens. The number is None for
    embeddings, because such a request has several texts."""
    tokens = prepared.tokens if isinstance(prepared, PreparedRequest) else None
    return Refusal(prepared.request.request, refused, tokens)


def refuse_embedding(
    prepared: PreparedEmbedding, layout: EmbeddingLayout, dimensions: int, vocabulary: int
) -> Refused | None:
    """Return the refusal of a request for embeddings or scores that the model cannot serve; None if it can.

    Check the requested length of the vectors and the token ids, not the memory. `layout` has the lengths that the model
    supports, `dimensions` is the length of its vectors, and `vocabulary` the number of its token ids.
    """
    request, wanted = prepared.request, prepared.request.dimensions
    if wanted and wanted != dimensions and not layout.can_shorten:
        return Refused(
            RefusalCode.INVALID,
            f"the vectors of {request.model} have {dimensions} numbers and cannot be shortened to {wanted}: leave "
            "dimensions out",
        )
    allowed = layout.lengths or range(1, dimensions + 1)
    if wanted and wanted != dimensions and (wanted not in allowed or wanted > dimensions):
        lengths = ", ".join(map(str, layout.lengths)) or f"1 to {dimensions}"
        return Refused(
            RefusalCode.INVALID,
            f"the vectors of {request.model} may have {lengths} numbers, not {wanted}: change dimensions",
        )
    highest = max(map(max, prepared.inputs))
    if highest >= vocabulary:
        return Refused(RefusalCode.INVALID, f"token id {highest} is outside of 0..{vocabulary - 1}")
    return None
