"""Catalogue of the models on this machine: found in folders and in Hugging Face's cache, described without loading.

A model is a folder with `config.json` and `model*.safetensors`. A diffusers package (`model_index.json`) and its parts
are never taken for a model. A model that cannot be served keeps its name and carries the cause, for the client that
requests that model.

Two nodes have the same model if the fingerprints are equal. A fingerprint is a sha256 over three parts. The first part
is the files that change prompts or answers (`_IDENTITY`). The second part is the headers of the weights: names,
shapes, types and offsets of every tensor. The third part is samples of every tensor: its first, middle and last
SAMPLE_BYTES bytes. Other weights of the same shapes are therefore another model. A change outside of the samples is not
detected. Hashing all bytes takes seconds for each GiB, samples of 111 tensors 1.4 ms.

The files of a loaded model may be replaced. Its description is kept while it is loaded (`pin`), because the weights in
memory, their tokenizer and their fingerprint belong together. `find_replacement` returns the model on the disk now.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

import structlog

from node.engine.models.model_descriptor import ModelDescriptor
from node.settings import ModelSettings
from wire.identity import valid_model
from wire.report import CACHE_STEP_TOKENS, KvParameters, TransientModel

MODEL, PACKAGE = "config.json", "model_index.json"
"""Files that identify a model and a diffusers package."""
MAX_DEPTH = 3
"""Levels below a configured folder: FOLDER/publisher/model and one more."""
MAX_FOLDERS = 20_000
"""Maximum number of folders in one scan, because a home directory set by mistake must not hang a node."""
MAX_HEADER_BYTES = 100 * 1024 * 1024
"""Maximum bytes of a safetensors header (the format's own limit)."""
SCAN_VALID_SECONDS = 2.0
"""Seconds for which a scan is not repeated because of an unknown name."""
SCAN_INTERVAL_SECONDS = 30.0
"""Seconds between two scans of an idle node."""
DEFAULT_CONTEXT = 4096
EMBEDDED = Path(__file__).with_name("macpool-tiny")
SAMPLE_BYTES = 4096
"""Bytes of one sample of a tensor: a page of most disks. A smaller sample is not read faster."""
GGUF = "it is in GGUF, the format of llama.cpp: download its MLX or safetensors build, for example from mlx-community"
_IDENTITY = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "tiktoken.model",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "1_Pooling/config.json",
)
"""Files next to the weights that change prompts or answers."""
_CONTEXTS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "seq_length", "n_positions")
_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "F32": 4, "F16": 2, "BF16": 2}
_FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
_NESTED = ("text_config", "language_config", "llm_config")
_OLDER = {"n_layer": "num_hidden_layers", "n_head": "num_attention_heads", "n_embd": "hidden_size"}
_FUSED = frozenset({64, 72, 80, 96, 128})
"""Head sizes with fused attention in Metal, which stores no scores (from MLX's source)."""
_LATENT = frozenset(
    {
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k25",
        "kimi_linear",
        "mistral4",
    }
)
"""Models whose compressed attention (MLA) caches the compressed values. Any other model expands them to keys and
values."""
_INDEXED = frozenset({"deepseek_v32", "glm_moe_dsa"})
"""Models of `_LATENT` that also cache an index, as keys and (empty) values."""
_STATES = frozenset({"linear_attention", "conv", "recurrent", "mamba"})
_WINDOWS = frozenset({"sliding_attention", "chunked_attention"})

Config = Mapping[str, Any]
log = structlog.get_logger("node.models.catalogue")


class Digest(Protocol):
    """Hash that is updated with bytes, such as those of hashlib."""

    def update(self, data: bytes, /) -> None:
        """Add bytes to the hash."""
        ...


class ModelCatalogue:
    """Models in the model folders and in Hugging Face's cache, by the last scan.

    Models that the MLX engine cannot serve are included, with their cause. Only one thread may scan. All other threads
    see the complete result of one scan. `environment` has the variables that locate the cache.
    """

    def __init__(self, settings: ModelSettings, environment: Mapping[str, str] = os.environ) -> None:
        self._settings = settings
        self._hub = get_hub_folder(environment) if settings.use_huggingface_cache else None
        self._known: Mapping[str, ModelDescriptor] = {}
        self._pinned: Mapping[str, ModelDescriptor] = {}
        self._described: dict[Path, tuple[tuple[object, ...], ModelDescriptor]] = {}
        self._scanned = -SCAN_INTERVAL_SECONDS

    def get_models(self) -> Mapping[str, ModelDescriptor]:
        """Return all models by name, including those that cannot be served (`ModelDescriptor.cause`)."""
        return {**self._known, **self._pinned}

    def find(self, name: str) -> ModelDescriptor | None:
        """Return a model by its name; None if it is unknown."""
        return self._pinned.get(name) or self._known.get(name)

    def find_fresh(self, name: str) -> ModelDescriptor | None:
        """Return a model by its name; None if it is unknown.

        An unknown name causes a new scan, because the model may just have been downloaded. Scans are at least
        SCAN_VALID_SECONDS apart.
        """
        if self.find(name) is None and time.monotonic() - self._scanned > SCAN_VALID_SECONDS:
            self.scan()
        return self.find(name)

    def pin(self, descriptor: ModelDescriptor) -> None:
        """Keep the description of a loaded model until `unpin`, even if its files are replaced."""
        self._pinned = {**self._pinned, descriptor.name: descriptor}

    def unpin(self, name: str) -> None:
        """End `pin` after the model was unloaded: the description of the files on the disk applies again."""
        self._pinned = {other: found for other, found in self._pinned.items() if other != name}

    def find_replacement(self, descriptor: ModelDescriptor) -> ModelDescriptor | None:
        """Return the model that has replaced the loaded model `found` on the disk, by the last scan.

        Return None if the files are the same or missing, or the new model cannot be loaded.
        """
        newest = self._known.get(descriptor.name)
        return None if newest is None or newest.cause or newest.fingerprint == descriptor.fingerprint else newest

    def is_unchanged(self, descriptor: ModelDescriptor) -> bool:
        """Read the files of a model again, without a scan, and return whether its fingerprint is the same.

        Return False if the files are missing or unreadable. A new fingerprint changes the catalogue.
        """
        try:
            newest = describe_folder(descriptor.name, Path(descriptor.folder))
        except OSError:
            return False
        if newest is not None and newest.fingerprint != descriptor.fingerprint:
            self._known = {**self._known, descriptor.name: newest}
        return newest is not None and newest.fingerprint == descriptor.fingerprint

    def refresh(self) -> bool:
        """Scan again if the last scan is older than `SCAN_INTERVAL_SECONDS`. Return whether the models have changed."""
        if time.monotonic() - self._scanned < SCAN_INTERVAL_SECONDS:
            return False
        before = self._known
        self.scan()
        return self._known != before

    def scan(self) -> None:
        """Scan all folders and replace the result of the last scan.

        The embedded model is included only if no other model can be served.
        """
        found: dict[str, ModelDescriptor] = {}
        for name, folder in self._find_folders():
            if name not in found and valid_model(name):
                described = self._describe_cached(name, folder)
                if described is not None:
                    found[name] = described
        if all(one.cause for one in found.values()):
            embedded = self._describe_cached(EMBEDDED.name, EMBEDDED)
            found |= {embedded.name: embedded} if embedded is not None else {}
        self._known, self._scanned = found, time.monotonic()

    def _find_folders(self) -> Iterator[tuple[str, Path]]:
        for folder in self._settings.folders:
            yield from find_model_folders(Path(folder).expanduser())
        if self._hub is not None:
            yield from find_snapshots(self._hub)

    def _describe_cached(self, name: str, folder: Path) -> ModelDescriptor | None:
        """Describe a folder, or return the previous description if none of its files changed."""
        try:
            state = _read_file_state(folder)
            kept = self._described.get(folder)
            if kept is not None and kept[0] == (name, *state):
                return kept[1]
            found = describe_folder(name, folder)
        except OSError as error:
            return ModelDescriptor(name, folder, cause=f"its files cannot be read: {error.strerror or error}")
        except Exception as error:  # unknown files may raise any error; all other models are still served
            return ModelDescriptor(name, folder, cause=f"its files are invalid: {type(error).__name__}: {error}"[:300])
        if found is not None:
            self._described[folder] = ((name, *state), found)
        return found


def get_hub_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of Hugging Face's cache, by the environment variables that `huggingface_hub` uses."""
    if "HF_HUB_CACHE" in environment:
        return Path(environment["HF_HUB_CACHE"])
    home = environment.get("HF_HOME") or os.path.join(
        environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "huggingface"
    )
    return Path(home) / "hub"


def find_model_folders(top: Path, marker: str = MODEL) -> Iterator[tuple[str, Path]]:
    """Yield name and folder of each model at or below `top`; with the marker PACKAGE, of each diffusers package.

    A name is the path below `top`, or the folder name of `top` itself. The search ends at MAX_DEPTH levels and
    MAX_FOLDERS folders, and does not enter a found folder. Folders with GGUF files count as models.
    """
    visited = 0
    waiting: list[tuple[Path, int]] = [(top, 0)]
    while waiting and visited < MAX_FOLDERS:
        folder, depth = waiting.pop(0)
        visited += 1
        names = _list_names(folder)
        kind = next((one for one in (PACKAGE, MODEL) if one in names), None)
        if kind == marker or (kind is None and marker == MODEL and _has_gguf(names)):
            yield (folder.name if folder == top else str(folder.relative_to(top))), folder
        if kind is None and depth < MAX_DEPTH:
            waiting += [(folder / name, depth + 1) for name in names if _should_descend(folder / name)]


def _has_gguf(names: Iterable[str]) -> bool:
    return any(name.lower().endswith(".gguf") for name in names)


def _should_descend(path: Path) -> bool:
    return not path.name.startswith((".", "models--")) and path.is_dir()


def _list_names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def find_snapshots(hub: Path, marker: str = MODEL) -> Iterator[tuple[str, Path]]:
    """Yield name (`publisher/name`) and folder of each model in a Hugging Face cache.

    The folder is `models--publisher--name/snapshots/REVISION` of the revision `main`, or of another complete revision.
    With the marker PACKAGE, diffusers packages are yielded instead.
    """
    for entry in _list_names(hub):
        kind, _, rest = entry.partition("--")
        if kind != "models" or not rest:
            continue
        folder = hub / entry
        snapshot = _find_snapshot(folder, marker)
        if snapshot is not None and (marker == PACKAGE or not (snapshot / PACKAGE).exists()):
            yield rest.replace("--", "/"), snapshot


def _find_snapshot(folder: Path, marker: str) -> Path | None:
    try:
        revision = (folder / "refs" / "main").read_text().strip()
    except OSError:
        revision = ""
    named = folder / "snapshots" / revision
    if revision and (named / marker).exists():
        return named
    snapshots = [folder / "snapshots" / name for name in _list_names(folder / "snapshots")]
    found = next((one for one in snapshots if (one / marker).exists()), None)
    if found is None and marker == MODEL:
        found = next((one for one in snapshots if _has_gguf(_list_names(one))), None)
    return found


def _read_file_state(folder: Path) -> tuple[object, ...]:
    """Return a value that changes when any relevant file changes."""
    files = [folder / name for name in _IDENTITY] + sorted(folder.glob("*.safetensors"))
    stats = [(str(file), file.stat()) for file in files if file.exists()]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)


def describe_folder(name: str, folder: Path) -> ModelDescriptor | None:
    """Return the descriptor of a model folder; None if the folder has no text model.

    The `cause` of the descriptor is the reason why the model cannot be served. Raise OSError if the folder cannot be
    read.
    """
    if not (folder / MODEL).exists() and _has_gguf(_list_names(folder)):
        return ModelDescriptor(name, folder, cause=GGUF)
    digest = hashlib.sha256()
    for part in _IDENTITY:
        if (folder / part).exists():
            digest.update(part.encode() + b"\0" + (folder / part).read_bytes())
    try:
        config = _parse_object((folder / "config.json").read_bytes())
    except ValueError as error:
        return ModelDescriptor(name, folder, cause=f"its config.json is not a JSON object: {error}")
    if not is_text_model(config):
        return None
    if config.get("model_file") is not None:
        return ModelDescriptor(
            name,
            folder,
            cause=f"it needs code from the model folder ({config['model_file']!r}), which Macpool never runs",
        )
    weights = read_weight_headers(folder, digest)
    missing = find_unknown_dimensions(config)
    if missing:
        log.warning("dimensions unknown", model=name, missing=", ".join(missing), foreseen=0)
    context = _get_context_tokens(config)
    return ModelDescriptor(
        name,
        folder,
        digest.hexdigest()[:32],
        estimate_loaded_bytes(config, weights),
        context,
        predict_kv(config, weights.float_size),
        weights.cause,
        predict_transient(config, weights.float_size),
        weights.size,
    )


def is_text_model(config: Config) -> bool:
    """Return whether a parsed `config.json` belongs to a model that generates text."""
    if not isinstance(config.get("model_type"), str):
        return False
    named = config.get("architectures")
    if not isinstance(named, Sequence) or not named:
        return True
    names = [str(one) for one in cast("Sequence[object]", named)]
    if any("CausalLM" in one or "LMHeadModel" in one for one in names):
        return True
    return "text_config" in config and any("ConditionalGeneration" in one for one in names)


@dataclass(frozen=True, slots=True)
class WeightHeaders:
    """Sizes of a model's weights, from the headers of its safetensors files."""

    size: int = 0
    """Bytes of all tensors."""
    float_size: int = 2
    """Bytes of one unquantized number."""
    cause: str = ""
    """Reason why the weights cannot be used; empty if they can."""
    fp8: int = 0
    """Bytes of the tensors in fp8."""


def read_weight_headers(folder: Path, digest: Digest) -> WeightHeaders:
    """Read the headers of all weight files, add them and samples of their tensors to `digest`, and return the sizes.

    Missing or broken files are the `cause` of the result. Raise OSError if a file cannot be read.
    """
    files = sorted(folder.glob("model*.safetensors"))
    missing = sorted(_list_indexed_files(folder) - {file.name for file in files})
    if missing:
        return WeightHeaders(
            cause=f"{len(missing)} of its weight files are missing, such as {missing[0]}: download the model again"
        )
    if not files:
        return WeightHeaders(cause="it has no model*.safetensors")
    found = WeightHeaders()
    for file in files:
        try:
            size, float_size, fp8 = _read_tensor_sizes(file, digest)
        except ValueError as error:
            return WeightHeaders(cause=f"{file.name}: {error}")
        found = replace(found, size=found.size + size, float_size=float_size or found.float_size, fp8=found.fp8 + fp8)
    return found


def estimate_loaded_bytes(config: Config, weights: WeightHeaders) -> int:
    """Return the expected bytes of the weights in memory. The exact number is known only after the model is built.

    mlx-lm converts fp8 checkpoints to bf16, which doubles their size. Packed formats are not converted: mxfp8,
    power-of-two scales over blocks of 32 × 32, compressed-tensors, ModelOpt (`load_model` in mlx_lm/utils.py).
    """
    found: object = config.get("quantization_config") or _get_text_config(config).get("quantization_config")
    method: Config = cast("Config", found) if isinstance(found, dict) else {}
    packed = method.get("quant_method") not in (None, "fp8") or (
        method.get("scale_fmt") == "ue8m0" and method.get("weight_block_size") == [32, 32]
    )
    return weights.size + (0 if packed or "quantization" in config else weights.fp8)


def _list_indexed_files(folder: Path) -> set[str]:
    try:
        index = _parse_object((folder / "model.safetensors.index.json").read_bytes())
    except (OSError, ValueError):
        return set()
    named = index.get("weight_map")
    return {str(one) for one in cast("dict[str, object]", named).values()} if isinstance(named, dict) else set()


def _read_tensor_sizes(file: Path, digest: Digest) -> tuple[int, int, int]:
    """Read one header and samples of its tensors.

    Return the bytes of its tensors, of one of its unquantized numbers (0: none), and of all of its tensors in fp8.
    Raise ValueError if the file is broken.
    """
    raw, end = read_header(file)
    tensors = [cast("Config", one) for key, one in _parse_object(raw).items() if key != "__metadata__"]
    digest.update(raw)
    _hash_samples(file, 8 + len(raw), [one["data_offsets"] for one in tensors], digest)
    fp8 = sum(one["data_offsets"][1] - one["data_offsets"][0] for one in tensors if one.get("dtype") in _FP8)
    return end, max((_SIZES.get(str(one.get("dtype")), 0) for one in tensors), default=0), fp8


def _hash_samples(file: Path, begin: int, extents: Iterable[Sequence[int]], digest: Digest) -> None:
    """Add the first, middle and last bytes of every tensor to `digest`, in the order of the header.

    Extents count from `begin`, the end of the header.
    """
    with file.open("rb", buffering=0) as opened:
        for first, last in extents:
            size = last - first
            starts = (
                range(0, size, SAMPLE_BYTES)
                if size <= 3 * SAMPLE_BYTES
                else (0, (size - SAMPLE_BYTES) // 2, size - SAMPLE_BYTES)
            )
            for start in starts:
                digest.update(os.pread(opened.fileno(), min(SAMPLE_BYTES, size - start), begin + first + start))


def read_header(file: Path) -> tuple[bytes, int]:
    """Return the raw header (JSON) of a safetensors file, and the total bytes of its tensors.

    Raise ValueError if the header is broken or the file is incomplete, OSError if the file cannot be read.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise ValueError(f"not a safetensors file: its header claims {length} bytes")
        raw = opened.read(length)
        size = os.fstat(opened.fileno()).st_size
    if len(raw) < length:
        raise ValueError(f"the file ends within its header, at {size} bytes: download it again")
    tensors = [cast("Config", one) for key, one in _parse_object(raw).items() if key != "__metadata__"]
    end = max((int(one["data_offsets"][1]) for one in tensors), default=0)
    if 8 + length + end > size:
        raise ValueError(f"the file is incomplete: it has {size} of {8 + length + end} bytes: download it again")
    return raw, end


def _parse_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raise ValueError for any other content."""
    try:
        found: object = json.loads(raw)
    except RecursionError:
        raise ValueError("its JSON has too many levels of nesting") from None
    if not isinstance(found, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004  one error for all broken files
    return cast("dict[str, Any]", found)


def _get_text_config(config: Config) -> Config:
    """Return the text part of a config, with older names mapped to current ones.

    A nested part has priority even where the top level has a number of layers: that may belong to an image encoder.
    """
    inner = next((found for key in _NESTED if _has_layer_count(found := config.get(key))), None)
    text = {**config, **cast("Config", inner)} if inner is not None else config
    return {**{today: text[old] for old, today in _OLDER.items() if old in text}, **text}


def _has_layer_count(found: object) -> bool:
    return isinstance(found, dict) and ("num_hidden_layers" in found or "n_layer" in found)


def find_unknown_dimensions(config: Config) -> tuple[str, ...]:
    """Return the dimensions of a row's memory that a config does not contain, by their names; empty if none is missing.

    The memory of such a model cannot be predicted before it is loaded. The gate still applies.
    """
    text = _get_text_config(config)
    dimensions = {
        "num_hidden_layers": _to_count(text.get("num_hidden_layers")),
        "num_attention_heads": _to_count(text.get("num_attention_heads")),
        "head_dim or hidden_size": _get_head_size(text),
    }
    return tuple(name for name, value in dimensions.items() if not value)


def _get_context_tokens(config: Config) -> int:
    text = _get_text_config(config)
    return next((value for key in _CONTEXTS if (value := _to_count(text.get(key)))), DEFAULT_CONTEXT)


def _to_count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0


def predict_kv(config: Config, float_size: int) -> KvParameters:
    """Predict the parameters of a row's KV bytes from the config of a model that is not loaded.

    `float_size` is the bytes of an unquantized number of the weights. Every layer counts with full keys and values
    unless the config names its kind. The quantization of the weights has no effect. After the load, the parameters are
    measured (`node.engine.kv.kv_cache.measure_kv_parameters`).
    """
    text = _get_text_config(config)
    number = _get_float_size(text, float_size)
    layer = _count_cached_numbers(text) * number
    full, windowed, states = _count_layers(text)
    window = _to_count(text.get("sliding_window")) if windowed else 0
    return KvParameters(
        full * layer, CACHE_STEP_TOKENS, states * _estimate_state_bytes(text, number), window, windowed * layer
    )


def _count_cached_numbers(text: Config) -> int:
    """Return the numbers that one layer of attention caches of a token."""
    latent, rope = _to_count(text.get("kv_lora_rank")), _to_count(text.get("qk_rope_head_dim"))
    kind, nope, value = (
        text.get("model_type"),
        _to_count(text.get("qk_nope_head_dim")),
        _to_count(text.get("v_head_dim")),
    )
    if latent and kind in _LATENT:
        return latent + rope + (2 * _to_count(text.get("index_head_dim")) if kind in _INDEXED else 0)
    if latent and nope:
        return _to_count(text.get("num_attention_heads")) * (nope + rope + (value or nope))
    heads = _to_count(text.get("num_key_value_heads")) or _to_count(text.get("num_attention_heads")) or 1
    return 2 * heads * _get_head_size(text)


def _estimate_state_bytes(text: Config, number: int) -> int:
    """Return the bytes that one layer without attention keeps of a row, independent of its length.

    That is the end of a convolution, and with a delta net also its memory in full precision. Unknown kinds are
    estimated by their width.
    """
    hidden, kernel = _to_count(text.get("hidden_size")), _to_count(text.get("conv_L_cache"))
    if kernel:
        return (kernel - 1) * hidden * number
    sizes = [
        _to_count(text.get(f"linear_{name}"))
        for name in ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim", "conv_kernel_dim")
    ]
    if all(sizes):
        key_heads, key, value_heads, value, kernel = sizes
        convolved = 2 * key_heads * key + value_heads * value
        return (kernel - 1) * convolved * number + value_heads * value * key * 4
    return hidden * 4 * 4


def predict_transient(config: Config, float_size: int) -> TransientModel:
    """Predict the transient bytes of a forward from the config of a model that is not measured.

    `float_size` is the bytes of an unquantized number of the weights. The sum contains the scores of one layer (4 bytes
    each, without fused attention) and the logits. It also contains a second copy of the keys and values of a layer
    while they grow, and the inner activations. Measured forwards take up to ten times as much. Dimensions that the
    config lacks add nothing.
    """
    text = _get_text_config(config)
    heads, size = _to_count(text.get("num_attention_heads")), _get_head_size(text)
    kv_heads = _to_count(text.get("num_key_value_heads")) or heads
    numbers = _to_count(text.get("hidden_size")) + _to_count(text.get("intermediate_size")) + heads * size
    logits = 4.0 * _to_count(text.get("vocab_size"))
    pair = 0.0 if sys.platform == "darwin" and size in _FUSED else 4.0 * heads
    seen = 2.0 * kv_heads * size * _get_float_size(text, float_size)
    full, windowed, _ = _count_layers(text)
    window = _to_count(text.get("sliding_window")) if windowed and not full else 0
    return TransientModel(
        token=4.0 * numbers,
        pair=pair,
        seen=seen,
        logits=logits,
        step_row=4.0 * numbers + logits,
        step_seen=4.0 * heads,
        window=window,
    )


def _get_float_size(text: Config, otherwise: int) -> int:
    return _SIZES.get(str(text.get("torch_dtype") or text.get("dtype")), 0) or otherwise


def _get_head_size(text: Config) -> int:
    return _to_count(text.get("head_dim")) or _to_count(text.get("hidden_size")) // (
        _to_count(text.get("num_attention_heads")) or 1
    )


def _count_layers(text: Config) -> tuple[int, int, int]:
    """Return the numbers of layers with full attention, with a window, and with a state."""
    count = _to_count(text.get("num_hidden_layers"))
    kinds = text.get("layer_types")
    if isinstance(kinds, Iterable) and not isinstance(kinds, str):
        names = [str(kind) for kind in cast("Iterable[object]", kinds)]
        states = sum(name in _STATES for name in names)
        windowed = sum(name in _WINDOWS for name in names) if _to_count(text.get("sliding_window")) else 0
        return len(names) - states - windowed, windowed, states
    pattern = _to_count(text.get("sliding_window_pattern"))
    if pattern and _to_count(text.get("sliding_window")):
        full = count // pattern
        return full, count - full, 0
    interval = _to_count(text.get("full_attention_interval"))
    if interval:
        return count // interval, 0, count - count // interval
    return count, 0, 0
