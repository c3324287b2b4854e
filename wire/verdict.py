"""The only memory arithmetic of the project: may this much more be written here, now?

Covers: `current`, `headroom`, `predicted`, the margin's default, the bytes of a padded decode batch, what a forward
takes for a moment and the reading of a prompt, the need of a request, the load test of a model, the level that the
enforcer acts on. The engine's gate, its preflight, its decode join, model loading, the video lease and the router's
placement judge the same fields by it, so what the router says "fits" the node's gate agrees with on the same reading (a
property test holds the two together, also where placement keeps the headroom of a report).
Does not cover: readings (`node/memory`), where a cap comes from (`node/memory/cap`), what to do at a level.

    current   = max(active, phys, recent)                 unreadable phys → None → refuse
    headroom  = ceiling − margin − current − reserved     may be negative; the one definition
    predicted = current + reserved + estimate + margin
    verdict   = Fits if predicted <= ceiling else Refused with every number

so `predicted <= ceiling` ⇔ `estimate <= headroom`. Margin and recent come from seed 000 (a 10.6 GiB spike measured on a
mixture of experts under a 107.52 GiB cap; 12 / 107.52 = 11.2 %).
"""

import math
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from wire.refusals import Code, Numbers, Refused
from wire.report import WASTE_MOST, Group, Kv, Level, Memory, Model, Part, Transient
from wire.units import GIB, MIB, show_size

MARGIN_SHARE = 12 / 107.52
MARGIN_MOST = 12 * GIB
MARGIN_LEAST = 512 * MIB
UNREADABLE = "unreadable"
"""The term that binds where the system's own memory cannot be read: the ceiling is 1 byte then."""
RESIDUAL_FACTOR = 12 / 10.6
"""The margin of the project's first case over the spike that was measured there: 1.13."""
PROFILED_LEAST = 0.02
WASTE_SHARE = 0.25
WASTE_CAP = 0.01
"""Share of the cap that padding may waste in a batch, up to `WASTE_MOST`."""
USUAL_LENGTH = 2048
"""Tokens of a row by which `max_batch` is counted."""
LOGITS_BYTES = 16 * MIB
"""What the logits of a prompt's last forward may take: with more tokens the last one has a forward of its own."""


READ_TOKEN = 320
"""Bytes that a token takes while a prompt is put into tokens, at most; so does a byte of text, which may be one."""
READ_LOAD, READ_GUIDE = 36, 16
"""Bytes that a tokenizer takes to load, and its tables for grammars, for each byte of its files, at most."""
READ_CODE = 2 * MIB
"""What a tokenizer takes to load however small its files are: the code that it imports."""
READ_TEXT = 8
"""Bytes that a byte of text takes that is rendered and never put into tokens: copies of the text."""
READ_SLICE = 256 * 1024
"""Characters that are counted at a time of a text that may not fit the context."""
READ_SLACK = 1.02
"""A text is refused uncounted from so many times the context on: cutting it into slices adds a few tokens."""
READ_FREE = MIB
"""What reading one prompt may take unasked: well within any margin."""


def default_margin(cap: int) -> int:
    """Give the margin in bytes for a cap without a measured profile: 11.2 % of it, 512 MiB to 12 GiB."""
    return max(MARGIN_LEAST, min(MARGIN_MOST, int(cap * MARGIN_SHARE)))


def profiled_margin(cap: int, residual: int) -> int:
    """Give the margin in bytes where every loaded model has a profile: 1.13 × the worst residual of a forward (by which
    it went above what it wrote and its estimate), at least 2 % of the cap."""
    return max(int(residual * RESIDUAL_FACTOR), int(cap * PROFILED_LEAST))


def current(active: int, phys: int | None, recent: int) -> int | None:
    """Give the number that is judged, in bytes; None when the footprint could not be read."""
    return None if phys is None else max(active, phys, recent)


def headroom(ceiling: int, margin: int, now: int | None, reserved: int) -> int | None:
    """Give ceiling − margin − current − reserved in bytes, negative when over; None when current is unknown."""
    return None if now is None else ceiling - margin - now - reserved


def occupied(memory: Memory) -> int | None:
    """Give the current bytes of a reading that are not given back at once; None when it is unknown. On the node itself
    that is `current`: only a report says what is `reusable`, and only after giving it back may the gate count on it."""
    now = current(memory.active, memory.phys, memory.recent)
    return None if now is None else max(0, now - memory.reusable)


def level(memory: Memory) -> Level:
    """Return how a node stands: OK ⇔ headroom ≥ 0, OVER_HARD where `excess` is above 0, else OVER_SOFT. UNKNOWN where
    the footprint cannot be read, and below the hard line also where the ceiling could not be: nothing is given up for a
    number that nobody read."""
    room = headroom(memory.ceiling, memory.margin, current(memory.active, memory.phys, memory.recent), memory.reserved)
    if room is None:
        return Level.UNKNOWN
    if room >= 0:
        return Level.OK
    if excess(memory) > 0:
        return Level.OVER_HARD
    return Level.UNKNOWN if memory.bound_by == UNREADABLE else Level.OVER_SOFT


def excess(memory: Memory) -> int:
    """Give the bytes by which a node is over cap − leases at this moment, negative when under. Two terms stay out:
    `dynamic`, whose jitter must not end work, and `recent`, for a height that has passed asks nobody for anything."""
    return max(memory.active, memory.phys or 0) - hard_line(memory)


def hard_line(memory: Memory) -> int:
    """Give cap − leases in bytes, never 0: an engine that stays above it is told to end work."""
    return max(1, memory.cap - memory.leases)


class Fits(Part, frozen=True, gc=False):
    """Yes: the predicted peak stays under the ceiling, with this much (bytes) to spare."""

    predicted: int
    spare: int


def judge(memory: Memory, estimate: int, *, unacknowledged: int = 0, node: str = "") -> Fits | Refused:
    """Say whether `estimate` more bytes may be written under this reading.

    `unacknowledged` is what the router has promised there and the reading does not contain yet; the node itself
    passes 0. With the guard off by name everything fits; with an unreadable footprint nothing does.
    """
    reserved = memory.reserved + unacknowledged
    now = occupied(memory)
    if not memory.guard:
        return Fits((now or 0) + reserved + estimate, 0)
    room = headroom(memory.ceiling, memory.margin, now, reserved)
    predicted = None if now is None else now + reserved + estimate + memory.margin
    if predicted is not None and room is not None and predicted <= memory.ceiling:
        return Fits(predicted, room - estimate)
    numbers = Numbers(
        predicted, memory.ceiling, now, reserved, estimate, memory.margin, memory.cap, room, memory.bound_by
    )
    if predicted is None or memory.bound_by == UNREADABLE:
        what = "the footprint of the engine" if predicted is None else "what its system can spare"
        return Refused(Code.UNREADABLE, f"{what} cannot be read, so nothing more is started there until it can",
                       numbers, 2.0, node)  # fmt: skip
    text = (
        f"needs {show_size(estimate)}, headroom is {show_size(room)} (of {show_size(memory.ceiling)}, {show_size(now)} "
        f"are taken, {show_size(reserved)} promised, {show_size(memory.margin)} kept as margin)"
    )
    return Refused(Code.NO_ROOM, text, numbers, None, node)


def judge_load(memory: Memory, estimate: int) -> Fits | Refused:
    """Judge bytes that a model load takes: weights, fixed state and the load's transient, without the run-time margin.

    The margin covers spikes inside a forward, and a load runs none but its warm-up. A model must be loadable: whether a
    request fits beside it is judged with the margin, when the request comes.
    """
    return judge(replace(memory, margin=0), estimate)


def lacks(memory: Memory, estimate: int) -> bool:
    """Return whether there is certainly no room for `estimate` more bytes. Where the memory cannot be read nobody
    knows, so nothing is given back for it."""
    answer = judge(memory, estimate)
    return isinstance(answer, Refused) and answer.code is Code.NO_ROOM


def shed(memory: Memory, over: int) -> Refused:
    """Give the reason for which a request that runs is ended: the node stood `over` bytes over its cap."""
    now = current(memory.active, memory.phys, memory.recent)
    room = headroom(memory.ceiling, memory.margin, now, memory.reserved)
    numbers = Numbers(
        None if now is None else now + memory.reserved + memory.margin, memory.ceiling, now, memory.reserved, 0,
        memory.margin, memory.cap, room, memory.bound_by,
    )  # fmt: skip
    message = f"the node stood {show_size(over)} over its cap less leases, so it ended this request; send it again"
    return Refused(Code.NO_ROOM, message, numbers)


def row_bytes(kv: Kv, tokens: int) -> int:
    """Give the bytes of a row of this many tokens, at most: caches grow `step` tokens at a time from where they are, so
    up to step − 1 tokens stand empty; a window keeps no more than it shows; `fixed` is there from the first token."""
    if tokens <= 0:
        return 0
    held = tokens + kv.step - 1
    row = kv.fixed + kv.per_token * held
    return row + kv.window_per_token * min(held, kv.window) if kv.window_per_token else row


def waste_under(cap: int) -> int:
    """Give the bytes that the padding of a batch may waste at any rate under this cap: `Kv.waste`."""
    return min(WASTE_MOST, int(cap * WASTE_CAP))


def padded(group: Group, kv: Kv) -> int:
    """Give the bytes of a decode batch: rows × longest row, because every row is padded to the longest."""
    return group.rows * row_bytes(kv, group.longest)


def joinable(group: Group, length: int, kv: Kv) -> bool:
    """Say whether a row of `length` tokens may join a batch: padding then wastes at most 25 %, or `kv.waste` bytes."""
    whole = max(group.longest, length) * (group.rows + 1)
    waste = whole - group.tokens - length
    return waste * kv.per_token <= kv.waste or waste <= WASTE_SHARE * whole


def join_bytes(groups: Iterable[Group], length: int, kv: Kv) -> int:
    """Give what a new row of `length` tokens adds, padding included, in the batch where it adds least (or its own)."""
    return _joined(tuple(groups), length, kv)[1]


def _joined(groups: Sequence[Group], length: int, kv: Kv) -> tuple[Group | None, int]:
    """Give the batch where a new row adds least (None: its own), and what it adds."""
    if not groups:
        return None, row_bytes(kv, length)
    best, least = None, 0
    for group in groups:
        if joinable(group, length, kv):
            grown = (group.rows + 1) * row_bytes(kv, max(group.longest, length)) - padded(group, kv)
            if best is None or grown < least:
                best, least = group, grown
    return (None, row_bytes(kv, length)) if best is None else (best, least)


def prefill_transient(transient: Transient, tokens: int, past: int, *, last: bool = False, grows: bool = True) -> int:
    """Give what a prefill of `tokens` behind `past` written ones takes for a moment, in bytes, beside what it writes.
    With `last` the logits of all of them are computed; without `grows` there is room for them in the caches."""
    seen = tokens + (min(past, transient.window) if transient.window else past)
    attention = transient.token * tokens + transient.pair * tokens * seen + grows * transient.seen * seen
    layers = transient.fixed + max(attention, transient.least * tokens)
    return math.ceil(max(layers, transient.fixed + transient.logits * tokens) if last else layers)


def step_transient(transient: Transient, rows: int, longest: int, *, grows: bool = True) -> int:
    """Give what a decode step of a padded batch takes for a moment, in bytes. Without `grows` there is room for its
    tokens in the caches, as in most steps; with it two layers are copied at once (measured: up to 1.6)."""
    if not rows:
        return 0
    seen = rows * (min(longest, transient.window) if transient.window else longest)
    each = transient.step_seen + grows * 2 * transient.seen
    return math.ceil(transient.step_fixed + rows * transient.step_row + seen * each)


def tail(transient: Transient) -> int:
    """Give the most tokens of a forward whose logits are wanted: all of them are computed for the sake of the last."""
    return max(1, int(LOGITS_BYTES / max(transient.logits, 1.0)))


def request_transient(model: Model, prompt_tokens: int, output_tokens: int, choices: int = 1) -> int:
    """Give the most that a forward takes for a moment once this request is here: the smallest chunk at the end of its
    prompt, or a decode step. Forwards run one after the other, so those of several requests do not add up."""
    length = prompt_tokens + output_tokens
    return _highest(model, prompt_tokens, length, choices, _joined(model.groups, length, model.kv)[0])


def _highest(model: Model, prompt: int, length: int, choices: int, best: Group | None) -> int:
    """Return the bytes of the highest forward, once the first row has joined its `best` batch and the rest form their
    own. A batch of more rows than the profile measured is charged with what the margin was narrowed by."""
    transient, highest = model.forward, model.transient
    if transient.floor and prompt:
        chunk = min(prompt, transient.floor)
        end = min(chunk, tail(transient))
        highest = max(
            highest,
            prefill_transient(transient, chunk, prompt - chunk),
            prefill_transient(transient, end, prompt - end, last=True),
        )
    for group in model.groups:
        if group is best:
            step = step_transient(transient, group.rows + 1, max(group.longest, length))
        else:
            step = step_transient(transient, group.rows, group.longest)
        highest = max(highest, step)
    own = choices if best is None else choices - 1
    highest = max(highest, step_transient(transient, own, length))
    width = max(own, 0 if best is None else best.rows + 1)
    return highest + model.uncovered if model.uncovered and width > model.covered_rows else highest


def request_need(model: Model, prompt_tokens: int, output_tokens: int, choices: int = 1) -> int:
    """Give the bytes a request needs: KV of prompt and expected output for every choice, transient, weights if absent.

    The whole prompt counts, cached or not: a prefix-cache hit is a copy once it is written.
    """
    kv, length = model.kv, prompt_tokens + output_tokens
    best, rows = _joined(model.groups, length, kv)
    if choices > 1:
        rows += (choices - 1) * row_bytes(kv, length)
    highest = _highest(model, prompt_tokens, length, choices, best)
    return rows + highest + (0 if model.loaded else model.weights)


def reading_bytes(text: int, files: int = 0, *, loads: bool = False, guides: bool = False, context: int = 0) -> int:
    """Return the bytes that it takes for a moment to put `text` bytes into tokens; 0 where that is too little to ask
    for. The tokenizer's files have `files` bytes; it may have to be loaded first, or need its tables for grammars.

    No byte is more than one token. With a `context` in tokens, tokenizing ends there and the rest is only rendered."""
    most = min(text, int(context * READ_SLACK) + READ_SLICE) if context else text
    taken = READ_TOKEN * most + READ_TEXT * (text - most) + files * (READ_LOAD * loads + READ_GUIDE * guides)
    taken += READ_CODE * loads
    return taken if taken > READ_FREE else 0


def can_ever_fit(memory: Memory, model: Model, prompt_tokens: int, output_tokens: int, choices: int = 1) -> bool:
    """Say whether the request would fit on this node if nothing else ran there: weights and KV under `most_bytes`."""
    if not memory.guard:
        return True
    return alone_bytes(model, prompt_tokens, output_tokens, choices) <= most_bytes(memory)


def most_bytes(memory: Memory) -> int:
    """Give the most that weights and rows may ever take together on a node: cap − margin − the engine's own base."""
    return memory.cap - memory.margin - memory.base


def most_weights(memory: Memory) -> int:
    """Return the most bytes that a load may ever take on a node: cap − the engine's own base (see `judge_load`)."""
    return memory.cap - memory.base


def alone_bytes(model: Model, prompt_tokens: int, output_tokens: int, choices: int = 1) -> int:
    """Give what a request takes where nothing else runs: weights, rows, transient."""
    alone = replace(model, groups=()) if model.groups else model
    rows = row_bytes(model.kv, prompt_tokens + output_tokens) * choices
    return rows + request_transient(alone, prompt_tokens, output_tokens, choices) + model.weights


def max_context(memory: Memory, model: Model) -> int:
    """Give the most tokens of one row, prompt and answer, that fit where nothing else runs; 0 when none does."""
    return _most(model.context, lambda tokens: alone_bytes(model, tokens - 1, 1) <= most_bytes(memory))


def max_batch(memory: Memory, model: Model, most: int) -> int:
    """Give how many rows of usual length fit where nothing else runs, `most` at most."""
    length = min(USUAL_LENGTH, model.context)
    return _most(most, lambda rows: alone_bytes(model, length - 1, 1, rows) <= most_bytes(memory))


def _most(most: int, fits: Callable[[int], bool]) -> int:
    """Give the largest number up to `most` that fits, by halving; 0 when none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low
