"""What a node says of itself, twice a second while busy: the facts that placement and the tables read.

All sizes are bytes, all speeds tokens per second, all times seconds. Every structure is appended to, never reordered:
readers take defaults for fields that an older node does not send and ignore those that they do not know.
"""

from enum import IntEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from wire.bounds import (
    MAX_GROUPS,
    MAX_ITEMS,
    Blob,
    Difference,
    Estimate,
    Natural,
    Real,
    Seconds,
    Size,
    Text,
    Tokens,
    Word,
)
from wire.units import MIB

WASTE_MOST = 256 * MIB
"""Bytes of padding that are not worth a second batch, where memory is not short."""


class Part(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of everything that travels inside a frame."""


class Level(IntEnum):
    """How a node stands to its cap (`wire.verdict.level`); UNKNOWN where its footprint cannot be read."""

    UNKNOWN = 0
    OK = 1
    OVER_SOFT = 2
    OVER_HARD = 3


class Hardware(Part, frozen=True, array_like=True, gc=False):
    """The machine, told once in `Hello`."""

    chip: Text = ""
    memory: Size = 0
    cores: Natural = 0
    system: Text = ""
    python: Text = ""


class Memory(Part, frozen=True, array_like=True, gc=False):
    """One consistent reading and the limits it was judged by (architecture §3).

    `phys` is None when it could not be read; then `headroom` is None too and nothing is placed there. `source` names
    the reading (`statm`, `phys_footprint`, `scripted`), `age` its age when the report was written. `base` is what the
    engine takes before any model: no request can ever have that.

    `reusable` is in a report only: bytes of `current` that the engine surely gives back at once, before it refuses
    (its prefix cache). Whoever places requests counts them as free; the gate, which has to give them back first, not.
    `cache` and `peak` are MLX's own: free buffers that it keeps, and the most that was active since MLX was last asked
    to forget it; they are shown, and judged by nobody. `canary` is the last reserve, given up before all else: it
    is part of `current`, and in a report of `reusable`, too.
    """

    cap: Size = 0
    ceiling: Size = 0
    margin: Size = 0
    phys: Size | None = None
    active: Size = 0
    recent: Size = 0
    current: Size | None = None
    reserved: Size = 0
    headroom: Difference | None = None
    leases: Size = 0
    bound_by: Word = ""
    guard: bool = True
    armed: bool = False
    source: Word = ""
    age: Seconds = 0.0
    total: Size = 0
    base: Size = 0
    reusable: Size = 0
    cache: Size = 0
    peak: Size = 0
    canary: Size = 0


class Group(Part, frozen=True, array_like=True, gc=False):
    """One padded decode batch: its bytes are rows × longest row; `tokens` is what its rows really hold."""

    rows: Natural = 0
    longest: Tokens = 0
    tokens: Natural = 0


class Transient(Part, frozen=True, array_like=True, gc=False):
    """What a forward takes for a moment beside the rows that it writes, fitted to what forwards have taken.

    All in bytes (`wire.verdict.prefill_transient`, `step_transient`). A prefill of some tokens: `fixed`, `token` for
    each, `pair` for each and each token that it sees; or `least` for each token where layers without attention take
    more; `seen` for each token seen where the caches have to grow, which copies them layer by layer; `logits` for each
    token of a forward whose logits are wanted. A decode step: `step_fixed`, `step_row` for each row, `step_seen` (and
    `seen`) for each row and each token of the longest.

    A model all of whose layers have a `window` sees no more than that. `floor` is the smallest chunk in tokens that the
    engine cuts for want of memory.
    """

    fixed: Real = 0.0
    token: Real = 0.0
    pair: Real = 0.0
    seen: Real = 0.0
    least: Real = 0.0
    logits: Real = 0.0
    step_fixed: Real = 0.0
    step_row: Real = 0.0
    step_seen: Real = 0.0
    window: Natural = 0
    floor: Tokens = 0


ROW_COST = 0.1
"""By how much each further row makes a decode step longer, by and large: 0.06 measured on a CPU, not on a Mac yet."""


class Model(Part, frozen=True, array_like=True, gc=False):
    """A model that this node can serve.

    `decode_speed` are the tokens per second of a row that decodes alone (`ROW_COST`), `transient` is what the smallest
    prefill chunk adds for a moment at the start of a prompt (`forward` says it of every forward), `bytes_per_token` the
    measured ratio of request text to prompt tokens, `features` what a request may ask for beyond plain sampling,
    `cause` why it cannot be loaded now.

    `progress` is the share of the weights that a load under way has read, 0 to 1; 0 where none is.

    `profiled`: measured on this machine. `max_context` is the longest row that fits where nothing else runs,
    `max_batch` the most rows of usual length (`wire.verdict`); `observed` the highest transient seen, `residual` by how
    much a forward went above its estimate at most, in bytes; `covered` the tokens of the largest chunk measured,
    `covered_rows` the rows of the widest decode step, and `uncovered` the bytes that a wider one is charged with
    because the margin was narrowed for measured forwards only (0: all widths are covered by the margin in force).

    A row takes `kv_per_token` bytes for each of its tokens, `kv_window_per_token` for each of the last `kv_window`, and
    `kv_fixed` whatever its length; its cache grows `kv_step` tokens at a time (`wire.verdict.row_bytes`).

    `pinned`: it is preloaded and is never evicted for another model.
    """

    name: Word
    fingerprint: Word = ""
    loaded: bool = False
    weights: Estimate = 0
    kv_per_token: Estimate = 0
    transient: Estimate = 0
    context: Natural = 0
    load_seconds: Real = 0.0
    prefill_speed: Real = 0.0
    decode_speed: Real = 0.0
    bytes_per_token: Real = 4.0
    features: Annotated[tuple[Word, ...], Meta(max_length=MAX_ITEMS)] = ()
    groups: Annotated[tuple[Group, ...], Meta(max_length=MAX_GROUPS)] = ()
    expected_output: Natural = 256
    kv_step: Natural = 1
    kv_fixed: Estimate = 0
    kv_window: Natural = 0
    kv_window_per_token: Estimate = 0
    loading: bool = False
    cause: Text = ""
    forward: Transient = Transient()
    profiled: bool = False
    max_context: Natural = 0
    max_batch: Natural = 0
    observed: Estimate = 0
    kv_waste: Size = WASTE_MOST
    progress: Real = 0.0
    residual: Estimate = 0
    covered: Natural = 0
    covered_rows: Natural = 0
    uncovered: Estimate = 0
    pinned: bool = False

    @property
    def kv(self) -> "Kv":
        """What its rows take."""
        return Kv(
            self.kv_per_token, self.kv_step, self.kv_fixed, self.kv_window, self.kv_window_per_token, self.kv_waste
        )


class Kv(msgspec.Struct, frozen=True, gc=False):
    """What a row of a model takes, see `Model`; `waste` are the bytes of padding that a batch may have at any rate."""

    per_token: int
    step: int = 1
    fixed: int = 0
    window: int = 0
    window_per_token: int = 0
    waste: int = WASTE_MOST


class Counts(Part, frozen=True, gc=False):
    """What the engine's gate was asked and said, and what was done, since that process started: `forwards` are prefills
    and joins, each of which follows a check; `failures` are requests that ended in a fault of the engine, `sheds` those
    that it ended because the agent found it over its cap, `evictions` idle models that made room, `shrinks` chunks that
    were made smaller to fit, `preemptions` requests that gave way to older ones and came back, `overs` forwards after
    which it found itself over its cap, `departures` models that left because nobody had used them for long."""

    checks: Natural = 0
    refusals: Natural = 0
    forwards: Natural = 0
    steps: Natural = 0
    failures: Natural = 0
    sheds: Natural = 0
    evictions: Natural = 0
    shrinks: Natural = 0
    preemptions: Natural = 0
    overs: Natural = 0
    departures: Natural = 0


class CacheState(Part, frozen=True, gc=False):
    """The engine's prefix cache, since that process started: what it holds, how often it served and with how many
    prompt tokens, what was stored and evicted. `evicted` are the prompt hashes (`Admitted.prompt_hash`) of the newest
    evictions; the last of them has the number `evictions`."""

    nbytes: Size = 0
    entries: Natural = 0
    hits: Natural = 0
    hit_tokens: Natural = 0
    stores: Natural = 0
    evictions: Natural = 0
    evicted: Annotated[tuple[Blob, ...], Meta(max_length=MAX_ITEMS)] = ()


class EngineState(Part, frozen=True, array_like=True, gc=False):
    """The engine child as its agent sees it: `starting`, `ready`, `hung`, `restarting` or `failed`, and why. It
    died `restarts` times; `recycles` times it was replaced in good health, because the memory of unloaded models did
    not come back. At most `rows` decode at once and more wait; 0 from a node that does not say. MLX may keep `wired`
    bytes wired; 0: none. `leaked` are the bytes that ended engines have left wired: only a restart of the machine frees
    them."""

    kind: Word = ""
    state: Word = "starting"
    cause: Text = ""
    restarts: Natural = 0
    running: Natural = 0
    waiting: Natural = 0
    queued_tokens: Natural = 0
    counts: Counts = Counts()
    cache: CacheState = CacheState()
    recycles: Natural = 0
    rows: Natural = 0
    wired: Size = 0
    leaked: Difference = 0


class System(Part, frozen=True, array_like=True, gc=False):
    """The machine as the agent reads it; None is unknown. `available` is what can be had without pushing anyone out,
    `pressure` the system's own word (`normal`, `warn`, `critical`, or empty: not told), `source` names where they come
    from, `age` is theirs when the report was written. `worker` is the footprint of this node's video process."""

    available: Size | None = None
    pressure: Word = ""
    source: Word = ""
    age: Seconds = 0.0
    worker: Size = 0


class Sharing(Part, frozen=True, array_like=True, gc=False):
    """Whether the owner's Mac takes work now. `when` is the node's rule (`always`, `plugged-in`, `idle`, `hours`),
    empty from a node that cannot be paused. `paused`: it takes nothing new, because of `why`, until `until` (Unix
    seconds by its own clock; None: nobody can say). `by_hand`: a person paused it, not the rule."""

    when: Word = ""
    paused: bool = False
    why: Text = ""
    until: Real | None = None
    by_hand: bool = False


class Enforcement(Part, frozen=True, array_like=True, gc=False):
    """What the agent holds its engine to, from outside: `phys` is its own reading of that process, `highest` and
    `interval` the kernel's high-water marks of it (ever, and since they were last reset), which judge nobody.

    `cap_bound_by` is the term that settled the cap, `remedy` what a person can do about the term that binds now,
    `warnings` what makes this node less safe than it could be. Counts are the agent's, and outlive the engine:
    `over_caps` times that it was found over its cap, `kills` that it was ended for it."""

    level: Natural = Level.UNKNOWN
    phys: Size | None = None
    highest: Size | None = None
    interval: Size | None = None
    cap_bound_by: Word = ""
    remedy: Text = ""
    tier: Word = ""
    warnings: Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)] = ()
    polls: Natural = 0
    over_caps: Natural = 0
    kills: Natural = 0
