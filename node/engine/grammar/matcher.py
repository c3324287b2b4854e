"""Where one answer stands in its grammar: the tokens that may come next, after the ids so far.

    thought (anything but an ending) ──end of the thought──► grammar ──an ending that it allows──► over

Like everything of a row it follows from the ids alone, so that a row can be rebuilt, or resumed elsewhere, by feeding
them to a new one. No MLX here: masks are bytes, a bit for each token of the vocabulary, lowest first.

What goes wrong raises GrammarFailed, which ends the row's request. A row is never let on without its grammar.
"""

from collections.abc import Callable

from llguidance import LLMatcher, LLTokenizer

MOST_DETAIL = 200
"""Characters of llguidance's own words in an error."""


class GrammarFailed(RuntimeError):
    """The grammar of an answer cannot be followed any further; the text is for the client."""


class Thinking:
    """Waits for the end of a thought. `end` is its marker in bytes; `token_bytes` gives a token's."""

    def __init__(self, end: bytes, token_bytes: Callable[[int], bytes]) -> None:
        self._end = end
        self._bytes = token_bytes
        self._tail = b""

    def feed(self, token: int) -> bytes | None:
        """Take a token; give what stands after the thought's end in it, None while there is no end."""
        text = self._tail + self._bytes(token)
        at = text.find(self._end)
        if at < 0:
            self._tail = text[-len(self._end) :]
            return None
        return text[at + len(self._end) :]


class Constraint:
    """One answer. `matcher` is its own. `thinking`: the prompt left a thought open, or, where the token `opener` is
    given, one may be begun by it before everything else; after the first id `opener` is None. `unending` is the mask of
    all tokens but the endings."""

    def __init__(
        self, matcher: LLMatcher, tokenizer: LLTokenizer, thinking: Thinking | None, opener: int | None,
        unending: bytes, eos: frozenset[int],
    ) -> None:  # fmt: skip
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._waiting = thinking if opener is None else None
        self._thinking = thinking
        self.opener = opener
        self._unending = unending
        self._eos = eos
        self._over = False

    def feed(self, token: int) -> None:
        """Take the next id of the answer; GrammarFailed if the grammar does not allow it."""
        opener, self.opener = self.opener, None
        if self._over:
            return
        if self._waiting is not None:
            self._think(self._waiting, token)
        elif token == opener:
            self._waiting = self._thinking
        elif token in self._eos and self._matcher.is_accepting():
            self._over = True
        elif not self._matcher.consume_token(token):
            raise GrammarFailed(f"token {token} does not follow: {self._detail()}")

    def _think(self, waiting: Thinking, token: int) -> None:
        if token in self._eos:
            raise GrammarFailed("the answer ended within its thought")
        rest = waiting.feed(token)
        if rest is None:
            return
        self._waiting = None
        rest = rest.lstrip(b"\n")
        if rest and not self._matcher.consume_tokens(self._tokenizer.tokenize_bytes(rest)):
            raise GrammarFailed(f"what follows the thought in its last token does not fit: {self._detail()}")

    def mask(self) -> bytes | None:
        """Give the tokens that may come next, without the `opener`; None after the end, where nothing matters."""
        if self._over:
            return None
        if self._waiting is not None:
            return self._unending
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarFailed(f"it cannot be followed further: {self._detail()}")
        allowed = int.from_bytes(mask, "little")
        if not allowed:
            raise GrammarFailed("no token of the model's vocabulary can go on")
        return mask if allowed & (allowed - 1) else self._only(mask, allowed.bit_length() - 1)

    def _only(self, mask: bytes, token: int) -> bytes:
        """Look at the only token of a mask. Where the text that must follow is a marker's, llguidance (1.9.1) gives the
        marker's token, and then does not take it: it is no text to it. Then it is written in other tokens."""
        if token in self._eos or self._matcher.validate_tokens([token]):
            return mask
        forced = self._matcher.compute_ff_bytes().decode(errors="ignore")
        other = self._tokenizer.greedy_tokenize(forced)[:1]
        if not other or not self._matcher.validate_tokens(other):
            raise GrammarFailed("what has to follow cannot be written in the model's vocabulary")
        return with_token(bytes(len(mask)), other[0])

    def _detail(self) -> str:
        return " ".join(self._matcher.get_error().split())[:MOST_DETAIL] or "it has ended"


def with_token(mask: bytes, token: int) -> bytes:
    """Give a mask that also allows a token."""
    at = token // 8
    return mask[:at] + bytes([mask[at] | 1 << token % 8]) + mask[at + 1 :]


def all_but(vocabulary: int, tokens: frozenset[int]) -> bytes:
    """Give the mask, in whole words of 32 bits, of every token of a vocabulary but some."""
    mask = bytearray(b"\xff" * (vocabulary // 8) + bytes([(1 << vocabulary % 8) - 1]))
    mask += bytes(-len(mask) % 4)
    for token in tokens:
        mask[token // 8] &= ~(1 << token % 8)
    return bytes(mask)
