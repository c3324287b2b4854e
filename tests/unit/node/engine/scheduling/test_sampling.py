"""From log probabilities to tokens: truncation, penalties, and draws that can be repeated."""

import math

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.engine.scheduling.sampling import (
    SamplingDefaults,
    SamplingParameters,
    apply_cuts,
    choose_greedily,
    compute_draw_key,
    create_processors,
    create_sampler,
    parse_defaults,
    resolve_sampling,
)
from tests.support.engine.text_engine import likeliest
from wire.frames import NO_REPETITION_PENALTY, GenerationParams

ROW = mx.log(mx.array([[0.5, 0.25, 0.15, 0.1]]))
KEYS = [12035550249420947055, 13309476754707697221, 9391409690812996836, 11984929618412882174, 3460257376661948410]
"""Keys of some draws, which never change."""


def kept(sampling: SamplingParameters) -> list[int]:
    return [place for place, value in enumerate(np.array(apply_cuts(ROW, sampling)[0])) if value > -math.inf]


@pytest.mark.parametrize(
    ("sampling", "tokens"),
    [
        (SamplingParameters(), [0, 1, 2, 3]),
        (SamplingParameters(top_k=2), [0, 1]),
        (SamplingParameters(top_k=99), [0, 1, 2, 3]),
        (SamplingParameters(top_p=0.7), [0, 1]),
        (SamplingParameters(top_p=0.76), [0, 1, 2]),
        (SamplingParameters(top_p=1e-9), [0]),
        (SamplingParameters(min_p=0.4), [0, 1]),
        (SamplingParameters(min_p=1.0), [0]),
        (SamplingParameters(temperature=2.0, top_p=0.5), [0, 1]),
        (SamplingParameters(top_k=3, top_p=0.6, min_p=0.1), [0, 1]),
    ],
)
def test_what_is_cut(sampling: SamplingParameters, tokens: list[int]):
    assert kept(sampling) == tokens


def test_rows_in_any_order_are_cut_each_for_itself():
    rows = [[0.1, 0.5, 0.15, 0.25], [0.97, 0.01, 0.01, 0.01], [0.15, 0.1, 0.25, 0.5]]
    for sampling, tokens in (
        (SamplingParameters(top_k=2), [{1, 3}, {0}, {2, 3}]),
        (SamplingParameters(top_p=0.7), [{1, 3}, {0}, {2, 3}]),
        (SamplingParameters(min_p=0.3), [{1, 2, 3}, {0}, {0, 2, 3}]),
    ):
        found = np.array(apply_cuts(mx.log(mx.array(rows)), sampling)) > -math.inf
        assert [wanted <= set(np.flatnonzero(row)) for wanted, row in zip(tokens, found, strict=True)] == [True] * 3
        assert found[[0, 2]].sum() == 2 * len(tokens[0]), "the second row has equal tokens"


@given(
    st.lists(st.floats(-20, 20), min_size=2, max_size=40),
    st.floats(0.01, 5),
    st.integers(0, 50),
    st.floats(0.0, 1),
    st.floats(0.0, 1),
)
def test_the_likeliest_token_is_never_cut(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
):
    row = mx.array([logits])
    left = apply_cuts(row, SamplingParameters(temperature, top_p or 1.0, top_k, min_p))
    assert np.array(left[0])[likeliest(row[0])] > -math.inf


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("top_p", [0.8, 0.95])
def test_the_nucleus_of_a_large_vocabulary_has_its_probability(dtype: mx.Dtype, top_p: float):
    logits = mx.array([[2.0, *np.linspace(0, -9, 50_000)]]).astype(dtype)
    row = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    probabilities = np.exp(np.array(row.astype(mx.float32), np.float64))
    probabilities /= probabilities.sum()
    kept_tokens = np.array(apply_cuts(row, SamplingParameters(top_p=top_p))) > -math.inf
    assert probabilities[kept_tokens].sum() == pytest.approx(top_p, abs=0.02)  # equal ones stay together


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("temperature", [1e-3, 1e-5, 1e-6, 1e-8, 1e-45])
def test_a_small_temperature_leaves_the_likeliest_token(dtype: mx.Dtype, temperature: float):
    row = mx.array([[-3.5, -2.5, -0.5, -1.0, -7.5, -math.inf]]).astype(dtype)
    sampler = create_sampler(SamplingParameters(temperature), 7, 0, 0)
    assert {sampler(row).item() for _ in range(20)} == {2}


def drawn(seed: int, choice: int, start: int, count: int) -> list[int]:
    sampler = create_sampler(SamplingParameters(), seed, choice, start)
    return [int(np.array(sampler(ROW)).item()) for _ in range(count)]


def test_a_rebuilt_row_draws_what_it_would_have_drawn():
    whole = drawn(7, 0, 0, 40)
    assert drawn(7, 0, 15, 25) == whole[15:]
    assert drawn(7, 0, 0, 40) == whole
    assert drawn(8, 0, 0, 40) != whole
    assert drawn(7, 1, 0, 40) != whole, "each choice draws for itself"


def test_draws_follow_the_probabilities():
    tokens = drawn(1, 0, 0, 1000)
    counts = [tokens.count(token) / 1000 for token in range(4)]
    assert counts == pytest.approx([0.5, 0.25, 0.15, 0.1], abs=0.05)


@given(st.integers(-(2**63), 2**63), st.integers(0, 127), st.integers(0, 10**6))
def test_a_key_fits_and_neighbours_differ(seed: int, choice: int, position: int):
    key = compute_draw_key(seed, choice, position)
    assert 0 <= key < 2**64
    assert len({key, compute_draw_key(seed, choice, position + 1), compute_draw_key(seed, choice + 1, position)}) == 3


def test_greedy_rows_share_one_function():
    assert create_sampler(SamplingParameters(temperature=0.0), 1, 0, 0) is choose_greedily
    assert create_sampler(SamplingParameters(top_k=1), 2, 1, 5) is choose_greedily


def processed(sampling: SamplingParameters, tokens: list[int], prompt: int) -> list[float]:
    logits = mx.array([[2.0, -2.0, 1.0, 0.0]])
    for processor in create_processors(sampling, prompt):
        logits = processor(mx.array(tokens), logits)
    return np.array(logits[0]).tolist()


def test_presence_and_frequency_count_the_answer_only():
    assert processed(SamplingParameters(presence=0.5), [0, 1, 2, 2], 2) == [2.0, -2.0, 0.5, 0.0]
    assert processed(SamplingParameters(frequency=0.5), [0, 1, 2, 2], 2) == [2.0, -2.0, 0.0, 0.0]
    assert processed(SamplingParameters(presence=0.5), [0, 1], 2) == [2.0, -2.0, 1.0, 0.0], "nothing is written yet"


def test_the_repetition_penalty_counts_the_prompt_too_and_divides():
    assert processed(SamplingParameters(repetition=2.0), [0, 1], 2) == [1.0, -4.0, 1.0, 0.0]


def test_a_bias_is_added():
    assert processed(SamplingParameters(bias=((3, 5.0), (0, -1.0))), [0], 1) == [1.0, -2.0, 1.0, 5.0]


def test_default_parameters_need_no_processors():
    assert create_processors(SamplingParameters(), 3) == ()


def test_the_request_wins_over_the_models_defaults():
    defaults = parse_defaults({"temperature": 0.6, "top_p": 0.95, "top_k": 20, "repetition_penalty": 1.1})
    assert resolve_sampling(GenerationParams(), defaults) == SamplingParameters(0.6, 0.95, 20, repetition=1.1)
    asked = GenerationParams(
        temperature=0.0, top_p=0.5, top_k=0, min_p=0.1, repetition_penalty=1.2, presence_penalty=1.0
    )
    assert resolve_sampling(asked, defaults) == SamplingParameters(0.0, 0.5, min_p=0.1, presence=1.0, repetition=1.2)
    off = GenerationParams(repetition_penalty=NO_REPETITION_PENALTY)
    assert resolve_sampling(off, defaults).repetition == 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(off), type=GenerationParams) == off


def test_a_strange_generation_config_is_read_as_far_as_it_makes_sense():
    assert parse_defaults({"temperature": "hot", "top_p": 7, "top_k": -1, "min_p": True}) == SamplingDefaults()
    assert parse_defaults({"do_sample": False, "temperature": 0.6}) == SamplingDefaults(temperature=0.0)


def test_a_model_that_decodes_greedily_keeps_its_repetition_penalty():
    config = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.2}
    assert parse_defaults(config) == SamplingDefaults(temperature=0.0, repetition=1.2)


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        ({"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0}, SamplingDefaults(temperature=0)),
        ({"temperature": 10, "top_k": 2**20, "min_p": 1}, SamplingDefaults(temperature=10, top_k=2**20, min_p=1)),
        ({"temperature": 10.1, "top_k": 2**20 + 1, "min_p": 1.1, "top_p": -0.1}, SamplingDefaults()),
        ({"top_p": 0, "repetition_penalty": 0}, SamplingDefaults()),
        ({"top_k": 40.0, "repetition_penalty": 10}, SamplingDefaults(top_k=40, repetition=10)),
        ({"repetition_penalty": 11, "temperature": True, "do_sample": None}, SamplingDefaults()),
    ],
    ids=str,
)
def test_defaults_of_a_model_are_within_their_ranges(config: dict[str, object], defaults: SamplingDefaults):
    found = parse_defaults(config)
    assert found == defaults
    assert isinstance(found.top_k, int)


def test_the_key_of_a_draw_is_the_same_in_every_version():
    """A resumed answer continues on another node, perhaps of another version, with the same draws."""
    keys = [compute_draw_key(*numbers) for numbers in ((0, 0, 0), (7, 0, 0), (7, 1, 0), (7, 0, 1), (-1, 3, 99))]
    assert keys == KEYS
