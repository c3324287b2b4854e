"""State of one answer in its grammar: the tokens that are allowed after the ids generated so far.

    reasoning (any token but an ending) ──end of the reasoning──► grammar ──an ending that it allows──► over

The state depends on the ids alone. To rebuild a row, or resume it on another node, its ids are fed to a new state. MLX
is not used here: masks are bytes, one bit per token of the vocabulary, lowest first.

Errors raise `GrammarFailed`, which ends the row's request. A row never continues without its grammar.
"""

from collections.abc import Callable

from llguidance import LLMatcher, LLTokenizer

MAX_DETAIL_CHARS = 200
"""Maximum characters of llguidance's own message in an error."""


class GrammarFailed(RuntimeError):
    """Error: an answer cannot continue under its grammar. The text is for the client."""


class ReasoningEndSearch:
    """Search for the end of an answer's reasoning. `end` is its marker in bytes; `token_bytes(token)` returns the bytes
    of a token."""

    def __init__(self, end: bytes, token_bytes: Callable[[int], bytes]) -> None:
        self._end = end
        self._bytes = token_bytes
        self._tail = b""

    def feed(self, token: int) -> bytes | None:
        """Add a token. Return its bytes after the end of the reasoning; None while the reasoning continues."""
        text = self._tail + self._bytes(token)
        at = text.find(self._end)
        if at < 0:
            self._tail = text[-len(self._end) :]
            return None
        return text[at + len(self._end) :]


class GrammarMatcher:
    """State of a grammar in one answer.

    `matcher` must not be shared with another answer. `thinking` finds the end of the reasoning; None if the answer has
    no reasoning. With `opener`, the answer may start its reasoning with this token, as its first token. With `thinking`
    and without `opener`, the prompt has started the reasoning. `eos` are the tokens that end an answer. `unending` is
    the mask of all other tokens.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tokenizer: LLTokenizer,
        thinking: ReasoningEndSearch | None,
        opener: int | None,
        unending: bytes,
        eos: frozenset[int],
    ) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._open_reasoning = thinking if opener is None else None
        self._thinking = thinking
        self.opener = opener
        """Token with which the answer may start its reasoning now. None if the answer may not start with reasoning, and
        after the first token."""
        self._unending = unending
        self._eos = eos
        self._over = False

    def feed(self, token: int) -> None:
        """Add the next token of the answer. Tokens after the end are ignored.

        Raise `GrammarFailed` if the grammar does not allow the token, or if the answer ends within its reasoning.
        """
        opener, self.opener = self.opener, None
        if self._over:
            return
        if self._open_reasoning is not None:
            self._feed_reasoning(self._open_reasoning, token)
        elif token == opener:
            self._open_reasoning = self._thinking
        elif token in self._eos and self._matcher.is_accepting():
            self._over = True
        elif not self._matcher.consume_token(token):
            raise GrammarFailed(f"token {token} is not allowed: {self._describe_error()}")

    def _feed_reasoning(self, waiting: ReasoningEndSearch, token: int) -> None:
        if token in self._eos:
            raise GrammarFailed("the answer ended within its reasoning")
        rest = waiting.feed(token)
        if rest is None:
            return
        self._open_reasoning = None
        rest = rest.lstrip(b"\n")
        if rest and not self._matcher.consume_tokens(self._tokenizer.tokenize_bytes(rest)):
            raise GrammarFailed(
                f"the text after the reasoning, in its last token, is not allowed: {self._describe_error()}"
            )

    def compute_mask(self) -> bytes | None:
        """Return the mask of allowed next tokens, without the `opener`: one bit per token, lowest first. Return None
        after the end of the answer, where any token is allowed.

        Raise `GrammarFailed` if no token can follow.
        """
        if self._over:
            return None
        if self._open_reasoning is not None:
            return self._unending
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GrammarFailed(f"the matcher failed: {self._describe_error()}")
        allowed = int.from_bytes(mask, "little")
        if not allowed:
            raise GrammarFailed("no token of the model's vocabulary is allowed next")
        return mask if allowed & (allowed - 1) else self._build_forced_mask(mask, allowed.bit_length() - 1)

    def _build_forced_mask(self, mask: bytes, token: int) -> bytes:
        """Return a mask for the only allowed token.

        Where the text of a marker must follow, llguidance (1.9.1) allows the marker's token but does not accept it. For
        llguidance that token is no text. The marker's text is then generated in other tokens. Raise `GrammarFailed` if
        the vocabulary has none for it.
        """
        if token in self._eos or self._matcher.validate_tokens([token]):
            return mask
        forced = self._matcher.compute_ff_bytes().decode(errors="ignore")
        other = self._tokenizer.greedy_tokenize(forced)[:1]
        if not other or not self._matcher.validate_tokens(other):
            raise GrammarFailed("the required text has no tokens in the model's vocabulary")
        return allow_token(bytes(len(mask)), other[0])

    def _describe_error(self) -> str:
        return " ".join(self._matcher.get_error().split())[:MAX_DETAIL_CHARS] or "the grammar has ended"


def allow_token(mask: bytes, token: int) -> bytes:
    """Return a copy of a mask that also allows `token`, which must be within the length of the mask."""
    at = token // 8
    return mask[:at] + bytes([mask[at] | 1 << token % 8]) + mask[at + 1 :]


def build_mask_without(vocabulary: int, tokens: frozenset[int]) -> bytes:
    """Return the mask of all tokens of a vocabulary except `tokens`, in whole words of 32 bits. `vocabulary` is the
    number of tokens."""
    mask = bytearray(b"\xff" * (vocabulary // 8) + bytes([(1 << vocabulary % 8) - 1]))
    mask += bytes(-len(mask) % 4)
    for token in tokens:
        mask[token // 8] &= ~(1 << token % 8)
    return bytes(mask)
