"""Scenario files (TOML): models, Macs, load and faults. Parsed and validated here.

Every error names its location and the valid values. Sizes are texts such as "16GiB", times are seconds, lengths are
tokens.
"""

import math
import tomllib
from collections.abc import Collection, Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from coordinator.simulation.hardware import CHIPS
from host.settings_loader import SettingsError
from wire.units import parse_size

MAX_NODES = 20_000
Positive = Annotated[float, Meta(gt=0)]
NotNegative = Annotated[float, Meta(ge=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=MAX_NODES)]
Tokens = Annotated[int, Meta(ge=1, le=10_000_000)]
Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9.-]{0,40}\Z")]


class ScenarioError(ValueError):
    """The file cannot be simulated. The text has location and reason."""


class _StrictTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base: an unknown key is an error."""


class ModelSpec(_StrictTable, frozen=True):
    """A model.

    `active`: billions of active parameters per token, which scale the speeds. `usual`: the output tokens that nodes
    report to the router as expected.
    """

    name: Name
    weights: str
    kv_per_token: str
    active: Positive
    context: Tokens = 32_768
    usual: Tokens = 256
    transient: str = "256MiB"


class NodeSpec(_StrictTable, frozen=True):
    """Macs of one kind: `name`, or `name-1`, `name-2`… for several.

    `models` are the models on disk (default: all), `loaded` those in memory at the start.
    """

    name: Name
    chip: str
    memory: str
    count: Count = 1
    models: tuple[Name, ...] = ()
    loaded: tuple[Name, ...] = ()
    batch: Count = 32
    disk: str = "3GB"

    def names(self) -> list[str]:
        """Return the name of each Mac."""
        return [self.name] if self.count == 1 else [f"{self.name}-{number}" for number in range(1, self.count + 1)]


class Lengths(_StrictTable, frozen=True):
    """Lognormal distribution: half are above `median`; `sigma` is that of the logarithm; cut at `least` and `most`."""

    median: Positive
    sigma: NotNegative = 1.0
    least: NotNegative = 1.0
    most: Positive = 60_000.0


class LoadSpec(_StrictTable, frozen=True):
    """Load of one client group.

    The pace is one of three: `rate` (conversations a second), `share` of the total prefill speed of all nodes, or the
    times of a `trace`. A trace has JSON lines with `at`, `prompt`, `output` and optionally `session`.

    A conversation has `turns` on average, each `think` seconds after the previous answer. Its prompts grow by the
    earlier turns. With `bursts`, that many conversations begin at the same moment.
    """

    model: Name
    key: Name = "all"
    rate: NotNegative = 0.0
    share: NotNegative = 0.0
    trace: str = ""
    prompt: Lengths = Lengths(median=1000.0)
    output: Lengths = Lengths(median=180.0, sigma=0.8, least=10.0, most=2000.0)
    max_tokens: Tokens | None = None
    turns: Annotated[float, Meta(ge=1)] = 1.0
    think: Lengths = Lengths(median=20.0, sigma=0.7, least=1.0, most=300.0)
    bursts: Count = 1
    begins: NotNegative = 0.0
    ends: Positive | None = None


class EventSpec(_StrictTable, frozen=True):
    """Event of a node at a moment, for `seconds`.

    The node `dies` (process and link), falls `silent` (link and reports stall), or grants a `lease` of `size` to a
    video.
    """

    at: NotNegative
    node: str
    does: Literal["dies", "silent", "lease"]
    seconds: Positive = 30.0
    size: str = "0"


class Scenario(_StrictTable, frozen=True):
    """A complete scenario.

    Requests arrive for `seconds`; then the simulation runs until all have ended. `latency` is the one-way delay of the
    link. `report_loss` is the share of lost reports.
    """

    about: str
    seconds: Positive
    models: Annotated[tuple[ModelSpec, ...], Meta(min_length=1)]
    nodes: Annotated[tuple[NodeSpec, ...], Meta(min_length=1)]
    load: Annotated[tuple[LoadSpec, ...], Meta(min_length=1)]
    events: tuple[EventSpec, ...] = ()
    report_seconds: Positive = 0.5
    report_loss: Share = 0.0
    latency: NotNegative = 0.002
    queue_timeout_seconds: Positive = 30.0
    queue_limit: Annotated[int, Meta(ge=0)] = 0
    policies: tuple[str, ...] = ()
    seed: int = 1

    def model(self, name: str) -> ModelSpec:
        """Return a model by name. A validated scenario has it."""
        return next(model for model in self.models if model.name == name)

    def node_names(self) -> list[str]:
        """Return every Mac's name."""
        return [name for node in self.nodes for name in node.names()]


def read(text: str) -> Scenario:
    """Parse and validate a scenario. Raise `ScenarioError` with location and reason."""
    try:
        scenario = msgspec.convert(tomllib.loads(text), Scenario)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"the file is not valid TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise ScenarioError(str(error)) from None
    _check(scenario)
    return scenario


def _check(scenario: Scenario) -> None:
    names = scenario.node_names()
    _once("node", names)
    _once("model", [model.name for model in scenario.models])
    if len(names) > MAX_NODES:
        raise ScenarioError(f"the scenario has {len(names)} nodes, the maximum is {MAX_NODES}")
    known = {model.name for model in scenario.models}
    for model in scenario.models:
        _size(f"models.{model.name}.weights", model.weights)
        _size(f"models.{model.name}.kv_per_token", model.kv_per_token)
        _size(f"models.{model.name}.transient", model.transient)
    for node in scenario.nodes:
        _check_node(node, known)
    for number, load in enumerate(scenario.load, 1):
        _check_load(f"load {number}", load, known)
    for event in scenario.events:
        if event.node not in names:
            raise ScenarioError(f"event at {event.at:g} s: there is no node {event.node!r} among the {len(names)}")
        _size(f"event at {event.at:g} s: size", event.size)


def _once(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ScenarioError(f"the {what} {name} occurs twice")
        seen.add(name)


def _check_node(node: NodeSpec, known: Collection[str]) -> None:
    if node.chip not in CHIPS:
        raise ScenarioError(f"node {node.name}: chip {node.chip!r} is not one of {', '.join(CHIPS)}")
    _size(f"node {node.name}: memory", node.memory)
    _size(f"node {node.name}: disk", node.disk)
    for model in (*node.models, *node.loaded):
        if model not in known:
            raise ScenarioError(f"node {node.name}: there is no model {model!r}, only {', '.join(sorted(known))}")


def _check_load(where: str, load: LoadSpec, known: Collection[str]) -> None:
    if load.model not in known:
        raise ScenarioError(f"{where}: there is no model {load.model!r}, only {', '.join(sorted(known))}")
    paces = [load.rate > 0, load.share > 0, bool(load.trace)]
    if sum(paces) != 1:
        raise ScenarioError(f"{where}: {sum(paces)} of rate, share and trace are given, exactly one is needed")
    for name, lengths in (("prompt", load.prompt), ("output", load.output), ("think", load.think)):
        if lengths.least > lengths.most:
            raise ScenarioError(f"{where}: {name} has least {lengths.least:g} above most {lengths.most:g}")


def _size(where: str, text: str) -> int:
    try:
        return parse_size(text)
    except (SettingsError, ValueError) as error:
        raise ScenarioError(f"{where}: {error}") from None


def whole(value: float) -> int:
    """Convert a length to whole tokens."""
    return max(1, math.floor(value))
