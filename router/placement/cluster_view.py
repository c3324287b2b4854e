"""The cluster as the router sees it when it decides: one immutable picture, rebuilt at every report.

A report is what a node says of itself, so it may be wrong. `view_of` turns it into numbers that the arithmetic of
placement can stand: no NaN, no infinity, nothing negative. A lie never makes a node look roomier than an honest report
could: an impossible footprint reads as unreadable (nothing is placed there), a model with an impossible size is left
out. The node's own gate remains the judge of what runs. Texts are bounded and printable: people read them in terminals.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
from msgspec.structs import replace

from wire.capacity.arithmetic import headroom, occupied
from wire.frames import Report
from wire.identity import NodeId, valid_model, valid_name
from wire.report import CacheState, Counts, Enforcement, EngineState, Group, Level, Memory, Model, Sharing, System
from wire.video import LeaseState, VideoPackage, VideoState

LEFT = "left"
"""The state of a member that was removed or said goodbye for good."""
FRESH_SECONDS = 3.0
"""A report older than this places nothing: three idle heartbeats, the time after which a node is suspect."""
UNMEASURED_PREFILL = 200.0
"""Tokens per second of a node that has not measured its prefill: slow, so that measured nodes go first."""
UNMEASURED_DECODE = 20.0
UNMEASURED_RATIO = 4.0
"""Bytes of request text per prompt token until the node has measured it: English prose."""
LONGEST_CONTEXT = 100_000_000
LONGEST_LOAD = 600.0
LATEST = 2.0**33
"""Unix seconds until which a pause may last: the year 2242."""
MOST_EXPECTED = 32_768
MOST_MODELS = 512
"""Models of one node that are looked at."""
LONGEST_TEXT = 300
MOST_BYTES = 2**60
"""A sum of a few sizes must stay an integer of 64 bits."""
MOST_EVICTED, MOST_HASH = 64, 32
"""Evictions of a node's prefix cache that are looked at, and bytes of the hash of each."""
MOST_WARNINGS = 8
MOST_PREFIXES = 3
"""Parts before a model's name that may be taken off: `openrouter/qwen/MODEL` has two."""
MOST_STEP = 65_536
MOST_PACKAGES, MOST_LEASES = 64, 16
MOST_SIDE, MOST_FRAMES, MOST_FPS = 1024, 64, 1000
_LEASE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_RATIOS = (0.25, 64.0)


@dataclass(frozen=True)
class NodeView:
    """One node. `heard_at` is when its newest report came (monotonic seconds), `epoch` counts its links."""

    id: NodeId
    name: str
    state: str
    cordoned: bool = False
    heard_at: float = 0.0
    epoch: int = 0
    memory: Memory = field(default_factory=Memory)
    engine: EngineState = field(default_factory=EngineState)
    models: Mapping[str, Model] = field(default_factory=dict[str, Model])
    acked_seq: int = 0
    draining: bool = False
    system: System = field(default_factory=System)
    enforcement: Enforcement = field(default_factory=Enforcement)
    labels: frozenset[str] = frozenset()
    video: VideoState = field(default_factory=VideoState)
    video_allowed: bool = False
    """Whether an administrator allows it to make videos."""
    sharing: Sharing = field(default_factory=Sharing)

    @cached_property
    def room(self) -> int | None:
        """Its headroom in bytes, by its report alone; None where its memory cannot be read."""
        memory = self.memory
        return headroom(memory.ceiling, memory.margin, occupied(memory), memory.reserved)

    @property
    def life(self) -> int:
        """A number that changes when its engine is another process."""
        return hash((self.epoch, self.engine.restarts, self.engine.recycles))

    def reads(self, model: Model) -> bool:
        """Whether this node is reading a model in, so that its report counts the weights. Loads go one by one: of
        several nobody knows which has begun."""
        return model.loading and not any(one.loading and one.name != model.name for one in self.models.values())


@dataclass(frozen=True, slots=True)
class Identity:
    """What one name stands for: the `fingerprint` that new requests go to, and how many members hold each
    fingerprint."""

    fingerprint: str = ""
    holders: Mapping[str, int] = field(default_factory=dict[str, int])

    @property
    def conflict(self) -> bool:
        """Whether members hold different models under this name."""
        return len(self.holders) > 1


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Every member, also those that sleep or are lost: they count for "could ever fit"."""

    nodes: tuple[NodeView, ...] = ()
    _identities: dict[str, Identity] = field(default_factory=dict[str, Identity], init=False, repr=False, compare=False)

    def identity(self, name: str) -> Identity:
        """Return what a name stands for. Of several fingerprints the one that most members hold is served, of equals
        the lexicographically smallest; one that no member can serve now gives way to one that some member can.

        Sleeping members count, so that the choice changes only when the last member that can serve it goes
        (docs/decisions/0020-one-name-one-model.md)."""
        found = self._identities.get(name)
        if found is None:
            found = self._identities[name] = _identity(self.nodes, name)
        return found

    def canonical_name(self, name: str) -> str:
        """Return the model that a client means: of this name, else of the same but for its case, else of the name
        without a provider before it (`openai/`). A name that nothing has is returned as it is."""
        if any(name in node.models for node in self.nodes):
            return name
        folded = {known.casefold(): known for known in sorted(self.models(), reverse=True)}
        parts = name.casefold().split("/", MOST_PREFIXES)
        tails = ("/".join(parts[at:]) for at in range(len(parts)))
        return next((folded[tail] for tail in tails if tail in folded), name)

    def conflicts(self) -> list[str]:
        """List the names under which members hold different models."""
        return sorted(name for name in self.served() if self.identity(name).conflict)

    def models(self) -> dict[str, Model]:
        """Return every model that some member knows, by name; of several the one that is served."""
        return self._of_names(lambda _: True)

    def served(self) -> dict[str, Model]:
        """Return every model that some member has loaded or can load, by name; of several the one that is served."""
        return self._of_names(lambda model: not model.cause)

    def loaded(self) -> dict[str, Model]:
        """Return every model that some member has loaded, by name; of several the one that is served."""
        return self._of_names(lambda model: model.loaded)

    def _of_names(self, counts: Callable[[Model], bool]) -> dict[str, Model]:
        found: dict[str, Model] = {}
        for node in self.nodes:
            for name, model in node.models.items():
                if counts(model) and (name not in found or model.fingerprint == self.identity(name).fingerprint):
                    found[name] = model
        return found

    def node(self, node: NodeId) -> NodeView | None:
        """Give one node, None when it is not a member."""
        return next((seen for seen in self.nodes if seen.id == node), None)


def _identity(nodes: tuple[NodeView, ...], name: str) -> Identity:
    holders: dict[str, int] = {}
    able: set[str] = set()
    for node in nodes:
        model = node.models.get(name)
        if model is not None and not model.cause and node.state != LEFT:
            holders[model.fingerprint] = holders.get(model.fingerprint, 0) + 1
            if _serves(node):
                able.add(model.fingerprint)
    chosen = min(able or holders, key=lambda one: (not one, -holders[one], one), default="")
    return Identity(chosen, holders)


def _serves(node: NodeView) -> bool:
    """Return whether a node takes new requests, now or after a hiccup of a few seconds."""
    return node.state in ("ready", "suspect") and not (node.cordoned or node.draining or node.engine.state == "failed")


def seen_as(node: NodeView, state: str) -> NodeView:
    """Give a node in another state."""
    return dataclasses.replace(node, state=state)


def view_of(
    report: Report,
    *,
    node: NodeId,
    name: str,
    state: str,
    heard_at: float,
    cordoned: bool = False,
    epoch: int = 0,
    labels: frozenset[str] = frozenset(),
    video_allowed: bool = False,
) -> NodeView:
    """Make a node's view from its report and what membership knows of it."""
    return NodeView(
        id=node,
        name=name if valid_name(name) else str(node),
        state=state,
        cordoned=cordoned,
        heard_at=heard_at,
        epoch=epoch,
        memory=honest_memory(report.memory),
        engine=_honest_engine(report.engine),
        models=_honest_models(report.models),
        acked_seq=max(0, report.acked_seq),
        draining=report.draining,
        system=_honest_system(report.system),
        enforcement=_honest_enforcement(report.enforcement),
        labels=labels,
        video_allowed=video_allowed,
        video=honest_video(report.video),
        sharing=_honest_sharing(report.sharing),
    )


def honest_video(video: VideoState) -> VideoState:
    """Give what a node says of its video without what cannot be."""
    packages = tuple(_honest_package(one) for one in video.packages[:MOST_PACKAGES] if _possible_package(one))
    leases = tuple(_honest_lease(one) for one in video.leases[:MOST_LEASES] if _LEASE_NAME.fullmatch(one.lease))
    ray = video.ray if _LEASE_NAME.fullmatch(video.ray) else ""
    return VideoState(
        video.ready, _printable(video.cause), ray, packages, leases, _printable(video.ray_cause), video.allowed
    )  # fmt: skip


def _possible_package(package: VideoPackage) -> bool:
    return (
        valid_model(package.name)
        and 8 <= package.token_side <= MOST_SIDE
        and 1 <= package.token_frames <= MOST_FRAMES
        and 1 <= package.fps <= MOST_FPS
        and all(0 <= size <= MOST_BYTES for size in (package.weights, package.expert))
    )


def _honest_package(package: VideoPackage) -> VideoPackage:
    return replace(
        package, engine=_printable(package.engine)[:40], pipeline=_printable(package.pipeline),
        fingerprint=_printable(package.fingerprint), cause=_printable(package.cause), bits=max(0, package.bits),
    )  # fmt: skip


def _honest_lease(lease: LeaseState) -> LeaseState:
    return replace(
        lease, job=_printable(lease.job), phase=_printable(lease.phase)[:40], size=max(0, lease.size),
        progress=min(100, max(0, lease.progress)), step=max(0, lease.step), steps=max(0, lease.steps),
        footprint=max(0, lease.footprint), peak=max(0, min(lease.peak, MOST_BYTES)),
    )  # fmt: skip


def honest_memory(memory: Memory) -> Memory:
    """Give the reading without impossible numbers; a negative footprint is one that could not be read."""
    phys = memory.phys
    return replace(
        memory,
        cap=max(0, memory.cap),
        ceiling=max(0, memory.ceiling),
        margin=max(0, memory.margin),
        phys=None if phys is None or phys < 0 else phys,
        active=max(0, memory.active),
        recent=max(0, memory.recent),
        reserved=max(0, memory.reserved),
        leases=max(0, memory.leases),
        age=_bounded(memory.age, 0.0, LONGEST_LOAD, 0.0),
        total=max(0, memory.total),
        base=max(0, memory.base),
        reusable=max(0, min(memory.reusable, memory.active)),
        cache=max(0, memory.cache),
        peak=max(0, memory.peak),
        current=_size(memory.current),
        canary=max(0, memory.canary),
        bound_by=_printable(memory.bound_by),
        source=_printable(memory.source),
    )


def _honest_engine(engine: EngineState) -> EngineState:
    return replace(
        engine,
        kind=_printable(engine.kind),
        state=_printable(engine.state),
        cause=_printable(engine.cause),
        restarts=max(0, engine.restarts),
        recycles=max(0, engine.recycles),
        leaked=max(0, engine.leaked),
        running=max(0, engine.running),
        waiting=max(0, engine.waiting),
        queued_tokens=max(0, engine.queued_tokens),
        rows=max(0, engine.rows),
        wired=max(0, engine.wired),
        counts=Counts(*(max(0, count) for count in msgspec.structs.astuple(engine.counts))),
        cache=_honest_cache(engine.cache),
    )


def _honest_cache(cache: CacheState) -> CacheState:
    evicted = tuple(one[:MOST_HASH] for one in cache.evicted[-MOST_EVICTED:])
    return CacheState(
        nbytes=max(0, cache.nbytes),
        entries=max(0, cache.entries),
        hits=max(0, cache.hits),
        hit_tokens=max(0, cache.hit_tokens),
        stores=max(0, cache.stores),
        evictions=max(0, cache.evictions),
        evicted=evicted,
    )


def _honest_system(system: System) -> System:
    return System(
        _size(system.available), _printable(system.pressure), _printable(system.source),
        _bounded(system.age, 0.0, LONGEST_LOAD, 0.0), max(0, system.worker),
    )  # fmt: skip


def _honest_enforcement(one: Enforcement) -> Enforcement:
    return Enforcement(
        one.level if one.level in tuple(Level) else Level.UNKNOWN, _size(one.phys), _size(one.highest),
        _size(one.interval), _printable(one.cap_bound_by), _printable(one.remedy), _printable(one.tier),
        tuple(_printable(text) for text in one.warnings[:MOST_WARNINGS]), max(0, one.polls), max(0, one.over_caps),
        max(0, one.kills),
    )  # fmt: skip


def _honest_sharing(one: Sharing) -> Sharing:
    until = None if one.until is None else _bounded(one.until, 0.0, LATEST, 0.0)
    return Sharing(_printable(one.when)[:20], one.paused, _printable(one.why), until or None, one.by_hand)


def _size(size: int | None) -> int | None:
    return None if size is None or size < 0 else size


def _printable(text: str) -> str:
    """Take the sting out of a node's words: no control characters, no escape sequences, no endless text."""
    text = text[:LONGEST_TEXT]
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


def _honest_models(models: tuple[Model, ...]) -> dict[str, Model]:
    return {model.name: _honest_model(model) for model in reversed(models[:MOST_MODELS]) if _possible_model(model)}


def _possible_model(model: Model) -> bool:
    sizes = (model.weights, model.kv_per_token, model.transient, model.kv_fixed, model.kv_window, model.kv_waste,
             model.kv_window_per_token, *msgspec.structs.astuple(model.forward))  # fmt: skip
    possible = all(0 <= size <= MOST_BYTES for size in sizes)
    return valid_model(model.name) and possible and 1 <= model.kv_step <= MOST_STEP


def _honest_model(model: Model) -> Model:
    return replace(
        model,
        context=min(max(0, model.context), LONGEST_CONTEXT),
        load_seconds=_bounded(model.load_seconds, 0.0, LONGEST_LOAD, 0.0),
        prefill_speed=_speed(model.prefill_speed, UNMEASURED_PREFILL),
        decode_speed=_speed(model.decode_speed, UNMEASURED_DECODE),
        bytes_per_token=_bounded(model.bytes_per_token, *_RATIOS, UNMEASURED_RATIO),
        groups=tuple(group for group in model.groups if _possible(group)),
        expected_output=min(model.expected_output, MOST_EXPECTED) if model.expected_output > 0 else 256,
        loading=model.loading and not model.loaded,
        progress=_bounded(model.progress, 0.0, 1.0, 0.0) if model.loading and not model.loaded else 0.0,
        cause="" if model.loaded else _printable(model.cause),
    )


def _possible(group: Group) -> bool:
    return group.rows > 0 and group.longest >= 0


def _speed(speed: float, unmeasured: float) -> float:
    return speed if math.isfinite(speed) and speed > 0 else unmeasured


def _bounded(value: float, least: float, most: float, otherwise: float) -> float:
    return value if least <= value <= most else otherwise
