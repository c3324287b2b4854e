"""Settings of a node with their defaults and descriptions, and the checks that types cannot express.

The tree holds values as written by a person ("96GiB", "auto"). `node.memory.cap` resolves sizes for this machine.
`resolve_settings` refuses an impossible value and names its key, before any process is started.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from host.settings_loader import Flat, ResolvedSettings, Section, SettingsError
from host.settings_loader import resolve_layers as resolve_layers
from node.engine.memory.wired_limit import WireMode
from node.engine.process.kinds import KINDS
from node.memory.cap import CUSTOM, TIERS
from node.sharing.policy import ShareWhen, parse_hours
from wire.identity import valid_id, valid_model, valid_name
from wire.units import parse_size

Size = str | int
AUTO: Final = "auto"
MAX_BYTES: Final = 2**60
"""Maximum of a size in bytes, because sums of a few sizes must stay within the 64 bits of a frame's integers."""


class MemorySettings(Section, frozen=True):
    """Settings of the memory that the engine may use (`[memory]`)."""

    cap: Annotated[
        Size,
        Meta(
            description=(
                'Maximum bytes of the engine: "auto" (RAM minus the reserve of memory.tier, at most the Metal '
                'limit), a size such as "96GiB", or a share of the RAM such as "70%".'
            )
        ),
    ] = AUTO
    margin: Annotated[
        Size,
        Meta(
            description=(
                'Bytes kept free for peaks between two readings: "auto" (11.2 % of the cap, 512 MiB to 12 '
                "GiB) or a size. 0 is allowed and reported as a warning while it is set."
            )
        ),
    ] = AUTO
    guard: Annotated[
        str,
        Meta(
            description=(
                '"on", or "off": no request is refused for memory, and the machine may panic. "off" is '
                "reported as a warning while it is set."
            )
        ),
    ] = "on"
    reserve: Annotated[
        Size,
        Meta(
            description=(
                "Bytes of random data that the MLX engine holds as an emergency reserve, released before any "
                'other memory: "auto" (1 % of the cap, at most 256 MiB), a size, or "off".'
            )
        ),
    ] = AUTO
    tier: Annotated[
        str,
        Meta(
            description=(
                "Memory that an automatic cap leaves to the system: safe 12 GiB, balanced 8 GiB, aggressive 6 "
                "GiB; 4 GiB on a machine with less than 24 GiB. custom: memory.cap is required. Every "
                "explicit cap has the tier custom."
            )
        ),
    ] = "balanced"
    wire: Annotated[
        str,
        Meta(
            description=(
                'macOS: memory of the engine that is wired and therefore never paged out: "auto" (weights of '
                '32 GiB or more that exceed 75 % of the Metal limit), "on" (all weights), or "off" (nothing, '
                "also not in the video worker; for a Mac with kernel panics of the GPU memory)."
            )
        ),
    ] = AUTO
    allow_above_metal_limit: Annotated[
        bool,
        Meta(
            description=(
                "Allow an explicit memory.cap above the Metal limit. If the engine exceeds the limit, macOS "
                "ends the process or panics. Reported as a warning while it is set."
            )
        ),
    ] = False


class ScriptedSettings(Section, frozen=True):
    """Settings of the scripted engine: real frames and admission with a simulated model, for tests and benchmarks."""

    model: Annotated[str, Meta(description="Name of the served model.")] = "scripted-1"
    identity: Annotated[
        str,
        Meta(
            description=(
                "Fingerprint of the model, to give two nodes different models under one name. Empty: derived "
                "from the name."
            )
        ),
    ] = ""
    step_ms: Annotated[float, Meta(ge=0, le=60_000, description="Milliseconds between two decode steps.")] = 20
    max_batch_size: Annotated[
        int, Meta(ge=1, le=4096, description="Maximum rows in a decode batch. Further rows wait.")
    ] = 64
    tokens: Annotated[
        int, Meta(ge=1, le=10**6, description=("Tokens of an answer without max_tokens in its request."))
    ] = 16
    text: Annotated[
        str,
        Meta(
            description=(
                'Text of the answers: "words" (fixed words by position), "echo" (the last user message once), '
                'or "clock" (each token is the monotonic time in ns and a space).'
            )
        ),
    ] = "words"
    memory: Annotated[Size, Meta(description="Simulated RAM of the machine.")] = "128GiB"
    metal: Annotated[
        Size,
        Meta(
            description=(
                "Metal limit that the simulated device reports. 0: no report, and the agent estimates the "
                "limit from the RAM."
            )
        ),
    ] = 0
    weights: Annotated[Size, Meta(description="Simulated bytes of the weights.")] = "4GiB"
    kv_per_token: Annotated[int, Meta(ge=0, le=2**26, description="Simulated KV bytes of one token.")] = 131072
    max_context: Annotated[int, Meta(ge=1, le=2**24, description="Maximum tokens of prompt and answer together.")] = (
        32768
    )
    tools: Annotated[bool, Meta(description="Accept tools in requests. The engine never calls one.")] = False
    refuse: Annotated[
        str,
        Meta(
            description=(
                'Requests that the gate refuses for memory: "" none, "*" all, or those whose messages contain '
                "this word."
            )
        ),
    ] = ""
    crash: Annotated[
        str,
        Meta(
            description=(
                "A request whose messages contain this word ends the engine process with a signal at its "
                'first decode step; "" none.'
            )
        ),
    ] = ""
    readings: Annotated[
        str,
        Meta(
            description=(
                "JSON file with readings of the simulated machine in bytes: `reclaimable` (memory that the "
                'system can free) and `wired`; null: unreadable. The file is read at each poll; "" none.'
            )
        ),
    ] = ""


class MlxSettings(Section, frozen=True):
    """Settings of the engine that runs models with MLX (`[engine.mlx]`)."""

    max_batch_size: Annotated[
        int,
        Meta(
            ge=1,
            le=256,
            description=("Maximum rows in a decode batch. Further rows wait. `n` of a request is limited to it."),
        ),
    ] = 32
    prefill_step_size: Annotated[
        int,
        Meta(
            ge=32,
            le=8192,
            description=(
                "Maximum prompt tokens of one forward pass. While other rows decode, passes are shorter, "
                "limited by time."
            ),
        ),
    ] = 2048
    min_prefill_step: Annotated[
        int,
        Meta(
            ge=4,
            le=8192,
            description=(
                "Prompt tokens of the smallest forward pass when memory is short. A request is admitted if a "
                "pass of this size fits at the end of its prompt."
            ),
        ),
    ] = 256
    max_context: Annotated[
        int,
        Meta(ge=0, le=2**24, description=("Maximum tokens of prompt and answer together; 0: the limit of the model.")),
    ] = 0
    max_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=2**20,
            description=("Maximum tokens of an answer without max_tokens in its request. The context also limits it."),
        ),
    ] = 4096
    prefix_cache_size: Annotated[
        Size,
        Meta(
            description=(
                'Maximum bytes of the prefix cache: "auto" (15 % of the cap without the weights), a size such '
                'as "2GiB", or "off". Cached prefixes are evicted before a request is refused for memory.'
            )
        ),
    ] = AUTO
    blas: Annotated[
        str,
        Meta(
            description=(
                'Linux only: "auto" preloads OpenBLAS if it is installed (the bundled library is 26 times '
                'slower); "bundled" does not.'
            )
        ),
    ] = "auto"


class EngineSettings(Section, frozen=True):
    """Settings of the engine: its kind, and a section for each kind (`[engine]`)."""

    kind: Annotated[
        str, Meta(description=('Kind of engine: "mlx" (models), or "scripted" (simulated, for tests).'))
    ] = "mlx"
    mlx: MlxSettings = MlxSettings()
    scripted: ScriptedSettings = ScriptedSettings()


class ModelSettings(Section, frozen=True):
    """Settings of the models that the MLX engine serves (`[models]`).

    A list is written as ["a", "b"] in the file, as a,b in the environment and with --set.
    """

    folders: Annotated[
        tuple[str, ...],
        Meta(description=("Folders that are searched for models, three levels deep. `--models DIR` adds a folder.")),
    ] = ()
    use_huggingface_cache: Annotated[
        bool, Meta(description="Also serve the models of the local Hugging Face cache.")
    ] = True
    profile: Annotated[
        str,
        Meta(
            description=(
                '"auto": measure the memory of a model at its first load on this machine, at most 10 s, and '
                'store the result; "off": estimate it from the config of the model.'
            )
        ),
    ] = "auto"
    trial: Annotated[
        bool,
        Meta(
            description=(
                "Test chat template and tokenizer of each model once in a separate process with limits of "
                "time and memory. This takes about 4 s at the first request for a model."
            )
        ),
    ] = True
    preload: Annotated[
        tuple[str, ...],
        Meta(description=("Models to load at start, in this order. They are never unloaded for other models.")),
    ] = ()
    idle_unload_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=2**31,
            description=(
                "Seconds without a request after which a model is unloaded; 0: never. Preloaded models stay. "
                "The next request loads the model again."
            ),
        ),
    ] = 0.0


class WorkerSettings(Section, frozen=True):
    """Settings of video generation on this node (`[worker]`); `[video]` has those of the coordinator.

    Memory is leased to a worker process for one job at a time.
    """

    enabled: Annotated[
        bool,
        Meta(
            description=(
                "Offer video if the environment is installed (`cluster video install`) and a video package is "
                "present. Otherwise no video process runs."
            )
        ),
    ] = True
    environments: Annotated[
        str,
        Meta(
            description=(
                "Folder of the environments that `cluster video install` creates. Empty: STATE/node/video/environments."
            )
        ),
    ] = ""
    job_timeout_seconds: Annotated[
        float,
        Meta(
            ge=1,
            le=10**6,
            description=("Longest time of a job that sets no other limit. Then its worker is ended."),
        ),
    ] = 7200.0
    stall_timeout_seconds: Annotated[
        float,
        Meta(
            ge=1,
            le=10**6,
            description=("Longest time without a step, a phase or a transformer block. Then the worker is ended."),
        ),
    ] = 300.0
    start_timeout_seconds: Annotated[
        float,
        Meta(
            ge=1,
            le=10**4,
            description=("Longest time that a granted lease waits for its worker. Then the lease is released."),
        ),
    ] = 90.0
    terminate_grace_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=60,
            description=(
                "Seconds between SIGTERM and SIGKILL for a worker. A worker that exceeds its lease gets "
                "SIGKILL at once."
            ),
        ),
    ] = 1.0
    ray_ports: Annotated[
        int,
        Meta(
            ge=1024,
            le=65400,
            description=("First of 60 consecutive loopback ports for the Ray of this node."),
        ),
    ] = 6480
    ray_folder: Annotated[
        str,
        Meta(
            description=(
                "Folder for sockets and logs of Ray. Its path must be short, because macOS limits socket "
                "paths to 103 bytes. Empty: a folder below /tmp."
            )
        ),
    ] = ""


class AgentSettings(Section, frozen=True):
    """Settings of the agent: name, reports, sleep, machine id and log (`[node]`)."""

    name: Annotated[str, Meta(description="Display name of this node. Empty: its host name.")] = ""
    report_busy_seconds: Annotated[
        float, Meta(ge=0.05, le=5, description=("Seconds between two reports while the engine is busy."))
    ] = 0.5
    report_idle_seconds: Annotated[
        float,
        Meta(
            ge=0.05,
            le=5,
            description=(
                "Seconds between two reports while the engine is idle. The coordinator suspects a node after "
                "3 s without a report."
            ),
        ),
    ] = 1.0
    stay_awake: Annotated[
        str,
        Meta(
            description=(
                'macOS: prevention of idle sleep: "busy" (while the node works and for one minute after), '
                '"always", or "never". Lid and menu always put the Mac to sleep.'
            )
        ),
    ] = "busy"
    machine: Annotated[
        str,
        Meta(
            description=(
                "Replaces the id of the machine, to which a certificate is bound; for two nodes on one "
                "machine. Empty: the machine's own id."
            )
        ),
    ] = ""
    log_level: Annotated[str, Meta(description="Minimum level of logged events: debug, info, warning or error.")] = (
        "info"
    )


class SharingSettings(Section, frozen=True):
    """Settings of the times at which this Mac accepts work, and of the work that runs when they end (`[sharing]`)."""

    when: Annotated[
        str,
        Meta(
            description=(
                'Times at which this Mac accepts work: "always", "plugged-in" (on mains power), "idle" (after '
                'sharing.idle_seconds without input), or "hours" (within sharing.hours). At other times the '
                "node refuses new work and releases its memory. `cluster pause` takes precedence."
            )
        ),
    ] = "always"
    hours: Annotated[
        str,
        Meta(
            description=(
                'Hours for sharing.when = "hours" by this Mac\'s clock: "22:00-07:00"; several spans are '
                "separated by commas."
            )
        ),
    ] = ""
    idle_seconds: Annotated[
        float,
        Meta(
            ge=1,
            le=86400,
            description=('Seconds without input at keyboard, mouse or screen for sharing.when = "idle".'),
        ),
    ] = 600.0
    min_battery_percent: Annotated[
        int,
        Meta(
            ge=0,
            le=100,
            description=(
                "Minimum charge in percent to accept work on battery, with any sharing.when. After a lower "
                "charge, work is accepted again 5 % above it or on mains power. 0: the charge is ignored. A "
                "machine without a battery counts as plugged in."
            ),
        ),
    ] = 0
    grace_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description=(
                "Longest time that running requests without another node continue after this Mac stops sharing."
            ),
        ),
    ] = 30.0
    video_grace_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description=(
                "Longest time that a video job continues after this Mac stops sharing. Then the job ends as "
                "video.on_node_loss defines."
            ),
        ),
    ] = 300.0


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
COORDINATOR_SECTIONS = frozenset({"alerts", "cache", "cluster", "http", "router", "video"})
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
    "engine.scripted.memory",
    "engine.scripted.metal",
    "engine.scripted.weights",
)
_AUTOMATIC = frozenset({"memory.cap", "memory.margin", "memory.reserve", "engine.mlx.prefix_cache_size"})
_SWITCHED = frozenset({"memory.reserve", "engine.mlx.prefix_cache_size"})
_RELATIVE = frozenset({"memory.cap"})
_IDENTIFIERS: dict[str, tuple[Callable[[str], bool], str]] = {
    "node.name": (valid_name, "1 to 63 letters, digits, spaces, dots, dashes or underscores"),
    "node.machine": (valid_id, "1 to 64 letters, digits or dashes"),
}


def resolve_settings(
    layers: Sequence[tuple[str, Flat]], others: frozenset[str] = frozenset()
) -> ResolvedSettings[NodeSettings]:
    """Merge layers to the settings of a node, set the tier of an explicit cap, and check all values.

    `layers` are pairs of origin and values by key, lowest precedence first. `others` are sections to skip. Raise
    SettingsError with the key for an unknown key or an invalid value.
    """
    resolved = resolve_layers(NodeSettings, layers, others)
    settings = apply_custom_tier(resolved.value, resolved.origins)
    check_settings(settings)
    return ResolvedSettings(settings, resolved.origins)


def apply_custom_tier(settings: NodeSettings, origins: Mapping[str, str]) -> NodeSettings:
    """Return the settings with the tier `custom` if the cap is explicit and no tier is set.

    Raise SettingsError if cap and tier are set and contradict each other, or for the tier `custom` without a cap.
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
    """Check values that their types cannot restrict. Raise SettingsError with the key for an invalid value."""
    for key, choices in _CHOICES.items():
        value = _get_value(settings, key)
        if value not in choices:
            raise SettingsError(f"setting {key}: {value!r} is not one of {', '.join(choices)}")
    for key in _SIZES:
        _check_size(key, _get_value(settings, key))
    for key, (valid, form) in _IDENTIFIERS.items():
        value = str(_get_value(settings, key))
        if value and not valid(value):
            raise SettingsError(f"setting {key}: {value!r} is not {form}")
    _check_hours(settings.sharing)
    _check_battery(settings.sharing)
    if not valid_model(settings.engine.scripted.model):
        raise SettingsError("setting engine.scripted.model: a name has 1 to 200 letters, digits, spaces or ._:/@+()-")


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
    """Return the display name of the node: the setting `node.name`, else the host name without unsafe characters, else
    `node`. `host` is the host name."""
    if settings.node.name:
        return settings.node.name
    plain = re.sub(r"[^A-Za-z0-9 ._-]+", "-", host.removesuffix(".local"))[:63].strip(" ._-")
    return plain if valid_name(plain) else "node"
