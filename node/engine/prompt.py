"""A request as the inference thread takes it: in tokens, or refused at the door for good."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wire.frames import Generate
from wire.refusals import Refused

if TYPE_CHECKING:
    from node.engine.pipeline import TextPipeline


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """`ids` are the whole prompt's tokens, `eos` those that end an answer; `voice(choice)` gives a new text pipeline.

    With `refused` there is nothing else.
    """

    request: Generate
    ids: tuple[int, ...] = ()
    eos: frozenset[int] = frozenset()
    voice: "Callable[[int], TextPipeline] | None" = None
    token_bytes: Callable[[int], bytes] = lambda token: b""
    refused: Refused | None = None
