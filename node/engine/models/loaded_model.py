"""Loaded model with its weights, commitments, estimates and statistics, and the loader of models.

`load` is a generator, because the engine decodes between the pieces of a load. Each `next` evaluates about
`BYTES_BETWEEN_STEPS` bytes of weights. mlx-lm builds a model with lazy arrays, which are read only on evaluation. The
exact bytes of the model after conversion are therefore known before the first read. The gate can check each piece
before its evaluation.
"""

import json
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx import utils as mlx_utils
from mlx_lm.utils import load_model
from msgspec.structs import replace

from node.engine.embedding.bare_model import load_bare_model
from node.engine.embedding.encoders.encoder import Encoder, load_encoder
from node.engine.embedding.head import EmbeddingHead, load_head
from node.engine.kv.commitments import CommitmentLedger
from node.engine.kv.kv_cache import (
    Layers,
    TextModel,
    can_merge,
    copy_state_views,
    create_cache,
    evaluate,
    is_plain,
    measure_kv_parameters,
)
from node.engine.memory.transient_estimator import TransientEstimator
from node.engine.models.load_state import LoadStep
from node.engine.models.model_descriptor import ModelDescriptor
from node.engine.models.model_stats import ModelStats, ModelUsage, create_warmed_stats
from node.engine.process.device_errors import raise_if_device_lost
from node.engine.scheduling.decode_batch import DecodeBatch, JoiningRow, RowSampler
from node.engine.scheduling.sampling import SamplingDefaults, choose_greedily, parse_defaults
from node.models.embedding_layout import EmbeddingLayout
from wire.capacity.arithmetic import compute_last_chunk_tokens, estimate_prefill_transient
from wire.capacity.batches import compute_row_bytes
from wire.report import KvParameters
from wire.units import MIB

BYTES_BETWEEN_STEPS = 256 * MIB
"""Bytes of weights after which a load yields, so that rows can decode: about 0.1 s from an internal SSD. A piece may be
larger, because an array is never split."""
WARMUP_TOKENS = 32
"""Tokens of the prompt of a warm-up, or of the text for an encoder."""
TOGETHER_TOKENS = (11, 4)
"""Lengths of the prompts of two rows that are decoded together once, for a class of models (`can_batch`)."""
WRONG_TOGETHER = frozenset({"afm7", "phi3small"})
"""Values of `model_type` whose rows decode alone. In a batch, mlx-lm 0.32.2 gives rows of different lengths wrong
positions (afm7) or one mask (phi3small), for some numbers of rows without an error."""
STACKED, CONVERTED = 1, 3
"""Transient bytes of evaluating an array, as a multiple of its bytes. Stacking the experts of a layer reads all of them
first. Converting fp8 blocks uses a padded copy and a product in float32: 2 + 4 + 2 bytes for each final number of 2
bytes (`sanitize` in mlx_lm/models/deepseek_v3.py)."""
UNCONVERTED = 1.02
"""Ratio of the size after conversion to the size of the files, up to which a checkpoint counts as unconverted."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """Model in memory. The fields never change, but the objects in `ledger`, `estimator`, `stats` and `usage` do."""

    descriptor: ModelDescriptor
    """Descriptor of the model."""
    model: TextModel
    """mlx-lm model, or `Encoder`."""
    weights: int
    """Bytes of the weights."""
    vocabulary: int
    """Number of logits per token; of an encoder, the number of token ids."""
    defaults: SamplingDefaults
    """Sampling defaults from the generation config."""
    ledger: CommitmentLedger
    """Ledger of the commitments of the model's rows."""
    estimator: TransientEstimator
    """Estimator of the transient bytes of the model's forwards."""
    plain: bool = False
    """Whether prompts may be padded (`kv_cache.is_plain`)."""
    stats: ModelStats = field(default_factory=ModelStats)
    """Measured speeds and memory profile of the model."""
    usage: ModelUsage = field(default_factory=ModelUsage)
    """Users of the model, and the time of the last use."""
    head: EmbeddingHead | None = None
    """Head that computes vectors or scores; None for a chat model."""

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.descriptor.name

    @property
    def has_rows(self) -> bool:
        """Whether the model can run rows over a cache, as every decoder can."""
        return self.head is None or not self.head.runs_whole_texts

    @property
    def kv(self) -> KvParameters:
        """Parameters of the KV memory of a row."""
        return self.ledger.kv

    @property
    def tail(self) -> int:
        """Maximum tokens of the last chunk of a prompt, whose forward computes logits of all its tokens."""
        return compute_last_chunk_tokens(self.estimator.transient)


def run_forward(model: TextModel, ids: Iterable[int], cache: Layers, *, last: bool) -> mx.array | None:
    """Run and evaluate one prefill forward over the token ids `ids`, which extends `cache`. With `last`, return the
    logits (1, vocabulary) after the last token; else None."""
    logits = model(mx.array(list(ids))[None], cache=cache)
    last_logits = logits[:, -1, :] if last else None
    copy_state_views(cache)
    evaluate([layer.state for layer in cache], *([] if last_logits is None else [last_logits]))
    return last_logits


def load(
    descriptor: ModelDescriptor, on_weighed: Callable[[int], None] = lambda weights: None
) -> Generator[LoadStep | LoadedModel]:
    """Load a model piece by piece. Yield the memory that each step needs before the step runs (`LoadStep`), and finally
    the model.

    Before the model's first forward, `on_weighed` is called with the bytes of its weights. Exceptions for a faulty
    checkpoint propagate, such as `EmbeddingHeadError` or `ValueError`, and `OSError` or `RuntimeError` for a failed
    read. Raise `UncountableCacheError` for caches whose memory is unknown. To abort the load and release the loaded
    pieces, close the generator.
    """
    folder = Path(descriptor.folder)
    layout = descriptor.layout
    model, config = _open_model(folder, layout)
    alone = False
    if layout is None or layout.answers is not None:
        alone = not can_merge(create_cache(model)) or config.get("model_type") in WRONG_TOGETHER
    head = None if layout is None else load_head(folder, layout, model)
    arrays = [*_list_arrays(model), *([] if head is None else head.arrays)]
    left = weights = sum(array.nbytes for array in arrays)
    converted = weights > UNCONVERTED * descriptor.stored
    for piece in _split_pieces(arrays):
        yield LoadStep(left, max(array.nbytes for array in piece) * (CONVERTED if converted else STACKED))
        for part in ([array] for array in piece) if converted else (piece,):
            _read_arrays(part)
        left -= sum(array.nbytes for array in piece)
    yield LoadStep(
        0,
        estimate_prefill_transient(descriptor.forward, WARMUP_TOKENS, 0, last=True)
        + 2 * compute_row_bytes(descriptor.kv, WARMUP_TOKENS + 2),
    )
    on_weighed(weights)
    warmth = _warm_up_encoder(head) if head is not None and head.runs_whole_texts else _warm_up(model, alone=alone)
    yield LoadedModel(
        descriptor=descriptor,
        model=model,
        weights=weights,
        vocabulary=warmth.vocabulary,
        defaults=_read_defaults(folder, config),
        ledger=CommitmentLedger(warmth.kv, alone=warmth.alone),
        estimator=TransientEstimator(replace(descriptor.forward, logits=warmth.logit_bytes)),
        plain=warmth.plain,
        stats=create_warmed_stats(warmth.prefill_speed, warmth.step_seconds),
        head=head,
    )


def _read_arrays(arrays: Sequence[mx.array]) -> None:
    """Evaluate arrays that MLX reads from files.

    After an error of a file, discard the errors that MLX keeps. It reads files on a stream of the CPU and keeps the
    error there until that stream is awaited. All later loads would raise it again. (mlx#3742, tried with MLX 0.32.4 and
    two streams of the CPU, outside of the main thread.)
    """
    try:
        evaluate(arrays)
    except RuntimeError as error:
        raise_if_device_lost(error)
        for device in (mx.Device(mx.cpu), mx.default_device()):
            _discard_error(mx.default_stream(device))
        raise


def _discard_error(stream: mx.Stream) -> None:
    """Wait for the work of a stream, and discard an error of an earlier work, unless the GPU has failed."""
    try:
        mx.synchronize(stream)
    except RuntimeError as error:
        raise_if_device_lost(error)


def _list_arrays(model: TextModel | Encoder) -> list[mx.array]:
    if isinstance(model, Encoder):
        return model.arrays
    flat = cast("list[tuple[str, mx.array]]", cast("Any", mlx_utils).tree_flatten(cast("Any", model).parameters()))
    return [array for _, array in flat]


def _split_pieces(arrays: Iterable[mx.array]) -> Iterator[list[mx.array]]:
    piece: list[mx.array] = []
    size = 0
    for array in arrays:
        piece.append(array)
        size += array.nbytes
        if size >= BYTES_BETWEEN_STEPS:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


@dataclass(frozen=True, slots=True)
class WarmupResult:
    """Measurements of the warm-up of a model: a short prefill and decode after the kernels are compiled."""

    kv: KvParameters
    """Parameters of the KV memory of a row."""
    vocabulary: int
    """Number of logits per token; of an encoder, the number of token ids."""
    prefill_speed: float
    """Tokens per second of a prefill."""
    step_seconds: float
    """Seconds of a decode step; of an encoder, of the whole text."""
    plain: bool = False
    """Whether prompts may be padded (`kv_cache.is_plain`)."""
    logit_bytes: float = 0.0
    """Bytes of the logits of a token; 0 if no forward computes logits."""
    alone: bool = False
    """Whether each row decodes alone, because mlx-lm cannot decode several rows of this architecture together."""


def _open_model(folder: Path, layout: EmbeddingLayout | None) -> tuple[TextModel, dict[str, Any]]:
    """Return the lazy model in a folder and its config: complete, without its output layer, or an encoder."""
    if layout is None or layout.answers is not None:
        model, config = load_model(folder, lazy=True)
        return cast("TextModel", model), config
    if layout.encoder is None:
        return load_bare_model(folder)
    return cast("TextModel", load_encoder(folder, layout.encoder)), {}


def _warm_up_encoder(head: EmbeddingHead) -> WarmupResult:
    """Run a short text twice: the first run compiles kernels, the second is measured."""
    seconds = 0.0
    for _ in range(2):
        begun = time.monotonic()
        pooled = head.start([WARMUP_TOKENS])
        head.build([[0] * WARMUP_TOKENS], pooled)
        evaluate(head.finish(pooled))
        seconds = max(time.monotonic() - begun, 1e-6)
    vocabulary = 0 if head.layout.encoder is None else head.layout.encoder.vocabulary
    return WarmupResult(KvParameters(0), vocabulary, WARMUP_TOKENS / seconds, seconds)


def _warm_up(model: TextModel, *, alone: bool) -> WarmupResult:
    """Run a short prompt through prefill and decode twice: the first run compiles kernels, the second is measured.

    Then find out whether rows can decode together, unless `alone` states that they cannot.
    """
    alone = alone or not can_batch(model)
    _try_out(model, alone=alone)
    return _try_out(model, alone=alone)


def _try_out(model: TextModel, *, alone: bool) -> WarmupResult:
    ids = [0] * WARMUP_TOKENS
    begun = time.monotonic()
    cache, logits = _prefill(model, ids)
    speed = WARMUP_TOKENS / max(time.monotonic() - begun, 1e-6)
    kv = measure_kv_parameters(cache)
    batch: DecodeBatch[int] = DecodeBatch(model, alone=alone)
    batch.join([JoiningRow(0, RowSampler(choose_greedily, ()))], ids, cache, logits)
    batch.step()
    batch.wait()
    joined = time.monotonic()
    (token,) = batch.step()
    batch.wait()
    vocabulary = token.logprobs.shape[-1]
    seconds, plain = time.monotonic() - joined, not alone and is_plain(create_cache(model))
    return WarmupResult(
        kv=kv,
        vocabulary=vocabulary,
        prefill_speed=speed,
        step_seconds=seconds,
        plain=plain,
        logit_bytes=4.0 * vocabulary,
        alone=alone,
    )


_batched = dict[type, bool]()
"""Results of `can_batch` in this process, by class of models."""


def can_batch(model: TextModel) -> bool:
    """Return whether rows of different lengths can decode together. The first call for a class of models decodes two
    rows.

    Return False if the model raises `ValueError` or `TypeError`, as gpt_bigcode does in mlx-lm 0.32.2.
    """
    kind = type(model)
    if kind not in _batched:
        batch: DecodeBatch[int] = DecodeBatch(model)
        try:
            for row, tokens in enumerate(TOGETHER_TOKENS):
                ids = [0] * tokens
                batch.join([JoiningRow(row, RowSampler(choose_greedily, ()))], ids, *_prefill(model, ids))
            batch.step()
            batch.wait()
            _batched[kind] = True
        except (ValueError, TypeError):
            _batched[kind] = False
    return _batched[kind]


def _prefill(model: TextModel, ids: list[int]) -> tuple[Layers, mx.array]:
    """Prefill a prompt. Return its cache and the logits after the last token, shape (1, vocabulary)."""
    cache = create_cache(model)
    logits = run_forward(model, ids, cache, last=True)
    assert logits is not None  # noqa: S101 the last logits were requested
    return cache, logits


def _read_defaults(folder: Path, config: dict[str, Any]) -> SamplingDefaults:
    try:
        loaded: object = json.loads((folder / "generation_config.json").read_text())
    except (OSError, ValueError):
        return SamplingDefaults()
    return parse_defaults(cast("dict[str, object]", loaded)) if isinstance(loaded, dict) else SamplingDefaults()
