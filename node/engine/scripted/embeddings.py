"""Embeddings and scores of the scripted engine, computed from the words of a text, with admission and the gate.

The vector of a word is derived from its hash. The vector of a text is the sum over its words, scaled to the length 1.
Equal texts have equal vectors, and texts with common words have similar vectors. The score of a document is the number
of different words in both document and query, divided by the number in either. A forward takes no time.
"""

import hashlib
import math
import struct
import sys
from collections.abc import Sequence

from node.engine.memory.gate import GateSite
from node.engine.scripted.answers import count_words
from node.engine.scripted.memory import ScriptedMemory
from wire.frames import NUMBER_BYTES, Admitted, Embed, Finished, Frame, Refusal, Timings, split_vectors
from wire.models.kind import ModelKind, explain_other_kind
from wire.refusals import RefusalCode, Refused

_RANGE = 2**31


class ScriptedEmbeddings:
    """Requests for embeddings and scores of the scripted engine.

    `model` and `kind` are the name and the kind of its model, and `dimensions` the length of its vectors. A text has at
    most `max_tokens` tokens. `now` is in monotonic seconds in all methods. `forwards` counts the computed requests,
    each of which takes one forward.
    """

    def __init__(self, memory: ScriptedMemory, model: str, kind: ModelKind, dimensions: int, max_tokens: int) -> None:
        self._memory = memory
        self._model = model
        self._kind = kind
        self._dimensions = 1 if kind is ModelKind.RERANK else dimensions
        self._max_tokens = max_tokens
        self._waiting: dict[int, tuple[Embed, int, float]] = {}
        self.forwards = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, number: int) -> bool:
        return number in self._waiting

    def admit(self, request: Embed, now: float) -> Frame:
        """Admit a request at the monotonic time `now`, or refuse it. Return its `Admitted` or `Refusal`."""
        lengths = _count_tokens(request)
        refused = self._memory.gate.refuse_unless_ready() or self._refuse_improper(request, lengths)
        if refused is None:
            refused = self._memory.check(GateSite.PREFLIGHT, now, request.count * self._dimensions * NUMBER_BYTES)
        if refused is not None:
            return Refusal(request.request, refused)
        tokens = sum(min(length, self._max_tokens) for length in lengths)
        self._waiting[request.request] = request, tokens, now
        return Admitted(request.request, tokens)

    def _refuse_improper(self, request: Embed, lengths: Sequence[int]) -> Refused | None:
        if request.model != self._model:
            return Refused(RefusalCode.NO_MODEL, f"this node serves {self._model}, not {request.model}")
        if self._kind is not (ModelKind.RERANK if request.query else ModelKind.EMBED):
            return Refused(RefusalCode.UNSUPPORTED, explain_other_kind(self._model, self._kind))
        if request.dimensions > self._dimensions:
            return Refused(RefusalCode.INVALID, f"the vectors of {self._model} have {self._dimensions} numbers at most")
        if request.prompt:
            return Refused(RefusalCode.INVALID, f"{self._model} has no prompt {request.prompt[:80]!r}")
        if not all(lengths) or not lengths:
            return Refused(RefusalCode.INVALID, "the request has no text, or one without tokens")
        longest = max(lengths)
        if longest > self._max_tokens and not request.truncate:
            return Refused(
                RefusalCode.CONTEXT,
                f"input {lengths.index(longest)} has {longest} tokens, the longest text for {self._model} has "
                f"{self._max_tokens}: shorten the text, or set truncate",
            )
        return None

    def cancel(self, number: int) -> bool:
        """Cancel the request with this number. Return False if it is not waiting."""
        return self._waiting.pop(number, None) is not None

    def step(self, now: float) -> list[Frame]:
        """Run the forwards of all waiting requests through the gate, and end these requests. Return the frames to send
        for each request: its vectors and `Finished`, or `Refusal`."""
        frames: list[Frame] = []
        for number, (request, tokens, arrived) in list(self._waiting.items()):
            del self._waiting[number]
            refused = self._memory.check(GateSite.EMBED, now)
            if refused is not None:
                frames.append(Refusal(number, refused))
                continue
            self.forwards += 1
            data = b"".join(self._compute(words, request) for words in _list_words(request, self._max_tokens))
            frames += split_vectors(number, range(request.count), data)
            frames.append(Finished(number, (), tokens, 0, timings=Timings(now - arrived)))
        return frames

    def _compute(self, words: Sequence[str], request: Embed) -> bytes:
        """Return the vector or the score of a text."""
        if request.query:
            mine, asked = set(words), set(request.query.split())
            return struct.pack("<f", len(mine & asked) / len(mine | asked))
        dimensions = request.dimensions or self._dimensions
        sums = [sum(values) for values in zip(*(_hash_word(word, dimensions) for word in words), strict=True)]
        length = math.hypot(*sums) or 1.0
        return struct.pack(f"<{dimensions}f", *(value / length for value in sums))


def _count_tokens(request: Embed) -> list[int]:
    """Return the number of tokens of each text, for a document including the query."""
    query, most = count_words(request.query), request.max_tokens or sys.maxsize
    lengths = [query + min(most, max(1, count_words(text))) for text in request.texts]
    return [len(ids) for ids in request.ids] + lengths


def _list_words(request: Embed, most: int) -> list[list[str]]:
    """Return the words of each text. A token id counts as a word."""
    most = min(most, request.max_tokens or most)
    return [[str(token) for token in ids[:most]] for ids in request.ids] + [
        text.split()[:most] or [text] for text in request.texts
    ]


def _hash_word(word: str, count: int) -> tuple[float, ...]:
    """Return `count` numbers from -1 to 1 that are derived from the hash of a word."""
    raw = hashlib.shake_128(word.encode()).digest(count * 4)
    return tuple(value / _RANGE for value in struct.unpack(f"<{count}i", raw))
