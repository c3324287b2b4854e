"""State of an answer in its grammar, and the masks of its next tokens."""

from collections.abc import Callable

import mlx.core as mx
import pytest
from llguidance import LLMatcher

from node.engine.grammar.compiler import GrammarGuide
from node.engine.grammar.logits_mask import apply_mask
from node.engine.grammar.matcher import (
    GrammarFailed,
    GrammarMatcher,
    ReasoningEndSearch,
    allow_token,
    build_mask_without,
)
from node.engine.text.tokenizer_loader import load
from tests import models

END = b"</think>"
Make = Callable[..., GrammarMatcher]


def list_tokens(mask: bytes) -> list[int]:
    """Return the tokens that a mask allows."""
    return [8 * at + bit for at, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1]


@pytest.mark.parametrize("vocabulary", [1, 8, 31, 32, 33, 64])
def test_a_mask_has_a_bit_for_each_token_in_whole_words(vocabulary: int):
    mask = build_mask_without(vocabulary, frozenset({0, vocabulary - 1}))
    assert len(mask) % 4 == 0
    assert list_tokens(mask) == list(range(1, vocabulary - 1))
    assert list_tokens(allow_token(mask, vocabulary - 1)) == [*range(1, vocabulary - 1), vocabulary - 1]


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(("vocabulary", "allowed"), [(40, [0, 31, 32, 39]), (70, [0, 31, 32, 39]), (33, [0, 31, 32])])
def test_logits_outside_of_a_mask_are_minus_infinity(vocabulary: int, allowed: list[int], dtype: mx.Dtype):
    mask = bytes(8)
    for token in (0, 31, 32, 39):
        mask = allow_token(mask, token)
    logits = mx.arange(vocabulary, dtype=mx.float32)[None].astype(dtype)
    masked = apply_mask(logits, mask)
    assert masked.dtype == dtype
    assert masked[0].tolist() == [float(token) if token in allowed else -float("inf") for token in range(vocabulary)]


@pytest.mark.parametrize(
    ("texts", "rest"),
    [
        ((b"hm</think>ok",), b"ok"),
        ((b"hm<", b"/thi", b"nk", b">"), b""),
        ((b"</thin</think", b">{"), b"{"),
        ((b"</thin", b"g>"), None),
        ((b"</think", b" >"), None),
        ((b"x" * 50, b"</think>"), b""),
    ],
)
def test_the_end_of_reasoning_is_found_across_tokens(texts: tuple[bytes, ...], rest: bytes | None):
    search = ReasoningEndSearch(END, lambda token: texts[token])
    found = [search.feed(token) for token in range(len(texts))]
    assert found == [*[None] * (len(texts) - 1), rest]


@pytest.fixture(scope="module")
def guide() -> GrammarGuide:
    return GrammarGuide.of(load(models.path("llama")))


@pytest.fixture
def make(guide: GrammarGuide) -> Make:
    """Return a function that makes the state of an answer `ab` or `abb`, with reasoning or an opener of it."""

    def build(*, thinking: bool = False, opener: int | None = None) -> GrammarMatcher:
        matcher = LLMatcher(guide.ll_tokenizer, LLMatcher.grammar_from_regex("abb?"), log_level=0)
        search = ReasoningEndSearch(END, guide.tokenizer.token_bytes) if thinking else None
        return GrammarMatcher(matcher, guide.ll_tokenizer, search, opener, guide.unending, guide.tokenizer.eos)

    return build


def feed(guide: GrammarGuide, state: GrammarMatcher, text: str) -> None:
    for token in guide.ll_tokenizer.tokenize_str(text):
        state.feed(token)


def test_an_answer_follows_its_grammar_and_ends_where_it_may(guide: GrammarGuide, make: Make):
    state, end = make(), min(guide.tokenizer.eos)
    first, second = (guide.ll_tokenizer.tokenize_str(text) for text in ("a", "b"))
    mask = state.compute_mask()
    assert mask is not None
    assert first[0] in list_tokens(mask)
    assert not {second[0], end} & set(list_tokens(mask))
    with pytest.raises(GrammarFailed, match=f"token {second[0]} is not allowed"):
        make().feed(second[0])
    with pytest.raises(GrammarFailed, match="not allowed"):
        make().feed(end)
    feed(guide, state, "ab")
    mask = state.compute_mask()
    assert mask is not None
    assert set(list_tokens(mask)) >= {second[0], end}
    state.feed(end)
    assert state.compute_mask() is None
    state.feed(first[0])
    assert state.compute_mask() is None, "what follows the end is ignored"


def test_reasoning_is_free_and_never_ends_the_answer(guide: GrammarGuide, make: Make):
    state, end = make(thinking=True), min(guide.tokenizer.eos)
    feed(guide, state, "b and anything else")
    mask = state.compute_mask()
    assert mask == guide.unending
    assert not guide.tokenizer.eos & set(list_tokens(guide.unending))
    with pytest.raises(GrammarFailed, match="ended within its reasoning"):
        make(thinking=True).feed(end)
    feed(guide, state, "</think>")
    feed(guide, state, "ab")
    state.feed(end)
    assert state.compute_mask() is None


def test_an_answer_may_begin_its_reasoning_with_its_first_token_only(guide: GrammarGuide, make: Make):
    opener = guide.ll_tokenizer.tokenize_str("x")[0]
    state = make(thinking=True, opener=opener)
    assert state.opener == opener
    mask = state.compute_mask()
    assert mask is not None
    assert opener not in list_tokens(mask), "the caller decides about the opener"
    state.feed(opener)
    assert (state.opener, state.compute_mask()) == (None, guide.unending)
    other = make(thinking=True, opener=opener)
    feed(guide, other, "a")
    assert other.opener is None
    with pytest.raises(GrammarFailed, match="is not allowed"):
        other.feed(opener)
