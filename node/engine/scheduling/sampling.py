"""Sampling of a token from logits: penalties, bias, temperature, top-k, top-p, min-p, and reproducible draws.

Every draw is keyed by (seed, choice, position of the token in its answer), never by shared state. A row that is rebuilt
or resumed on another node therefore uses the same random numbers. Its tokens can still differ, because rounding differs
between batches and chips (docs/availability.md).

The order is repetition penalty, presence and frequency penalties, bias, temperature, top-k, top-p, min-p, draw. From
the temperature on, the order is that of Transformers.

Presence and frequency penalties count the answer's own tokens (OpenAI's definition). The repetition penalty also counts
the tokens of the prompt (CTRL, arXiv:1909.05858, as in Transformers).

Unless a function states (rows, vocabulary), arrays belong to one row: logits and log probabilities have the shape (1,
vocabulary), tokens the shape (length,). Nothing here is compiled, because on Linux a compiled function costs a g++ run
at first use.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from wire.frames import NO_REPETITION_PENALTY, GenerationParams

Sampler = Callable[[mx.array], mx.array]
"""Function that chooses a token, shape (1,), from log probabilities."""
Processor = Callable[[mx.array, mx.array], mx.array]
"""Function that returns changed logits, from the tokens so far (prompt and answer) and the logits of the next token."""

_MASK = 2**64 - 1
MIN_TEMPERATURE = 1e-6
"""Minimum temperature of a draw. Below it, the most likely token is chosen, as any draw would: differences between log
probabilities become too large for float32."""


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """Sampling parameters in force for the answers of a request. `top_k` 0, `top_p` 1 and `min_p` 0 have no effect."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence: float = 0.0
    """Presence penalty of tokens in the answer; 0 for none."""
    frequency: float = 0.0
    """Frequency penalty of tokens in the answer; 0 for none."""
    repetition: float = 1.0
    """Repetition penalty of tokens in prompt and answer; 1 for none."""
    bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and bias."""

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always chosen."""
        return self.temperature < MIN_TEMPERATURE or self.top_k == 1


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Defaults of a model's own `generation_config.json`, for parameters that a request does not set."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition: float = 1.0


def parse_defaults(config: Mapping[str, object]) -> SamplingDefaults:
    """Return the sampling defaults of a parsed `generation_config.json`. Values that are not numbers in their range are
    ignored. With `do_sample` false, the temperature is 0, and only the repetition penalty is read."""
    repetition = _get_number(config, "repetition_penalty", 1.0, 0, 10) or 1.0
    if config.get("do_sample") is False:
        return SamplingDefaults(temperature=0.0, repetition=repetition)
    return SamplingDefaults(
        _get_number(config, "temperature", 1.0, 0, 10),
        _get_number(config, "top_p", 1.0, 0, 1) or 1.0,
        int(_get_number(config, "top_k", 0, 0, 2**20)),
        _get_number(config, "min_p", 0.0, 0, 1),
        repetition,
    )


def _get_number(config: Mapping[str, object], key: str, default: float, least: float, most: float) -> float:
    value = config.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
        return value
    return default


def resolve_sampling(params: GenerationParams, defaults: SamplingDefaults) -> SamplingParameters:
    """Return the sampling parameters of a request, with the model's defaults for parameters that the request does not
    set.

    A repetition penalty of 1 counts as not set. The penalty `NO_REPETITION_PENALTY` means 1.
    """
    penalty = params.repetition_penalty
    return SamplingParameters(
        temperature=defaults.temperature if params.temperature is None else params.temperature,
        top_p=defaults.top_p if params.top_p is None else params.top_p,
        top_k=defaults.top_k if params.top_k is None else params.top_k,
        min_p=defaults.min_p if params.min_p is None else params.min_p,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        repetition=defaults.repetition if penalty == 1 else 1.0 if penalty == NO_REPETITION_PENALTY else penalty,
        bias=params.logit_bias,
    )


def choose_greedily(logprobs: mx.array) -> mx.array:
    """Return the most likely token of each row, shape (rows,), from log probabilities, shape (rows, vocabulary).

    All rows share this function, so that a batch is sampled in one call.
    """
    return mx.argmax(logprobs, axis=-1)


def compute_draw_key(seed: int, choice: int, position: int) -> int:
    """Return the key of one random draw, an integer of 64 bits. It depends on the seed, the index of the choice, and
    the position of the token in the answer. Splitmix64 makes the keys of adjacent positions independent."""
    mixed = _mix((seed & _MASK) + 0x9E3779B97F4A7C15 * (choice + 1))
    return _mix(mixed + 0x9E3779B97F4A7C15 * (position + 1))


def _mix(value: int) -> int:
    value &= _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class SeededSampler:
    """Sampler that draws the tokens of one answer in order. `position` is the index of the first drawn token in the
    answer; the tokens before it are known.

    A draw depends only on the `seed` of the request, the index `choice` of the answer, and the position of the token.
    """

    def __init__(self, sampling: SamplingParameters, seed: int, choice: int, position: int) -> None:
        self._sampling = sampling
        self._seed = seed
        self._choice = choice
        self._position = position

    def __call__(self, logprobs: mx.array) -> mx.array:
        """Draw the next token, shape (1,), from log probabilities (1, vocabulary)."""
        key = mx.random.key(compute_draw_key(self._seed, self._choice, self._position))
        self._position += 1
        return mx.random.categorical(apply_cuts(logprobs, self._sampling), key=key)


def create_sampler(sampling: SamplingParameters, seed: int, choice: int, position: int) -> Sampler:
    """Return the sampler of an answer whose first `position` tokens are known."""
    return choose_greedily if sampling.greedy else SeededSampler(sampling, seed, choice, position)


def apply_cuts(logprobs: mx.array, sampling: SamplingParameters) -> mx.array:
    """Return log probabilities (rows, vocabulary) after the temperature, with −inf outside top-k, top-p and min-p.

    `logprobs` has the same shape. The result is in float32 and not normalized, and each row keeps at least one finite
    value. The temperature must be at least `MIN_TEMPERATURE`.

    float32 is necessary because most models compute in 16 bits. With 16 bits, the sum of a softmax stops growing before
    the end of a large vocabulary, and a small temperature exceeds the range.
    """
    scaled = logprobs.astype(mx.float32) * (1 / sampling.temperature)
    vocabulary = scaled.shape[-1]
    if 0 < sampling.top_k < vocabulary:
        least = mx.min(mx.topk(scaled, sampling.top_k, axis=-1), axis=-1, keepdims=True)
        scaled = mx.where(scaled < least, -mx.inf, scaled)
    if sampling.top_p < 1:
        scaled = mx.where(scaled < _find_nucleus_threshold(scaled, sampling.top_p), -mx.inf, scaled)
    if sampling.min_p > 0:
        probabilities = mx.softmax(scaled, axis=-1)
        most = mx.max(probabilities, axis=-1, keepdims=True)
        scaled = mx.where(probabilities < sampling.min_p * most, -mx.inf, scaled)
    return scaled


def _find_nucleus_threshold(scaled: mx.array, top_p: float) -> mx.array:
    """Return the smallest logit of the smallest set of tokens whose total probability is at least `top_p`."""
    ordered = -mx.sort(-scaled, axis=-1)
    above = mx.cumsum(mx.softmax(ordered, axis=-1), axis=-1, inclusive=False)
    least = mx.min(mx.where(above < top_p, ordered, mx.inf), axis=-1, keepdims=True)
    return mx.minimum(least, ordered[..., :1])


def create_processors(sampling: SamplingParameters, prompt_tokens: int) -> tuple[Processor, ...]:
    """Return the processors of an answer's logits in order: repetition penalty, presence and frequency penalties, bias.

    Each is a pure function of the tokens so far, of which the first `prompt_tokens` are the prompt, and the logits.
    Parameters without an effect have no processor.
    """
    processors: list[Processor] = []
    if sampling.repetition != 1:
        processors.append(lambda tokens, logits: _penalize_repetition(tokens, logits, sampling.repetition))
    if sampling.presence or sampling.frequency:
        processors.append(lambda tokens, logits: _penalize_presence(tokens[prompt_tokens:], logits, sampling))
    if sampling.bias:
        where = mx.array([token for token, _ in sampling.bias])
        weights = mx.array([weight for _, weight in sampling.bias])
        processors.append(lambda tokens, logits: _add_at(logits, where, weights.astype(logits.dtype)))
    return tuple(processors)


def _penalize_repetition(tokens: mx.array, logits: mx.array, penalty: float) -> mx.array:
    seen = _count_tokens(tokens, logits) > 0
    return mx.where(seen, mx.where(logits < 0, logits * penalty, logits / penalty), logits)


def _penalize_presence(answer: mx.array, logits: mx.array, sampling: SamplingParameters) -> mx.array:
    if not answer.size:
        return logits
    counts = _count_tokens(answer, logits)
    return logits - sampling.frequency * counts - sampling.presence * (counts > 0)


def _count_tokens(tokens: mx.array, logits: mx.array) -> mx.array:
    """Count each token of the vocabulary in `tokens`, shape (1, vocabulary)."""
    return _add_at(mx.zeros_like(logits), tokens, mx.array(1, logits.dtype))


def _add_at(logits: mx.array, tokens: mx.array, values: mx.array) -> mx.array:
    return cast("Any", logits).at[:, tokens].add(values)
