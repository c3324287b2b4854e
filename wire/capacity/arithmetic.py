"""Memory arithmetic: headroom, the default margin, and whether an allocation fits on a node.

The module defines current, headroom, predicted, the default margin and the memory level. Functions compute the bytes of
transients (buffers during a forward), tokenization, requests and model loads; `batches` computes those of decode
batches.

The gate of the engine uses these functions for prefills, rows that join a decode batch, and model loads. Leases and the
router's placement use the same functions on the same fields. Router and gate therefore agree about the same reading;
property tests check that. Readings are in `node/memory`, the origin of a cap is in `node/memory/cap`. The formulas:

    current   = max(active, phys, recent)                 unreadable phys → None → refuse
    occupied  = max(0, current − reusable)                reusable is 0 on the node itself
    headroom  = ceiling − margin − occupied − reserved    may be negative
    predicted = occupied + reserved + estimate + margin
    verdict   = Fits if predicted <= ceiling, or if the guard is off; else Refused with every number

Hence `predicted <= ceiling` ⇔ `estimate <= headroom`. `compute_level` and `build_shed_refusal` use `current` in place
of `occupied`.

The default margin comes from a measured mixture-of-experts model under a cap of 107.52 GiB. Its forwards exceeded the
readings by up to 10.6 GiB. A margin of 12 GiB covers that excess: 12 / 107.52 = 11.2 %.
"""

import math
from collections.abc import Callable

from msgspec.structs import replace

from wire.capacity.batches import choose_batch, compute_row_bytes
from wire.refusals import MemoryNumbers, RefusalCode, Refused
from wire.report import (
    BatchGroup,
    Memory,
    MemoryLevel,
    Model,
    TransientModel,
    WireStruct,
)
from wire.units import GIB, MIB, show_size

MARGIN_SHARE = 12 / 107.52
"""Share of the cap that the default margin takes, 0 to 1."""
MAX_MARGIN_BYTES = 12 * GIB
"""Maximum of the default margin, in bytes."""
MIN_MARGIN_BYTES = 512 * MIB
"""Minimum of the default margin, in bytes."""
UNREADABLE = "unreadable"
"""Value of `bound_by` while the memory of the system cannot be read; the ceiling is then 1 byte."""
RESIDUAL_FACTOR = 12 / 10.6
"""Quotient of a profiled node's margin and residual. The default margin of 12 GiB covers an excess of 10.6 GiB."""
MIN_PROFILED_MARGIN_SHARE = 0.02
"""Minimum margin divided by the cap, if every loaded model has a profile."""
KV_GROWTH_TOKENS = 64
"""Tokens by which the commitment of a row grows when its answer exceeds the expected length."""
DEFAULT_ROW_TOKENS = 2048
"""Tokens of a row in `compute_max_batch`, unless the context length of the model is shorter."""
MAX_LOGITS_BYTES = 16 * MIB
"""Maximum bytes of logits in the last forward of a prompt. A forward of one token may take more."""


TOKENIZE_BYTES_PER_TOKEN = 320
"""Maximum transient bytes per token during tokenization, and per byte of text, because a byte can be a token."""
TOKENIZER_LOAD_FACTOR, TOKENIZER_GUIDE_FACTOR = 36, 16
"""Maximum bytes of memory per byte of a tokenizer's files: to load the tokenizer; to build its grammar tables."""
TOKENIZER_CODE_BYTES = 2 * MIB
"""Bytes that the load of a tokenizer takes for imported code, in addition to `TOKENIZER_LOAD_FACTOR`."""
TOKENIZE_BYTES_PER_TEXT_BYTE = 8
"""Bytes per byte of text that is rendered but not tokenized: copies of the text."""
TOKENIZE_SLICE_CHARS = 256 * 1024
"""Characters per slice when a long text is tokenized up to the context length."""
TOKENIZE_SLACK = 1.02
"""Factor on the context length at which tokenization stops, because slicing adds a few tokens."""
UNCHECKED_TOKENIZE_BYTES = MIB
"""Bytes up to which tokenization needs no check of the gate; less than every default margin."""
MAX_UNCHECKED_TEXT_BYTES = UNCHECKED_TOKENIZE_BYTES // TOKENIZE_BYTES_PER_TOKEN
"""Bytes of text that a loaded tokenizer always tokenizes within `UNCHECKED_TOKENIZE_BYTES`."""


def compute_default_margin(cap: int) -> int:
    """Return the margin in bytes for models without a measured profile: 11.2 % of the cap, 512 MiB to 12 GiB."""
    return max(MIN_MARGIN_BYTES, min(MAX_MARGIN_BYTES, int(cap * MARGIN_SHARE)))


def compute_profiled_margin(cap: int, residual: int) -> int:
    """Return the margin in bytes for a node whose loaded models all have a profile, which the caller checks.

    The margin is 1.13 × `residual`, and at least 2 % of `cap`, both in bytes. `residual` is the maximum excess of a
    measured forward pass over its estimate and the KV that it wrote.
    """
    return max(int(residual * RESIDUAL_FACTOR), int(cap * MIN_PROFILED_MARGIN_SHARE))


def compute_current(active: int, phys: int | None, recent: int) -> int | None:
    """Return the memory in use in bytes: the maximum of MLX's memory, footprint and recent peak.

    None if the footprint `phys` could not be read.
    """
    return None if phys is None else max(active, phys, recent)


def compute_headroom(ceiling: int, margin: int, now: int | None, reserved: int) -> int | None:
    """Return ceiling − margin − `now` − reserved in bytes, negative above the limit; None if `now` is None.

    `now` is the memory in use in bytes: `compute_current`, or `compute_occupied` for a report; None if unknown.
    """
    return None if now is None else ceiling - margin - now - reserved


def compute_occupied(memory: Memory) -> int | None:
    """Return the memory in use in bytes without the reusable bytes of a report; None if the footprint is unknown.

    On the node itself `reusable` is 0, because the gate may count on these bytes only after they were freed.
    """
    now = compute_current(memory.active, memory.phys, memory.recent)
    return None if now is None else max(0, now - memory.reusable)


def compute_level(memory: Memory) -> MemoryLevel:
    """Return the memory level: OK for a headroom of at least 0, OVER_HARD for a positive excess, else OVER_SOFT.

    The level is UNKNOWN if the footprint could not be read. OVER_SOFT becomes UNKNOWN if the ceiling could not be read,
    because the engine must not free memory for an unknown excess.
    """
    free_bytes = compute_headroom(
        memory.ceiling, memory.margin, compute_current(memory.active, memory.phys, memory.recent), memory.reserved
    )
    if free_bytes is None:
        return MemoryLevel.UNKNOWN
    if free_bytes >= 0:
        return MemoryLevel.OK
    if compute_excess(memory) > 0:
        return MemoryLevel.OVER_HARD
    return MemoryLevel.UNKNOWN if memory.bound_by == UNREADABLE else MemoryLevel.OVER_SOFT


def compute_excess(memory: Memory) -> int:
    """Return the bytes by which the engine exceeds cap − leases now; negative below that limit.

    An unknown footprint counts as 0. The dynamic ceiling is not used because its jitter must not end requests. The
    recent peak is not used because a past peak needs no action.
    """
    return max(memory.active, memory.phys or 0) - compute_hard_limit(memory)


def compute_hard_limit(memory: Memory) -> int:
    """Return cap − leases in bytes, at least 1. An engine that stays above this limit has to end requests."""
    return max(1, memory.cap - memory.leases)


class Fits(WireStruct, frozen=True, gc=False):
    """Result of a check that passed, in bytes."""

    predicted: int
    """Predicted peak: occupied + reserved + estimate + margin; without the margin if the guard is off."""
    spare: int
    """Headroom that remains; 0 if the guard is off."""


def judge(memory: Memory, estimate: int, *, unacknowledged: int = 0, node: str = "") -> Fits | Refused:
    """Check whether `estimate` more bytes fit on a node. Return `Fits`, or a refusal: NO_ROOM, or UNREADABLE.

    `unacknowledged` are bytes that the router has reserved and the reading does not contain; 0 on the node itself.
    `node` is the name in the refusal. If the guard is off, everything fits. Otherwise nothing fits while the footprint
    is unknown. A refusal is UNREADABLE if the footprint or the ceiling cannot be read.
    """
    reserved = memory.reserved + unacknowledged
    now = compute_occupied(memory)
    if not memory.guard:
        return Fits((now or 0) + reserved + estimate, 0)
    free_bytes = compute_headroom(memory.ceiling, memory.margin, now, reserved)
    predicted = None if now is None else now + reserved + estimate + memory.margin
    if predicted is not None and free_bytes is not None and predicted <= memory.ceiling:
        return Fits(predicted, free_bytes - estimate)
    numbers = MemoryNumbers(
        predicted, memory.ceiling, now, reserved, estimate, memory.margin, memory.cap, free_bytes, memory.bound_by
    )
    if predicted is None or memory.bound_by == UNREADABLE:
        reading = "the footprint of the engine" if predicted is None else "the available memory of its system"
        return Refused(
            RefusalCode.UNREADABLE,
            f"{reading} cannot be read; the node starts no requests until then",
            numbers,
            2.0,
            node,
        )
    text = (
        f"needs {show_size(estimate)}, headroom is {show_size(free_bytes)} (of {show_size(memory.ceiling)}, "
        f"{show_size(now)} are in use, {show_size(reserved)} reserved, {show_size(memory.margin)} kept as margin)"
    )
    return Refused(RefusalCode.NO_ROOM, text, numbers, None, node)


def judge_load(memory: Memory, estimate: int) -> Fits | Refused:
    """Check whether the `estimate` bytes of a model load (weights, fixed state, transient) fit, without the margin.

    Return `Fits`, or a refusal: NO_ROOM, or UNREADABLE if the memory cannot be read. The margin covers transients of
    forwards, and a load runs only a warm-up. Requests to the loaded model are checked with the margin.
    """
    return judge(replace(memory, margin=0), estimate)


def exceeds_headroom(memory: Memory, estimate: int) -> bool:
    """Return whether `estimate` more bytes are known not to fit; False if memory is unreadable or the guard is off."""
    answer = judge(memory, estimate)
    return isinstance(answer, Refused) and answer.code is RefusalCode.NO_ROOM


def build_shed_refusal(memory: Memory, over: int) -> Refused:
    """Return the refusal for a running request that is preempted or ended, because the engine is above cap − leases.

    `over` is the number of bytes above that limit.
    """
    now = compute_current(memory.active, memory.phys, memory.recent)
    free_bytes = compute_headroom(memory.ceiling, memory.margin, now, memory.reserved)
    numbers = MemoryNumbers(
        None if now is None else now + memory.reserved + memory.margin,
        memory.ceiling,
        now,
        memory.reserved,
        0,
        memory.margin,
        memory.cap,
        free_bytes,
        memory.bound_by,
    )
    message = f"the node was {show_size(over)} over its cap minus leases and ended this request: retry"
    return Refused(RefusalCode.NO_ROOM, message, numbers)


def estimate_prefill_transient(
    transient: TransientModel, tokens: int, past: int, *, last: bool = False, grows: bool = True
) -> int:
    """Return the transient bytes of a prefill of `tokens` after `past` tokens, without the KV that it writes.

    `last`: whether the forward computes the logits of all its tokens. `grows`: whether the caches are full and are
    copied to grow.
    """
    attended = tokens + (min(past, transient.window) if transient.window else past)
    attention = transient.token * tokens + transient.pair * tokens * attended + grows * transient.seen * attended
    layers = transient.fixed + max(attention, transient.least * tokens)
    return math.ceil(max(layers, transient.fixed + transient.logits * tokens) if last else layers)


def estimate_step_transient(transient: TransientModel, rows: int, longest: int, *, grows: bool = True) -> int:
    """Return the transient bytes of a decode step of a padded batch, whose longest row has `longest` tokens.

    `grows`: whether the caches are full and are copied to grow. In most steps no cache grows. Copies of two layers are
    counted, because up to 1.6 layers were measured at once. Without rows, return 0.
    """
    if not rows:
        return 0
    attended = rows * (min(longest, transient.window) if transient.window else longest)
    each = transient.step_seen + grows * 2 * transient.seen
    return math.ceil(transient.step_fixed + rows * transient.step_row + attended * each)


def compute_last_chunk_tokens(transient: TransientModel) -> int:
    """Return the maximum tokens of the last forward of a prompt, at least 1.

    That forward computes the logits of all its tokens, which may take `MAX_LOGITS_BYTES`.
    """
    return max(1, int(MAX_LOGITS_BYTES / max(transient.logits, 1.0)))


def estimate_request_transient(model: Model, prompt_tokens: int, output_tokens: int, choices: int = 1) -> int:
    """Return the highest transient bytes of a forward of this model while the request runs, with `choices` answers.

    The maximum is over the smallest prefill chunk at the start and at the end of the prompt, and a decode step of each
    batch. A batch wider than the measured ones adds `Model.uncovered`. The minimum is `Model.transient`. Transients of
    several requests do not add up, because forwards run one at a time.
    """
    length = prompt_tokens + output_tokens
    return _estimate_highest_transient(
        model, prompt_tokens, length, choices, choose_batch(model.groups, length, model.kv)[0]
    )


def _estimate_highest_transient(model: Model, prompt: int, length: int, choices: int, best: BatchGroup | None) -> int:
    """Return the highest transient after the first row joined its `best` batch and the other rows formed a new batch.

    A batch wider than the measured ones is charged with `Model.uncovered`, by which the margin was narrowed.
    """
    transient, highest = model.forward, model.transient
    if transient.floor and prompt:
        chunk = min(prompt, transient.floor)
        end = min(chunk, compute_last_chunk_tokens(transient))
        highest = max(
            highest,
            estimate_prefill_transient(transient, chunk, prompt - chunk),
            estimate_prefill_transient(transient, end, prompt - end, last=True),
        )
    for group in model.groups:
        if group is best:
            step = estimate_step_transient(transient, group.rows + 1, max(group.longest, length))
        else:
            step = estimate_step_transient(transient, group.rows, group.longest)
        if step > highest:
            highest = step
    own = choices if best is None else choices - 1
    if own:
        highest = max(highest, estimate_step_transient(transient, own, length))
    if not model.uncovered:
        return highest
    width = max(own, 0 if best is None else best.rows + 1)
    return highest + model.uncovered if width > model.covered_rows else highest


def estimate_request_need(model: Model, prompt_tokens: int, output_tokens: int, choices: int = 1) -> int:
    """Return the bytes that a request needs: KV of all choices, transient, and the weights of a model not loaded.

    `output_tokens` are the expected tokens of an answer. Cached prompt tokens count in full because a hit in the prefix
    cache is copied.
    """
    kv, length = model.kv, prompt_tokens + output_tokens
    best, rows = choose_batch(model.groups, length, kv)
    if choices > 1:
        rows += (choices - 1) * compute_row_bytes(kv, length)
    highest = _estimate_highest_transient(model, prompt_tokens, length, choices, best)
    return rows + highest + (0 if model.loaded else model.weights)


def estimate_tokenize_bytes(
    text: int, files: int = 0, *, loads: bool = False, guides: bool = False, context: int = 0
) -> int:
    """Return the transient bytes to tokenize a text of `text` bytes; 0 for at most UNCHECKED_TOKENIZE_BYTES.

    `files` is the size of the tokenizer's files in bytes. `loads` tells whether the tokenizer is loaded first, and
    `guides` whether its tables for grammars are built first. Every byte of the text may be one token. `context` is the
    context length in tokens, soon after which tokenization stops; 0 if the whole text is tokenized.
    """
    if not (loads or guides) and text <= MAX_UNCHECKED_TEXT_BYTES:
        return 0  # a shortcut for most prompts
    most = min(text, int(context * TOKENIZE_SLACK) + TOKENIZE_SLICE_CHARS) if context else text
    taken = (
        TOKENIZE_BYTES_PER_TOKEN * most
        + TOKENIZE_BYTES_PER_TEXT_BYTE * (text - most)
        + files * (TOKENIZER_LOAD_FACTOR * loads + TOKENIZER_GUIDE_FACTOR * guides)
    )
    taken += TOKENIZER_CODE_BYTES * loads
    return taken if taken > UNCHECKED_TOKENIZE_BYTES else 0


def can_ever_fit(memory: Memory, model: Model, prompt_tokens: int, output_tokens: int, choices: int = 1) -> bool:
    """Return whether a request with `choices` answers would fit on the idle node, with no other model loaded.

    Weights, KV and transient must be within `compute_most_bytes`. Return True if the guard is off.
    """
    if not memory.guard:
        return True
    return estimate_alone_bytes(model, prompt_tokens, output_tokens, choices) <= compute_most_bytes(memory)


def compute_most_bytes(memory: Memory) -> int:
    """Return the bytes that weights, rows and transients may take together, cap − margin − base; may be negative."""
    return memory.cap - memory.margin - memory.base


def compute_most_weights(memory: Memory) -> int:
    """Return the maximum bytes of a model load (`judge_load`), cap − base without the margin; may be negative."""
    return memory.cap - memory.base


def estimate_alone_bytes(model: Model, prompt_tokens: int, output_tokens: int, choices: int = 1) -> int:
    """Return the bytes of a request and its model on the idle node: weights, rows of all choices, transient."""
    alone = replace(model, groups=()) if model.groups else model
    rows = compute_row_bytes(model.kv, prompt_tokens + output_tokens) * choices
    return rows + estimate_request_transient(alone, prompt_tokens, output_tokens, choices) + model.weights


def compute_max_context(memory: Memory, model: Model) -> int:
    """Return the maximum tokens of prompt and answer together on the idle node, at most the model's context length.

    Return 0 if not even one token fits, or if the context length is unknown (0).
    """
    return _find_largest(
        model.context, lambda tokens: estimate_alone_bytes(model, tokens - 1, 1) <= compute_most_bytes(memory)
    )


def compute_max_batch(memory: Memory, model: Model, most: int) -> int:
    """Return how many rows of usual length (`DEFAULT_ROW_TOKENS`) fit on the idle node, at most `most`."""
    length = min(DEFAULT_ROW_TOKENS, model.context or DEFAULT_ROW_TOKENS)
    return _find_largest(
        most, lambda rows: estimate_alone_bytes(model, length - 1, 1, rows) <= compute_most_bytes(memory)
    )


def _find_largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `most` for which `fits` is true, by bisection; 0 if there is none."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
