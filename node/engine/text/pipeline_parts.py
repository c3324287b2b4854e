"""Parts of a text pipeline over mlx-lm: the decoder of tokens and the splitters at markers. Each is for one
pipeline."""

from collections.abc import Callable

from mlx_lm.generate import TextStateMachine
from mlx_lm.tokenizer_utils import StreamingDetokenizer

from node.engine.text.markers import NORMAL, MarkerPlace


class TokenDecoder:
    """mlx-lm's streaming detokenizer for one pipeline, which never raises, not even for invalid ids.

    `size` is the highest id plus one. `silent` are the tokens without text, which end an answer.
    """

    def __init__(self, detokenizer: StreamingDetokenizer, size: int, silent: frozenset[int]) -> None:
        self._detokenizer = detokenizer
        self._size = size
        self._silent = silent

    def feed(self, token: int) -> str:
        """Add a token, and return the text that became final; empty for a silent or unknown id."""
        if token in self._silent or not 0 <= token < self._size:
            return ""
        return self._advance(lambda: self._detokenizer.add_token(token))

    def flush(self) -> str:
        """Return the text that was held back."""
        return self._advance(self._detokenizer.finalize)

    def _advance(self, advance: Callable[[], None]) -> str:
        try:
            advance()
            segment = self._detokenizer.last_segment
        except Exception:  # an id in a gap of the vocabulary has no text
            segment = ""
        return segment


class MarkCutter:
    """Splitter of an answer's text at the model's markers, by mlx-lm's state machine; for one pipeline. `place` is the
    state of the text at the start of the answer."""

    def __init__(self, machine: "TextStateMachine[MarkerPlace]", place: MarkerPlace) -> None:
        self._state = machine.make_state(place)

    def feed(self, text: str) -> list[tuple[MarkerPlace, str]]:
        """Add text, and split it at markers. Return its parts, each with its place, starting with the current place. A
        possible start of a marker at the end is held back."""
        self._state, segments = TextStateMachine.split(self._state, text)
        return segments

    def flush(self) -> str:
        """Return the text that was held back as a possible start of a marker. It belongs to the current place."""
        self._state, text, _ = TextStateMachine.flush(self._state)
        return text


class PassThrough:
    """Splitter for answers without markers, which passes all text through."""

    def feed(self, text: str) -> list[tuple[MarkerPlace, str]]:
        """Return the text unsplit, as content."""
        return [(MarkerPlace(NORMAL), text)]

    def flush(self) -> str:
        """Return an empty text, because no text is held back."""
        return ""
