"""A request as the inference thread takes it: in tokens, or refused at the door for good.

The seam for engines that see: an image becomes tokens only in the vision tower, on the inference thread, long after
the request was judged. So whoever prepares such a request puts a `budget` beside the ids, IMAGE_TOKENS for an image
whose size says nothing better, and preflight, promise and need count it as so many prompt tokens (`tokens`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from wire.frames import Generate
from wire.refusals import Refused

if TYPE_CHECKING:
    from node.engine.pipeline import TextPipeline

IMAGE_TOKENS = 1280
"""Tokens that are put by for one image: what a tile-cutting vision tower makes of a photograph of common size."""


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
    `budget` are tokens that the prompt takes beyond its ids; `grammar` is what every answer has to follow.

    With `refused` there is nothing else.
    """

    request: Generate
    ids: tuple[int, ...] = ()
    eos: frozenset[int] = frozenset()
    voice: "Callable[[int], TextPipeline] | None" = None
    token_bytes: Callable[[int], bytes] = lambda token: b""
    refused: Refused | None = None
    budget: int = 0
    grammar: Rules | None = None

    @property
    def tokens(self) -> int:
        """Tokens that the prompt takes: the one count by which it is judged, promised and told of."""
        return len(self.ids) + self.budget
