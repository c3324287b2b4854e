"""Values of a request: its parsed body, its complete answer, and its outcome."""

from collections.abc import Mapping, Sequence

import msgspec

from router.placement.candidate import ResourceDemand
from wire.frames import Finished, GenerationParams, Logprob, Message
from wire.refusals import FailureCode, Refused


class EmbeddingInput(msgspec.Struct, frozen=True, gc=False):
    """Texts of a request for embeddings or scores, with the options of `wire.frames.Embed`."""

    texts: tuple[str, ...] = ()
    ids: tuple[tuple[int, ...], ...] = ()
    """Texts as token ids, in place of `texts`."""
    dimensions: int = 0
    """Length of each vector; 0 for the full length of the model."""
    truncate: bool = False
    """Whether a text longer than the context is truncated instead of refused."""
    prompt: str = ""
    """Name of the model's prompt that precedes each text; empty for the default of the model."""
    query: str = ""
    """Query for which the texts are scored; empty for embeddings."""
    max_tokens: int = 0
    """Maximum tokens of each document, which is truncated there; 0 for no maximum besides the context."""

    @property
    def count(self) -> int:
        """Number of texts."""
        return len(self.texts) or len(self.ids)


class RequestSpec(msgspec.Struct, frozen=True, gc=False):
    """Request as parsed by a dialect: prompt, parameters, API key, and whether the answer is streamed.

    A field that `wire.frames.Generate` also has means the same as there.
    """

    demand: ResourceDemand
    key: str
    """Id of the API key."""
    request_id: str
    messages: tuple[Message, ...]
    params: GenerationParams
    created: int
    """Time of arrival in Unix seconds."""
    stream: bool
    """Whether the answer is streamed."""
    tools: str = ""
    template: str = ""
    include_usage: bool = False
    """Whether the last chunk of a stream has the usage."""
    text: str = ""
    ids: tuple[int, ...] = ()
    session: str = ""
    """Name of the conversation; empty if the client gave none."""
    ignored: tuple[str, ...] = ()
    """Fields and tools of the request's body that have no effect."""
    set_penalties: frozenset[str] = frozenset()
    """Names of the penalties that the request sets. `params` does not show a penalty that is set to its default."""
    default_limit: bool = False
    """Whether `params.max_tokens` is the default of the dialect, because the request does not set it."""
    profile: str = ""
    """Profile that the client named; empty without one."""
    may_leave_pool: bool = False
    """Whether the reader of the answer can pass the request on to an upstream."""
    context_limit: int = 0
    """Maximum tokens of prompt and answer together, set by the profile; 0 for the context of the model."""
    embed: EmbeddingInput | None = None
    """Texts of a request for embeddings or scores; None for any other request."""


class CompleteAnswer(msgspec.Struct, frozen=True, gc=False):
    """Complete answer of a request that is not streamed, collected from its deltas."""

    texts: Mapping[tuple[int, int], str]
    """Texts by choice and channel."""
    calls: Mapping[int, Sequence[str]]
    """Tool calls by choice, each as JSON text from the node."""
    logprobs: Mapping[int, Sequence[Logprob]]
    """Log probabilities by choice."""
    fingerprint: str = ""
    """Fingerprint of the model that generated the answer; empty if unknown."""
    vectors: tuple[bytes, ...] = ()
    """Vectors of the texts of a request for embeddings or scores, in single precision and little endian."""


class RequestFailure(msgspec.Struct, frozen=True, gc=False):
    """Failure of a request or of a command to a node, except a refusal: a machine-readable code and a sentence."""

    code: str
    message: str


Outcome = Finished | Refused | RequestFailure
"""End of a request: a complete answer, a refusal, or a failure."""
SWAP = "waiting for a model swap"
PULL = "waiting for the pull of the model"
"""`SWAP` and `PULL` are the reasons of a wait that the keep-alives of a stream name."""
CANCELLED = RequestFailure(FailureCode.CANCELLED, "the client cancelled the request")
SLOW = RequestFailure(FailureCode.SLOW_CLIENT, "the client did not read its stream")
