"""All settings of a node, and the checks that types cannot express.

`resolve_settings` raises an error with the key for an invalid value, before any process is started.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from host.settings_loader import Flat, ResolvedSettings, Section, SettingsError, resolve_layers
from node.engine.memory.wired_limit import WireMode
from node.engine.process.kinds import KINDS
from node.memory.cap import CUSTOM, TIERS
from node.settings.agent import AgentSettings, SharingSettings, WorkerSettings
from node.settings.engine import AUTO, EngineSettings, MemorySettings, ModelSettings
from node.sharing.policy import ShareWhen, parse_hours
from wire.identity import is_valid_id, is_valid_model, is_valid_name
from wire.models.kind import ModelKind
from wire.units import parse_size

MAX_BYTES: Final = 2**60
"""Maximum of a size in bytes, because sums of a few sizes must stay within the 64 bits of a frame's integers."""


class NodeSettings(Section, frozen=True):
    """All settings of a node, by section of config.toml."""

    memory: MemorySettings = MemorySettings()
    engine: EngineSettings = EngineSettings()
    models: ModelSettings = ModelSettings()
    node: AgentSettings = AgentSettings()
    sharing: SharingSettings = SharingSettings()
    worker: WorkerSettings = WorkerSettings()


SECTIONS = frozenset(field.name for field in msgspec.structs.fields(NodeSettings))
"""Sections of the node. The coordinator skips them, and passes them to its local node."""
COORDINATOR_SECTIONS = frozenset({"alerts", "cache", "cluster", "http", "hub", "router", "video"})
"""Sections of the coordinator in the same config.toml, which the node skips."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "memory.guard": ("on", "off"),
    "memory.tier": tuple(TIERS),
    "memory.wire": tuple(wire.value for wire in WireMode),
    "engine.kind": tuple(KINDS),
    "engine.mlx.blas": ("auto", "bundled"),
    "models.profile": ("auto", "off"),
    "engine.scripted.text": ("words", "echo", "clock"),
    "sharing.when": tuple(when.value for when in ShareWhen),
    "node.stay_awake": ("busy", "always", "never"),
    "node.log_level": ("debug", "info", "warning", "error"),
}
_SIZES = (
    "memory.cap",
    "memory.margin",
    "memory.reserve",
    "engine.mlx.prefix_cache_size",
    "engine.mlx.disk_cache_size",
    "engine.scripted.memory",
    "engine.scripted.metal",
    "engine.scripted.weights",
)
_CACHES = ("engine.mlx.prefix_cache_size", "engine.mlx.disk_cache_size")
_AUTOMATIC = frozenset({"memory.cap", "memory.margin", "memory.reserve", *_CACHES})
_SWITCHED = frozenset({"memory.reserve", *_CACHES})
_RELATIVE = frozenset({"memory.cap"})
_FORMS: dict[str, tuple[Callable[[str], object], str]] = {
    "node.name": (is_valid_name, "1 to 63 letters, digits, spaces, dots, dashes or underscores"),
    "node.machine": (is_valid_id, "1 to 64 letters, digits or dashes"),
    "models.huggingface_cache": (re.compile("[/~]").match, "an absolute path"),
}


def resolve_settings(
    layers: Sequence[tuple[str, Flat]], others: frozenset[str] = frozenset()
) -> ResolvedSettings[NodeSettings]:
    """Merge layers of values into the settings of a node, set the tier of an explicit cap, and check all values.

    `layers` are pairs of origin and values by key, lowest precedence first. `others` are sections to skip. Raise
    `SettingsError` with the key for an unknown key or an invalid value.
    """
    resolved = resolve_layers(NodeSettings, layers, others)
    settings = apply_custom_tier(resolved.value, resolved.origins)
    check_settings(settings)
    return ResolvedSettings(settings, resolved.origins)


def apply_custom_tier(settings: NodeSettings, origins: Mapping[str, str]) -> NodeSettings:
    """Return the settings with the tier `custom` if the cap is explicit and no tier is set.

    Raise `SettingsError` if cap and tier are set and contradict each other, or for the tier `custom` without a cap.
    """
    memory, tier_from = settings.memory, origins.get("memory.tier")
    if memory.cap == AUTO:
        if memory.tier == CUSTOM:
            raise SettingsError(
                f"setting memory.tier ({tier_from or 'value'}): custom needs memory.cap: set it, or "
                "choose safe, balanced or aggressive"
            )
        return settings
    if tier_from is not None and memory.tier in TIERS and memory.tier != CUSTOM:
        raise SettingsError(
            f"setting memory.tier ({tier_from}): {memory.tier} contradicts memory.cap = {memory.cap} "
            f"({origins.get('memory.cap', 'value')}), because an explicit cap has no reserve: remove memory.tier, "
            "set it to custom, or remove memory.cap"
        )
    return replace(settings, memory=replace(memory, tier=CUSTOM)) if tier_from is None else settings


def check_settings(settings: NodeSettings) -> None:
    """Check values that their types cannot restrict. Raise `SettingsError` with the key for an invalid value."""
    for key, choices in _CHOICES.items():
        value = _get_value(settings, key)
        if value not in choices:
            raise SettingsError(f"setting {key}: {value!r} is not one of {', '.join(choices)}")
    for key in _SIZES:
        _check_size(key, _get_value(settings, key))
    for key, (valid, form) in _FORMS.items():
        value = str(_get_value(settings, key))
        if value and not valid(value):
            raise SettingsError(f"setting {key}: {value!r} is not {form}")
    _check_hours(settings.sharing)
    _check_battery(settings.sharing)
    _check_kinds(settings.models)
    if settings.engine.scripted.reranks and settings.engine.scripted.dimensions:
        raise SettingsError("settings engine.scripted.reranks and engine.scripted.dimensions: set one of them only")
    if not is_valid_model(settings.engine.scripted.model):
        raise SettingsError("setting engine.scripted.model: a name has 1 to 200 letters, digits, spaces or ._:/@+()-")


def _check_kinds(models: ModelSettings) -> None:
    try:
        unnamed = not all(map(is_valid_model, models.get_kinds()))
    except ValueError:
        unnamed = True
    if unnamed:
        kinds = " or ".join(f"NAME={kind}" for kind in ModelKind)
        raise SettingsError(f"setting models.kinds: an entry is not {kinds}: {', '.join(models.kinds)}")


def _check_hours(sharing: SharingSettings) -> None:
    if not sharing.hours and sharing.when != ShareWhen.HOURS:
        return
    try:
        parse_hours(sharing.hours)
    except ValueError as error:
        raise SettingsError(f"setting sharing.hours: {error}") from None


def _check_battery(sharing: SharingSettings) -> None:
    if sharing.min_battery_percent and sharing.when == ShareWhen.PLUGGED_IN:
        raise SettingsError(
            f"setting sharing.min_battery_percent: {sharing.min_battery_percent} % contradicts sharing.when = "
            '"plugged-in", which accepts no work on battery: remove one of them'
        )


def _check_size(key: str, value: object) -> None:
    assert isinstance(value, str | int)  # noqa: S101  the table above names sizes only
    if (value == AUTO and key in _AUTOMATIC) or (value == "off" and key in _SWITCHED):
        return
    try:
        size = parse_size(value, total=2**40 if key in _RELATIVE else None)
    except ValueError as error:
        raise SettingsError(f"setting {key}: {error}") from None
    if size > MAX_BYTES:
        raise SettingsError(f"setting {key}: {value} is more than any machine has: lower it")
    if size == 0 and key == "memory.cap":
        raise SettingsError(
            'setting memory.cap: the cap cannot be 0: to switch the guard off, set memory.guard = "off"'
        )


def _get_value(settings: NodeSettings, key: str) -> object:
    value: object = settings
    for name in key.split("."):
        value = getattr(value, name)
    return value


def choose_node_name(settings: NodeSettings, host: str) -> str:
    """Return the display name of the node: the setting `node.name`, or else the host name, or else `node`.

    `host` is the host name. Its unsafe characters are replaced by hyphens.
    """
    if settings.node.name:
        return settings.node.name
    plain = re.sub(r"[^A-Za-z0-9 ._-]+", "-", host.removesuffix(".local"))[:63].strip(" ._-")
    return plain if is_valid_name(plain) else "node"
