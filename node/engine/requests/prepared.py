"""Prepared requests for the inference thread: the tokens of a request, or its refusal."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from wire.frames import Embed, Generate
from wire.refusals import Refused

if TYPE_CHECKING:
    from node.engine.text.detokenizer import TextPipeline


class GrammarCursor(Protocol):
    """State of one answer in its grammar. The implementation is `matcher.GrammarMatcher`."""

    @property
    def opener(self) -> int | None:
        """Id of the token with which the answer may start its reasoning now, if the model chooses this token. None if
        the answer may not start with reasoning, and after the first token."""
        ...

    def feed(self, token: int) -> None:
        """Advance the state by the next token id of the answer. Raise `matcher.GrammarFailed` if the grammar does not
        allow the token."""
        ...

    def compute_mask(self) -> bytes | None:
        """Return the mask of allowed next tokens, without the `opener`; None if any token is allowed. The mask has one
        bit for each token id, the lowest id in the lowest bit of the first byte.

        Raise `matcher.GrammarFailed` if no token can follow.
        """
        ...


class GrammarFactory(Protocol):
    """Compiled grammar that all answers of a request must match. The implementation is `compiler.CompiledGrammar`."""

    def create_cursor(self) -> GrammarCursor:
        """Return a new state at the start of an answer."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRequest:
    """Tokenized request, or its refusal. With `refused`, all fields except `request` and `refused` have their
    defaults."""

    request: Generate
    """The request."""
    ids: tuple[int, ...] = ()
    """Token ids of the whole prompt."""
    eos: frozenset[int] = frozenset()
    """Token ids that end an answer."""
    create_pipeline: "Callable[[int], TextPipeline] | None" = None
    """`create_pipeline(choice)` returns a new text pipeline for this choice; None with `refused`."""
    token_bytes: Callable[[int], bytes] = lambda token: b""
    """`token_bytes(token)` returns the bytes of a token's text."""
    refused: Refused | None = None
    """Refusal of the request; None: it is accepted."""
    grammar: GrammarFactory | None = None
    """Grammar that every answer must match; None: no constraint."""
    shared: int = 0
    """Number of leading ids that form a system prompt shared by all keys; 0: none."""

    @property
    def tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.ids)


@dataclass(frozen=True, slots=True, eq=False)
class PreparedEmbedding:
    """Tokenized request for embeddings, or its refusal."""

    request: Embed
    """The request."""
    inputs: tuple[tuple[int, ...], ...] = ()
    """Token ids of each text; empty with `refused`."""
    refused: Refused | None = None
    """Refusal of the request; None: it is accepted."""
    segments: tuple[int, ...] = ()
    """Position of the document's first token in each pair of query and document. 0 for a single text, or if the model
    has no segments. Empty if the model is not an encoder."""

    @property
    def tokens(self) -> int:
        """Number of tokens of all texts."""
        return sum(map(len, self.inputs))

    @property
    def longest(self) -> int:
        """Number of tokens of the longest text."""
        return max(map(len, self.inputs), default=0)

    @property
    def cache_scope(self) -> str:
        """Scope of the cached prefixes that this request reuses and stores."""
        return self.request.cache_scope or self.request.weighted_key.name
