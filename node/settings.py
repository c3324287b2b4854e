"""Settings of a node with their defaults and descriptions, and the checks that need two values.

The tree holds values as written by a person ("96GiB", "auto"). `node/memory/cap` resolves them for this machine.
`resolve` refuses an impossible value and names its key, before any process is started.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from host.settings_loader import Flat, ResolvedSettings, Section, SettingsError
from host.settings_loader import resolve as resolve_layers
from node.engine.memory.wired_limit import WireMode
from node.engine.process.kinds import KINDS
from node.memory.cap import CUSTOM, TIERS
from node.sharing.policy import ShareWhen, read_hours
from wire.identity import valid_id, valid_model, valid_name
from wire.units import parse_size

Size = str | int
AUTO: Final = "auto"
MAX_BYTES: Final = 2**60
"""Sums of a few sizes must stay within the 64 bits of a frame's integers."""


class MemorySettings(Section, frozen=True):
    """How much of this machine the engine may use."""

    cap: Annotated[
        Size,
        Meta(
            description=(
                'Most bytes that the engine may reach: "auto" (RAM minus the reserve of memory.tier, never above the '
                'Metal limit), a size as "96GiB", or a share of the RAM as "70%".'
            )
        ),
    ] = AUTO
    margin: Annotated[
        Size,
        Meta(
            description=(
                'Room kept free for spikes that no reading sees: "auto" (11.2 % of the cap, 512 MiB to 12 GiB) or a '
                "size, taken as it is. 0 is possible and warned about for as long as it lasts."
            )
        ),
    ] = AUTO
    guard: Annotated[
        str,
        Meta(
            description=(
                '"on", or "off": no request is ever refused for memory. A lasting warning; the machine may then panic.'
            )
        ),
    ] = "on"
    canary: Annotated[
        Size,
        Meta(
            description=(
                'Random bytes that the MLX engine holds as its last reserve and gives up before anything else: "auto" '
                '(1 % of the cap, 256 MiB at most), a size, or "off".'
            )
        ),
    ] = AUTO
    tier: Annotated[
        str,
        Meta(
            description=(
                "What an automatic cap leaves to the system: safe 12 GiB, balanced 8 GiB, aggressive 6 GiB; 4 GiB on a "
                "machine with less than 24 GiB. custom: memory.cap decides, and is required; it is the tier of every "
                "explicit cap."
            )
        ),
    ] = "balanced"
    wire: Annotated[
        str,
        Meta(
            description=(
                'macOS: what the engine keeps wired, so that it is never paged out: "auto" (the weights of the loaded '
                'models where they are 32 GiB or more, and more than 75 % of the Metal limit), "on" (all weights), or '
                '"off" (nothing, and the video worker neither; for a Mac that had a kernel panic of the GPU\'s '
                "memory)."
            )
        ),
    ] = AUTO
    above_metal: Annotated[
        bool,
        Meta(
            description=(
                "Let an explicit memory.cap exceed the Metal limit. A lasting warning: macOS ends the process, or "
                "panics, where the limit is crossed."
            )
        ),
    ] = False


class ScriptedSettings(Section, frozen=True):
    """The scripted engine: real frames and real admission over a pretended model, for tests and benchmarks."""

    model: Annotated[str, Meta(description="Name of the model that it serves.")] = "scripted-1"
    identity: Annotated[
        str,
        Meta(
            description=(
                "Fingerprint of its model, so that two nodes can hold different models of one name; empty: made of the "
                "name."
            )
        ),
    ] = ""
    step_ms: Annotated[float, Meta(ge=0, le=60_000, description="Milliseconds from one decode step to the next.")] = 20
    batch: Annotated[int, Meta(ge=1, le=4096, description="Most rows that decode at once; more wait.")] = 64
    tokens: Annotated[
        int, Meta(ge=1, le=10**6, description=("Tokens that an answer has when the request sets no max_tokens."))
    ] = 16
    text: Annotated[
        str,
        Meta(
            description=(
                '"words" (fixed words by position), "echo" (the last user message once), or "clock" (each token is the '
                "monotonic time in ns and a space)."
            )
        ),
    ] = "words"
    memory: Annotated[Size, Meta(description="Pretended RAM of the machine.")] = "128GiB"
    metal: Annotated[
        Size,
        Meta(
            description=(
                "Metal limit that its pretended device reports; 0: it reports none, and the agent keeps to its guess "
                "for the RAM."
            )
        ),
    ] = 0
    weights: Annotated[Size, Meta(description="Pretended bytes of the model's weights.")] = "4GiB"
    kv_per_token: Annotated[int, Meta(ge=0, le=2**26, description="Pretended bytes of KV that one token takes.")] = (
        131072
    )
    context: Annotated[int, Meta(ge=1, le=2**24, description="Most tokens of prompt and answer together.")] = 32768
    tools: Annotated[bool, Meta(description="Whether its model may be offered tools; it calls none.")] = False
    refuse: Annotated[
        str,
        Meta(
            description=(
                'Requests that the gate refuses as if there were no room: "" none, "*" every one, or those whose '
                "messages contain this word."
            )
        ),
    ] = ""
    crash: Annotated[
        str,
        Meta(
            description=(
                "A request whose messages contain this word ends the engine process by a signal at its first decode "
                'step; "" none.'
            )
        ),
    ] = ""
    readings: Annotated[
        str,
        Meta(
            description=(
                "JSON file with what the pretended machine reads, in bytes: `reclaimable` (what its system can free) "
                'and `wired`; null: cannot be read. It is read at each look; "" none.'
            )
        ),
    ] = ""


class MlxSettings(Section, frozen=True):
    """The engine that runs models with MLX."""

    batch: Annotated[
        int,
        Meta(
            ge=1, le=256, description=("Most rows that decode at once; more wait. `n` of a request may not exceed it.")
        ),
    ] = 32
    chunk: Annotated[
        int,
        Meta(
            ge=32,
            le=8192,
            description=("Most prompt tokens of one forward. While others decode, chunks are shorter: by time."),
        ),
    ] = 2048
    chunk_floor: Annotated[
        int,
        Meta(
            ge=4,
            le=8192,
            description=(
                "Prompt tokens of the smallest forward that a prompt is cut into for want of memory; a request is "
                "admitted where a forward of this size fits at the end of its prompt."
            ),
        ),
    ] = 256
    context: Annotated[
        int, Meta(ge=0, le=2**24, description=("Most tokens of prompt and answer together; 0: what the model takes."))
    ] = 0
    max_tokens: Annotated[
        int,
        Meta(
            ge=1,
            le=2**20,
            description=("Most tokens of an answer whose request sets no max_tokens; the context limits it too."),
        ),
    ] = 4096
    prefix_cache: Annotated[
        Size,
        Meta(
            description=(
                'Most bytes of ended chats that are kept for their next turn: "auto" (15 % of the cap without the '
                'weights), a size as "2GiB", or "off". They are given up before anything is refused for memory.'
            )
        ),
    ] = AUTO
    blas: Annotated[
        str,
        Meta(
            description=(
                'Linux only: "auto" preloads OpenBLAS where it is installed (the bundled one is 26 times slower), '
                '"bundled" does not.'
            )
        ),
    ] = "auto"


class EngineSettings(Section, frozen=True):
    """Which engine generates, and each kind's own settings."""

    kind: Annotated[
        str, Meta(description=('The kind of engine: "mlx" (real models), or "scripted" (a pretended one, for tests).'))
    ] = "mlx"
    mlx: MlxSettings = MlxSettings()
    scripted: ScriptedSettings = ScriptedSettings()


class ModelSettings(Section, frozen=True):
    """Which models the MLX engine may serve. A list is written as ["a", "b"] in the file, as a,b elsewhere."""

    folders: Annotated[
        tuple[str, ...],
        Meta(description=("Folders to look for models in, three levels deep; `--models DIR` adds to them.")),
    ] = ()
    hub: Annotated[bool, Meta(description="Serve what is in the local Hugging Face cache, too.")] = True
    profile: Annotated[
        str,
        Meta(
            description=(
                '"auto": measure a model when it is loaded for the first time on this machine, 10 s at most, and keep '
                'what was measured; "off": start from what its config says.'
            )
        ),
    ] = "auto"
    trial: Annotated[
        bool,
        Meta(
            description=(
                "Try the chat template and the tokenizer of each model once in a process of its own, with limits of "
                "time and memory, before the engine uses them: about 4 s at the first request for a model."
            )
        ),
    ] = True
    preload: Annotated[
        tuple[str, ...],
        Meta(description=("Names of models to load at start, in this order, and never to unload for another.")),
    ] = ()
    idle_unload: Annotated[
        float,
        Meta(
            ge=0,
            le=2**31,
            description=(
                "Seconds without a request after which a model is unloaded, unless it is preloaded; 0: never. The next "
                "request loads it again."
            ),
        ),
    ] = 0.0


class WorkerSettings(Section, frozen=True):
    """Video on this node: memory is lent to a worker, one job at a time. The pool's side of it is `video`."""

    enabled: Annotated[
        bool,
        Meta(
            description=(
                "Offer video where its environment is installed (`cluster video install`) and a video package is here; "
                "without them nothing is started."
            )
        ),
    ] = True
    environments: Annotated[
        str,
        Meta(
            description=(
                "Folder in which `cluster video install` keeps the worker's environment; empty: "
                "STATE/node/video/environments."
            )
        ),
    ] = ""
    job_timeout: Annotated[
        float,
        Meta(
            ge=1,
            le=10**6,
            description=("Seconds after which a worker is ended that is not done, unless its job says otherwise."),
        ),
    ] = 7200.0
    stall_timeout: Annotated[
        float,
        Meta(
            ge=1,
            le=10**6,
            description=("Seconds without a step, a phase or a transformer block after which a worker is ended."),
        ),
    ] = 300.0
    start_timeout: Annotated[
        float,
        Meta(
            ge=1, le=10**4, description=("Seconds that a granted lease waits for its worker before it is given back.")
        ),
    ] = 90.0
    grace: Annotated[
        float,
        Meta(
            ge=0,
            le=60,
            description=(
                "Seconds that a worker has to leave after SIGTERM before SIGKILL; none where it has broken its lease."
            ),
        ),
    ] = 1.0
    ray_ports: Annotated[
        int,
        Meta(
            ge=1024,
            le=65400,
            description=("First of the 60 loopback ports that this node's Ray uses while it may make videos."),
        ),
    ] = 6480
    ray_folder: Annotated[
        str,
        Meta(
            description=(
                "Folder for Ray's sockets and logs; its path must be short (macOS takes 103 bytes of a socket's). "
                "Empty: one of this node's own below /tmp."
            )
        ),
    ] = ""


class AgentSettings(Section, frozen=True):
    """The node itself."""

    name: Annotated[str, Meta(description="Friendly name of this node; empty: its host name.")] = ""
    report_busy: Annotated[
        float, Meta(ge=0.05, le=5, description=("Seconds from one report to the next while the engine is busy."))
    ] = 0.5
    report_idle: Annotated[
        float,
        Meta(
            ge=0.05,
            le=5,
            description=(
                "Seconds from one report to the next while it is idle. The coordinator suspects a node after 3 s of "
                "silence."
            ),
        ),
    ] = 1.0
    stay_awake: Annotated[
        str,
        Meta(
            description=(
                'macOS: when this Mac may not fall asleep by itself: "busy" (while it works, and a minute longer), '
                '"always", or "never". Lid and menu put it to sleep in any case.'
            )
        ),
    ] = "busy"
    machine: Annotated[
        str,
        Meta(
            description=(
                "Overrides the machine's own id, which a certificate is bound to: for two nodes on one machine. Empty: "
                "the machine's."
            )
        ),
    ] = ""
    share: Annotated[
        str,
        Meta(
            description=(
                'When this Mac takes work: "always", "plugged-in" (while it draws from the mains), "idle" (once nobody '
                'has touched it for node.share_idle), or "hours" (those of node.share_hours). Else it takes nothing '
                "new and gives its memory back. `cluster pause` goes before it."
            )
        ),
    ] = "always"
    share_hours: Annotated[
        str,
        Meta(
            description=(
                'Hours of node.share = "hours" by this Mac\'s clock: "22:00-07:00", several with commas between.'
            )
        ),
    ] = ""
    share_idle: Annotated[
        float,
        Meta(
            ge=1,
            le=86400,
            description=(
                'Seconds without a touch of keyboard, mouse or screen after which node.share = "idle" takes work.'
            ),
        ),
    ] = 600.0
    share_battery: Annotated[
        int,
        Meta(
            ge=0,
            le=100,
            description=(
                "Least charge in percent at which this Mac takes work while it is not plugged in, whatever else "
                "node.share says; below it, work comes back 5 % higher or on mains. 0: the battery does not matter. A "
                "machine without a battery is plugged in."
            ),
        ),
    ] = 0
    share_grace: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description=(
                "Seconds that requests which nobody else has room for may go on here after this Mac stopped sharing."
            ),
        ),
    ] = 30.0
    share_video_grace: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description=(
                "Seconds that a video may go on here after this Mac stopped sharing; then its job ends as "
                "video.on_node_loss says."
            ),
        ),
    ] = 300.0
    log_level: Annotated[str, Meta(description="Least level that is logged: debug, info, warning or error.")] = "info"


class NodeSettings(Section, frozen=True):
    """All settings of a node."""

    memory: MemorySettings = MemorySettings()
    engine: EngineSettings = EngineSettings()
    models: ModelSettings = ModelSettings()
    node: AgentSettings = AgentSettings()
    worker: WorkerSettings = WorkerSettings()


SECTIONS = frozenset(field.name for field in msgspec.structs.fields(NodeSettings))
"""The top sections that belong to the node: another process skips them, and forwards them to it."""

_CHOICES: dict[str, tuple[str, ...]] = {
    "memory.guard": ("on", "off"),
    "memory.tier": tuple(TIERS),
    "memory.wire": tuple(wire.value for wire in WireMode),
    "engine.kind": tuple(KINDS),
    "engine.mlx.blas": ("auto", "bundled"),
    "models.profile": ("auto", "off"),
    "engine.scripted.text": ("words", "echo", "clock"),
    "node.share": tuple(when.value for when in ShareWhen),
    "node.stay_awake": ("busy", "always", "never"),
    "node.log_level": ("debug", "info", "warning", "error"),
}
_SIZES = (
    "memory.cap",
    "memory.margin",
    "memory.canary",
    "engine.mlx.prefix_cache",
    "engine.scripted.memory",
    "engine.scripted.metal",
    "engine.scripted.weights",
)
_AUTOMATIC = frozenset({"memory.cap", "memory.margin", "memory.canary", "engine.mlx.prefix_cache"})
_SWITCHED = frozenset({"memory.canary", "engine.mlx.prefix_cache"})
_RELATIVE = frozenset({"memory.cap"})
_IDENTIFIERS: dict[str, tuple[Callable[[str], bool], str]] = {
    "node.name": (valid_name, "1 to 63 letters, digits, spaces, dots, dashes or underscores"),
    "node.machine": (valid_id, "1 to 64 letters, digits or dashes"),
}


def resolve(layers: Sequence[tuple[str, Flat]], others: frozenset[str] = frozenset()) -> ResolvedSettings[NodeSettings]:
    """Merge layers (weakest first) into the node's settings and check them; SettingsError names the key."""
    resolved = resolve_layers(NodeSettings, layers, others)
    settings = with_tier(resolved.value, resolved.origins)
    check(settings)
    return ResolvedSettings(settings, resolved.origins)


def with_tier(settings: NodeSettings, origins: Mapping[str, str]) -> NodeSettings:
    """Set the tier of an explicit cap to `custom`.

    Raises SettingsError where both are set and contradict, because an ignored setting is worse than a refused one.
    """
    memory, tier_from = settings.memory, origins.get("memory.tier")
    if memory.cap == AUTO:
        if memory.tier == CUSTOM:
            raise SettingsError(
                f"setting memory.tier ({tier_from or 'value'}): custom needs memory.cap to say how much; set it, or "
                "choose safe, balanced or aggressive"
            )
        return settings
    if tier_from is not None and memory.tier in TIERS and memory.tier != CUSTOM:
        raise SettingsError(
            f"setting memory.tier ({tier_from}): {memory.tier} contradicts memory.cap = {memory.cap} "
            f"({origins.get('memory.cap', 'value')}), because an explicit cap has no reserve: leave memory.tier out or "
            "set it to custom, or leave memory.cap out"
        )
    return replace(settings, memory=replace(memory, tier=CUSTOM)) if tier_from is None else settings


def check(settings: NodeSettings) -> None:
    """Raise SettingsError for a value that its type takes and its meaning does not."""
    for key, choices in _CHOICES.items():
        value = _leaf(settings, key)
        if value not in choices:
            raise SettingsError(f"setting {key}: {value!r} is not one of {', '.join(choices)}")
    for key in _SIZES:
        _check_size(key, _leaf(settings, key))
    for key, (valid, form) in _IDENTIFIERS.items():
        value = str(_leaf(settings, key))
        if value and not valid(value):
            raise SettingsError(f"setting {key}: {value!r} is not {form}")
    _check_hours(settings.node)
    _check_battery(settings.node)
    if not valid_model(settings.engine.scripted.model):
        raise SettingsError("setting engine.scripted.model: a name has 1 to 200 letters, digits, spaces or ._:/@+()-")


def _check_hours(node: AgentSettings) -> None:
    if not node.share_hours and node.share != ShareWhen.HOURS:
        return
    try:
        read_hours(node.share_hours)
    except ValueError as error:
        raise SettingsError(f"setting node.share_hours: {error}") from None


def _check_battery(node: AgentSettings) -> None:
    if node.share_battery and node.share == ShareWhen.PLUGGED_IN:
        raise SettingsError(
            f'setting node.share_battery: {node.share_battery} % means nothing beside node.share = "plugged-in", which '
            "takes no work on battery at any charge: leave one of them out"
        )


def _check_size(key: str, value: object) -> None:
    assert isinstance(value, str | int)  # noqa: S101  the table above names sizes only
    if (value == AUTO and key in _AUTOMATIC) or (value == "off" and key in _SWITCHED):
        return
    try:
        size = parse_size(value, whole=2**40 if key in _RELATIVE else None)
    except ValueError as error:
        raise SettingsError(f"setting {key}: {error}") from None
    if size > MAX_BYTES:
        raise SettingsError(f"setting {key}: {value} is more than any machine has")
    if size == 0 and key == "memory.cap":
        raise SettingsError('setting memory.cap: a cap is never 0; memory.guard = "off" switches the guard off by name')


def _leaf(settings: NodeSettings, key: str) -> object:
    value: object = settings
    for name in key.split("."):
        value = getattr(value, name)
    return value


def node_name(settings: NodeSettings, host: str) -> str:
    """Return the node's name: the configured one, else the host name made safe for printing and labels."""
    if settings.node.name:
        return settings.node.name
    plain = re.sub(r"[^A-Za-z0-9 ._-]+", "-", host.removesuffix(".local"))[:63].strip(" ._-")
    return plain if valid_name(plain) else "node"
