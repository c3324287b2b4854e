"""Scenario files (TOML) of the simulation: models, Macs, load and faults, with their parser and checks.

Every error names its location and the valid values. Sizes are texts such as "16GiB", times are seconds, lengths are
tokens.
"""

import math
import tomllib
from collections.abc import Collection, Iterable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from host.settings_loader import SettingsError
from router.placement.cluster_view import MAX_REPORT_AGE_SECONDS
from simulation.mac.hardware import CHIPS
from wire.units import parse_size

MAX_NODES = 20_000
"""Maximum Macs of a scenario, and maximum of every field of type `Count`."""
MAX_NUMBER = 1e9
"""Maximum of every field of type `Positive` or `NotNegative`."""
Positive = Annotated[float, Meta(gt=0, le=MAX_NUMBER)]
NotNegative = Annotated[float, Meta(ge=0, le=MAX_NUMBER)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1, le=MAX_NODES)]
Tokens = Annotated[int, Meta(ge=1, le=10_000_000)]
Name = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9][A-Za-z0-9.-]{0,40}\Z")]


class ScenarioError(ValueError):
    """Raised for a scenario or trace that is invalid or cannot be read, and for an unknown policy.

    The text has the reason, and the location in a scenario or trace.
    """


class _StrictTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class of tables, in which an unknown key is an error."""


class ModelSpec(_StrictTable, frozen=True):
    """A model of the simulated pool."""

    name: Name
    weights: str
    """Size of the weights with its unit, such as `17GB`."""
    kv_per_token: str
    """Size of the KV cache of one token with its unit, such as `96KiB`."""
    active: Positive
    """Active parameters per token in billions, which scale the speeds."""
    context: Tokens = 32_768
    """Maximum tokens of prompt and answer together."""
    usual: Tokens = 256
    """Output tokens that nodes report to the router as expected."""
    transient: str = "256MiB"
    """Transient bytes of a forward pass, as a size with its unit."""


class NodeSpec(_StrictTable, frozen=True):
    """Macs of one kind: one Mac with the name `name`, or several with the names `name-1`, `name-2`…"""

    name: Name
    chip: str
    """Name of the chip, a key of `hardware.CHIPS`."""
    memory: str
    """Size of the RAM with its unit, such as `64GiB`."""
    count: Count = 1
    """Number of Macs of this kind."""
    models: tuple[Name, ...] = ()
    """Names of the models on the disk of each Mac; empty for all models of the scenario."""
    loaded: tuple[Name, ...] = ()
    """Names of the models in memory at the start, which must be on the disk."""
    batch: Count = 32
    """Maximum rows that decode on a node at once."""
    disk: str = "3GB"
    """Bytes that the disk reads per second, as a size above 0."""

    def list_names(self) -> list[str]:
        """Return the names of these Macs."""
        return [self.name] if self.count == 1 else [f"{self.name}-{number}" for number in range(1, self.count + 1)]


class Lengths(_StrictTable, frozen=True):
    """Lognormal distribution of a length in tokens or seconds, limited to the values from `least` to `most`."""

    median: Positive
    """Median, in tokens or seconds."""
    sigma: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """Standard deviation of the logarithm."""
    least: NotNegative = 1.0
    """Minimum, in tokens or seconds."""
    most: Positive = 60_000.0
    """Maximum, in tokens or seconds."""


class LoadSpec(_StrictTable, frozen=True):
    """Load of one group of clients. Exactly one of `rate`, `share` and `trace` sets the pace of conversations."""

    model: Name
    key: Name = "all"
    """Name of the API key of the requests."""
    rate: NotNegative = 0.0
    """Conversations that start per second; 0 with `share` or `trace`."""
    share: NotNegative = 0.0
    """Average tokens per second that turns add to prompts, as a share of all capable nodes' total prefill speed.

    Capable nodes have the model. 0 with `rate` or `trace`. Conversations that end early at the maximum context lower
    the actual share.
    """
    trace: str = ""
    """File of JSON lines with `at` (seconds after `begins`), `prompt`, `output` (tokens) and optionally `session`.

    A line is one request. Requests that would arrive at the end of the scenario or later are ignored. Of the other
    fields, only `model`, `key`, `max_tokens` and `begins` apply to a trace. Empty with `rate` or `share`.
    """
    prompt: Lengths = Lengths(median=1000.0)
    """Tokens that each turn adds to the prompt, which also contains the earlier turns.

    A conversation ends before a turn that would exceed the context of the model; a first turn is shortened instead.
    """
    output: Lengths = Lengths(median=180.0, sigma=0.8, least=10.0, most=2000.0)
    """Tokens of an answer, limited to `max_tokens` and to a quarter of the context of the model."""
    max_tokens: Tokens | None = None
    """Limit of the answer that a request states, in tokens; None if requests state no limit."""
    turns: Annotated[float, Meta(ge=1, le=MAX_NUMBER)] = 1.0
    """Average number of turns of a conversation, without the effect of the maximum context."""
    think: Lengths = Lengths(median=20.0, sigma=0.7, least=1.0, most=300.0)
    """Seconds from an answer to the next turn."""
    bursts: Count = 1
    """Number of conversations that start at the same moment."""
    begins: NotNegative = 0.0
    """Start of the load, in virtual seconds from the start of the scenario."""
    ends: Positive | None = None
    """End of the load, in virtual seconds from the start of the scenario; None for the end of the scenario."""


class EventSpec(_StrictTable, frozen=True):
    """Fault or lease of a node. The event has no effect if the node is down or silent at its start."""

    at: NotNegative
    """Virtual time at which the event starts, in seconds."""
    node: str
    """Name of the Mac on which the event occurs."""
    does: Literal["dies", "silent", "lease"]
    """`dies`: process and link end; the node returns later, without loaded models. `silent`: link and reports stall.

    `lease`: the node grants a lease for a video, if there is room.
    """
    seconds: Positive = 30.0
    size: str = "0"
    """Size of the lease with its unit; without effect for other events."""


class Scenario(_StrictTable, frozen=True):
    """A complete scenario, as in a scenario file."""

    about: str
    """Description in one line."""
    seconds: Positive
    """Duration of arrivals in virtual seconds.

    The simulation then runs until all requests have ended (`cluster.GIVE_UP_SECONDS`).
    """
    models: Annotated[tuple[ModelSpec, ...], Meta(min_length=1)]
    nodes: Annotated[tuple[NodeSpec, ...], Meta(min_length=1)]
    load: Annotated[tuple[LoadSpec, ...], Meta(min_length=1)]
    events: tuple[EventSpec, ...] = ()
    report_seconds: Positive = 0.5
    """Seconds between two reports of a busy node, at most the `MAX_REPORT_AGE_SECONDS` of the router."""
    report_loss: Share = 0.0
    """Share of reports that are lost, 0 to 1."""
    latency: NotNegative = 0.002
    """One-way delay of a link, in seconds."""
    queue_timeout_seconds: Positive = 30.0
    """Maximum wait of a request in the queue of the router, in seconds."""
    queue_limit: Annotated[int, Meta(ge=0)] = 0
    """Maximum queued requests; 0: max(64, 4 × nodes), as with the setting `router.queue_limit`."""
    policies: tuple[str, ...] = ()
    """Names of the policies to compare; empty for all."""
    seed: int = 1
    """Seed for all random choices."""

    def get_model(self, name: str) -> ModelSpec:
        """Return the model with this name. Raise `StopIteration` if the scenario does not have it."""
        return next(model for model in self.models if model.name == name)

    def list_node_names(self) -> list[str]:
        """Return the names of all Macs of the scenario."""
        return [name for node in self.nodes for name in node.list_names()]


def read_scenario(text: str) -> Scenario:
    """Parse and check the TOML text of a scenario. Raise `ScenarioError` if the text is invalid."""
    try:
        scenario = msgspec.convert(tomllib.loads(text), Scenario)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"the file is not valid TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise ScenarioError(str(error)) from None
    _check(scenario)
    return scenario


def _check(scenario: Scenario) -> None:
    names = scenario.list_node_names()
    _check_unique("node", names)
    _check_unique("model", [model.name for model in scenario.models])
    if len(names) > MAX_NODES:
        raise ScenarioError(f"the scenario has {len(names)} nodes, the maximum is {MAX_NODES}")
    if scenario.report_seconds > MAX_REPORT_AGE_SECONDS:
        raise ScenarioError(
            f"report_seconds is {scenario.report_seconds:g}, at most {MAX_REPORT_AGE_SECONDS:g}: the router sends no "
            "request to a node whose last report is older"
        )
    known = {model.name for model in scenario.models}
    for model in scenario.models:
        _parse_size(f"models.{model.name}.weights", model.weights)
        _parse_size(f"models.{model.name}.kv_per_token", model.kv_per_token)
        _parse_size(f"models.{model.name}.transient", model.transient)
    for node in scenario.nodes:
        _check_node(node, known)
    for number, load in enumerate(scenario.load, 1):
        _check_load(f"load {number}", load, known)
    for event in scenario.events:
        if event.node not in names:
            raise ScenarioError(f"event at {event.at:g} s: there is no node {event.node!r} among the {len(names)}")
        _parse_size(f"event at {event.at:g} s: size", event.size)


def _check_unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ScenarioError(f"the {what} {name} occurs twice")
        seen.add(name)


def _check_node(node: NodeSpec, known: Collection[str]) -> None:
    if node.chip not in CHIPS:
        raise ScenarioError(f"node {node.name}: chip {node.chip!r} is not one of {', '.join(CHIPS)}")
    _parse_size(f"node {node.name}: memory", node.memory)
    if not _parse_size(f"node {node.name}: disk", node.disk):
        raise ScenarioError(f"node {node.name}: disk is {node.disk!r} per second, at least 1 byte is needed")
    for model in (*node.models, *node.loaded):
        if model not in known:
            raise ScenarioError(f"node {node.name}: there is no model {model!r}, only {', '.join(sorted(known))}")
    for model in node.loaded:
        if node.models and model not in node.models:
            raise ScenarioError(
                f"node {node.name}: {model!r} is loaded, but not one of its models {', '.join(node.models)}"
            )


def _check_load(where: str, load: LoadSpec, known: Collection[str]) -> None:
    if load.model not in known:
        raise ScenarioError(f"{where}: there is no model {load.model!r}, only {', '.join(sorted(known))}")
    paces = [load.rate > 0, load.share > 0, bool(load.trace)]
    if sum(paces) != 1:
        raise ScenarioError(f"{where}: {sum(paces)} of rate, share and trace are given, exactly one is needed")
    for name, lengths in (("prompt", load.prompt), ("output", load.output), ("think", load.think)):
        if lengths.least > lengths.most:
            raise ScenarioError(f"{where}: {name} has least {lengths.least:g} above most {lengths.most:g}")


def _parse_size(where: str, text: str) -> int:
    try:
        return parse_size(text)
    except (SettingsError, ValueError) as error:
        raise ScenarioError(f"{where}: {error}") from None


def round_to_tokens(value: float) -> int:
    """Round a length (`value`, in tokens) down to whole tokens, at least 1."""
    return max(1, math.floor(value))
