"""Prepared request for the inference thread: its tokens, or its final refusal."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from wire.frames import Generate
from wire.refusals import Refused

if TYPE_CHECKING:
    from node.engine.text.detokenizer import TextPipeline


class GrammarCursor(Protocol):
    """State of one answer in its grammar; see `matcher.GrammarMatcher`."""

    @property
    def opener(self) -> int | None:
        """Token that may start a thought now, if the model chooses it."""
        ...

    def feed(self, token: int) -> None:
        """Advance by the next id of the answer."""
        ...

    def mask(self) -> bytes | None:
        """Return the allowed next tokens, one bit each; None where any token is allowed."""
        ...


class GrammarFactory(Protocol):
    """Grammar of all answers of a request; see `compiler.CompiledGrammar`."""

    def begin(self) -> GrammarCursor:
        """Return the state at the start of an answer."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class PreparedRequest:
    """Tokenized request. With `refused` the other fields are unset."""

    request: Generate
    """The request."""
    ids: tuple[int, ...] = ()
    """Tokens of the whole prompt."""
    eos: frozenset[int] = frozenset()
    """Tokens that end an answer."""
    voice: "Callable[[int], TextPipeline] | None" = None
    """`voice(choice)` returns a new text pipeline."""
    token_bytes: Callable[[int], bytes] = lambda token: b""
    """Returns the bytes of a token."""
    refused: Refused | None = None
    """Refusal of the request; None: it is accepted."""
    grammar: GrammarFactory | None = None
    """Grammar that every answer must match."""
    shared: int = 0
    """Number of first ids that are a system prompt of all keys."""

    @property
    def tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self.ids)
