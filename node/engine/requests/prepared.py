"""A request as the inference thread takes it: as tokens, or refused for good."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from wire.frames import Generate
from wire.refusals import Refused

if TYPE_CHECKING:
    from node.engine.text.detokenizer import TextPipeline


class Follower(Protocol):
    """Where one answer stands in what it has to follow; see `constraint.Constraint`."""

    @property
    def opener(self) -> int | None:
        """The token that may begin a thought now, if it would be the model's own choice."""
        ...

    def feed(self, token: int) -> None:
        """Take the next id of the answer."""
        ...

    def mask(self) -> bytes | None:
        """Give the tokens that may come next, a bit for each; None where nothing matters any more."""
        ...


class Rules(Protocol):
    """What every answer of a request has to follow; see `grammar.Grammar`."""

    def begin(self) -> Follower:
        """Stand at the beginning of an answer."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """`ids` are the whole prompt's tokens, `eos` those that end an answer; `voice(choice)` gives a new text pipeline.
    `grammar` is what every answer has to follow. The first `shared` of the ids follow from a system prompt of all keys.

    With `refused` there is nothing else.
    """

    request: Generate
    ids: tuple[int, ...] = ()
    eos: frozenset[int] = frozenset()
    voice: "Callable[[int], TextPipeline] | None" = None
    token_bytes: Callable[[int], bytes] = lambda token: b""
    refused: Refused | None = None
    grammar: Rules | None = None
    shared: int = 0

    @property
    def tokens(self) -> int:
        """Tokens that the prompt takes."""
        return len(self.ids)
