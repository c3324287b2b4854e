"""A loaded model: its weights, its ledger, its decode batches, and how fast it has been.

Loading is a generator, so that the loop can decode between its pieces: each `next` evaluates about TICK bytes of
weights. mlx-lm builds the model with lazy arrays; nothing is read before its turn. So the bytes that the model takes
once its checkpoint is converted are known exactly before the first of them is read, and each piece can be judged before
it is evaluated.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import mlx.core as mx
from mlx import utils as mlx_utils
from mlx_lm.utils import load_model
from msgspec.structs import replace

from node.engine.kv.commitments import Ledger
from node.engine.kv.kv_cache import Layers, TextModel, evaluate, kv_of, new_cache, plain
from node.engine.memory.transient_estimator import Estimator
from node.engine.models.model_descriptor import Found
from node.engine.requests.sequence import Row
from node.engine.scheduling.chunk_policy import Pace, Speed, mean
from node.engine.scheduling.decode_batch import DecodeBatch, Guard, Joining
from node.engine.scheduling.sampling import Defaults, defaults_of, greedy
from wire.capacity.arithmetic import prefill_transient, row_bytes, tail
from wire.report import ROW_COST, Kv
from wire.units import MIB

if TYPE_CHECKING:
    from node.engine.models.profile import Profile

TICK = 256 * MIB
"""Bytes of weights between two chances for others to decode: about 0.1 s from an internal SSD."""
WARM_TOKENS = 32
STACKED, CONVERTED = 1, 3
"""What evaluating an array takes for a moment, as a multiple of its bytes. Stacking the experts of a layer reads them
all first. Converting fp8 blocks goes through a padded copy and a product in float32: 2 + 4 + 2 bytes for each final
number of 2 bytes (`sanitize` in mlx_lm/models/deepseek_v3.py)."""
UNCONVERTED = 1.02
"""Size after the conversion over size of the files, up to which a checkpoint counts as loaded as it is."""
MEASURED_TOKENS = 64
"""Prompts below this say little about bytes per token."""
FIRST_SPEED = 50.0
"""Tokens per second assumed of a prefill before the first was measured: slow, so that the first chunks are short."""


@dataclass(slots=True, eq=False)
class Resident:
    """`batches` by the ledger's batch (`Ledger.batch_of`), `vocabulary` the number of logits, `pace` what its
    chunks take, `reads` the speed of its prefills, `writes` that of a row that decodes alone, `step_seconds` a decode
    step of late. `plain`: its prompts may be padded (`cache.plain`)."""

    found: Found
    model: TextModel
    kv: Kv
    weights: int
    vocabulary: int
    defaults: Defaults
    ledger: Ledger
    estimator: Estimator
    batches: dict[int, DecodeBatch[Row]] = field(default_factory=dict[int, DecodeBatch[Row]])
    reads: Speed = field(default_factory=Speed)
    writes: Speed = field(default_factory=Speed)
    step_seconds: float = 0.0
    pace: Pace = field(default_factory=Pace)
    load_seconds: float = 0.0
    bytes_per_token: float = 0.0
    used_at: float = 0.0
    users: int = 0
    profile: "Profile | None" = None
    plain: bool = False

    @property
    def name(self) -> str:
        """The model's name."""
        return self.found.name

    def prefilled(self, tokens: int, seconds: float, back: float) -> None:
        """Note how long a chunk took whose tokens looked back at `back` others on the average."""
        self.reads.learn(tokens / max(seconds, 1e-6))
        self.pace.learn(tokens, back, seconds)

    def stepped(self, seconds: float, rows: int) -> None:
        """Note how long a decode step of one batch took, and what it would have taken with one row: the last one is no
        measure of a machine that may be at rest by now."""
        self.step_seconds = mean(self.step_seconds, seconds)
        self.writes.learn((1 + ROW_COST * (rows - 1)) / max(seconds, 1e-6))

    def rested(self, now: float) -> float:
        """Give for how many seconds nobody has used it (monotonic `now`)."""
        return 0.0 if self.users else now - self.used_at

    def bound_waste(self, waste: int) -> None:
        """Let padding waste at most so many bytes at any rate."""
        self.kv = self.ledger.kv = replace(self.kv, waste=waste)

    def measured_text(self, size: int, tokens: int) -> None:
        """Note how many bytes of text made so many prompt tokens; short prompts are mostly template."""
        if tokens >= MEASURED_TOKENS and size:
            self.bytes_per_token = mean(self.bytes_per_token, size / tokens)

    def rows(self) -> int:
        """Count the rows that decode."""
        return sum(len(batch) for batch in self.batches.values())

    @property
    def tail(self) -> int:
        """Most tokens of a forward whose logits are wanted."""
        return tail(self.estimator.transient)


def forward(model: TextModel, ids: Iterable[int], cache: Layers, *, last: bool) -> mx.array | None:
    """Write tokens into a cache: one prefill forward, evaluated. With `last` give the logits (1, vocabulary) of the
    last token, else none are computed."""
    logits = model(mx.array(list(ids))[None], cache=cache)
    wanted = logits[:, -1, :] if last else None
    evaluate([layer.state for layer in cache], *([] if wanted is None else [wanted]))
    return wanted


@dataclass(frozen=True, slots=True)
class Step:
    """The next step of a load, in bytes: weights that are not read yet, and what the step takes for a moment beside
    them. A step without either judges itself: it is a forward of a profile's probe."""

    left: int = 0
    transient: int = 0


def load(found: Found, weighed: Callable[[int], None] = lambda weights: None) -> Iterator[Step | Resident]:
    """Load a model piece by piece. Yields what the next step takes before that step runs, and at last the model. Before
    the model's first forward `weighed` is called with the bytes of its weights. Raises whatever is wrong with the
    checkpoint; closing the generator drops what was read."""
    folder = Path(found.folder)
    model, config = load_model(folder, lazy=True)
    arrays = _parameters(model)
    left = weights = sum(array.nbytes for array in arrays)
    converted = weights > UNCONVERTED * found.stored
    for piece in _pieces(arrays):
        yield Step(left, max(array.nbytes for array in piece) * (CONVERTED if converted else STACKED))
        for part in ([one] for one in piece) if converted else (piece,):
            evaluate(part)
        left -= sum(array.nbytes for array in piece)
    yield Step(0, prefill_transient(found.forward, WARM_TOKENS, 0, last=True) + row_bytes(found.kv, WARM_TOKENS + 2))
    weighed(weights)
    warmth = _warm(model)
    resident = Resident(
        found, model, warmth.kv, weights, warmth.vocabulary, _defaults(folder, config), Ledger(warmth.kv),
        Estimator(replace(found.forward, logits=4.0 * warmth.vocabulary)),
        step_seconds=warmth.step_seconds,
        pace=Pace(warmth.step_seconds, 1 / warmth.prefill_speed), plain=plain(new_cache(model)),
    )  # fmt: skip
    resident.reads.learn(warmth.prefill_speed)
    resident.writes.learn(1 / warmth.step_seconds)
    yield resident


def _parameters(model: TextModel) -> list[mx.array]:
    flat = cast("list[tuple[str, mx.array]]", cast("Any", mlx_utils).tree_flatten(cast("Any", model).parameters()))
    return [array for _, array in flat]


def _pieces(arrays: Iterable[mx.array]) -> Iterator[list[mx.array]]:
    piece: list[mx.array] = []
    size = 0
    for array in arrays:
        piece.append(array)
        size += array.nbytes
        if size >= TICK:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


@dataclass(frozen=True, slots=True)
class Warmth:
    """What a first short run of a model showed: tokens per second of a prefill, seconds of a decode step."""

    kv: Kv
    vocabulary: int
    prefill_speed: float
    step_seconds: float


def _warm(model: TextModel) -> Warmth:
    """Run a short prompt through prefill and decode, twice: the first time kernels are compiled, the second counts."""
    _try_out(model)
    return _try_out(model)


def _try_out(model: TextModel) -> Warmth:
    cache = new_cache(model)
    ids = [0] * WARM_TOKENS
    begun = time.monotonic()
    logits = forward(model, ids, cache, last=True)
    assert logits is not None  # noqa: S101  the last were asked for
    speed = WARM_TOKENS / max(time.monotonic() - begun, 1e-6)
    kv = kv_of(cache)
    batch: DecodeBatch[int] = DecodeBatch(model)
    batch.join([Joining(0, Guard(greedy, ()))], ids, cache, logits)
    batch.step()
    batch.wait()
    joined = time.monotonic()
    (token,) = batch.step()
    batch.wait()
    return Warmth(kv, token.logprobs.shape[-1], speed, time.monotonic() - joined)


def _defaults(folder: Path, config: dict[str, Any]) -> Defaults:
    try:
        loaded: object = json.loads((folder / "generation_config.json").read_text())
    except (OSError, ValueError):
        return Defaults()
    return defaults_of(cast("dict[str, object]", loaded)) if isinstance(loaded, dict) else Defaults()
