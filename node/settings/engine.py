"""Settings of a node's memory, engine and models, as a person writes them ("96GiB", "auto").

`node.memory.cap` resolves sizes for this machine.
"""

from collections.abc import Mapping
from typing import Annotated, Final

from msgspec import Meta

from host.settings_loader import Section
from wire.models.kind import ModelKind

Size = str | int
"""Size as a person writes it: bytes as a number, a text such as "96GiB", or a word such as `AUTO`."""
AUTO: Final = "auto"
"""Value of a setting whose effective value the node chooses."""


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
                "Bytes of random data that the MLX engine holds as an emergency reserve, released after MLX's free "
                'buffers and before cached prompts and models: "auto" (1 % of the cap, at most 256 MiB), a size, or '
                '"off".'
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
    dimensions: Annotated[
        int,
        Meta(
            ge=0,
            le=12_288,
            description=(
                "Numbers of the vectors of an embedding model: their values follow from the words of a text. 0: the "
                "model answers chats."
            ),
        ),
    ] = 0
    reranks: Annotated[
        bool,
        Meta(description="Score documents instead of answering chats: by the words that a document and a query share."),
    ] = False
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
    disk_cache_size: Annotated[
        Size,
        Meta(
            description=(
                'Maximum bytes of cached prefixes on the disk: "off", "auto" (half of the space that would '
                'be free without the cache, at most a fifth of the disk), or a size such as "50GiB". A twentieth of '
                "the disk always stays free. The files survive a restart. They hold prompts in a form from which the "
                "text can be recovered."
            )
        ),
    ] = "off"
    disk_cache_min_seconds: Annotated[
        float,
        Meta(
            ge=0,
            le=3600,
            description="Seconds of prefill that a prefix on the disk must save over reading it, or it is not written.",
        ),
    ] = 0.5
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
    huggingface_cache: Annotated[
        str,
        Meta(
            description=(
                "Folder of the Hugging Face cache, an absolute path. Empty: `HF_HUB_CACHE`, `HF_HOME`/hub, "
                "`XDG_CACHE_HOME`/huggingface/hub or ~/.cache/huggingface/hub. A service does not have the variables "
                "of your shell."
            )
        ),
    ] = ""
    use_huggingface_cache: Annotated[
        bool, Meta(description="Also serve the models of the local Hugging Face cache.")
    ] = True
    hash_when_idle: Annotated[
        bool,
        Meta(
            description=(
                "Hash the files of models while the node is idle, to compare copies on two nodes by their content."
            )
        ),
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
    kinds: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                'Kinds of models, as "NAME=embed", "NAME=rerank" or "NAME=chat", for models whose files name another '
                "kind or none. Without files for embeddings, a vector is the state of the last token, normalized."
            )
        ),
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

    def get_kinds(self) -> Mapping[str, ModelKind]:
        """Return the kind of each model in the setting `kinds`, by name of the model.

        Raise `ValueError` for an unknown kind. An entry without `=` is a kind for the empty name.
        """
        parts = (entry.rpartition("=") for entry in self.kinds)
        return {name: ModelKind(kind) for name, _, kind in parts}
