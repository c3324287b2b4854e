"""Catalogue of the models on this machine: found in folders and in Hugging Face's cache, described without loading.

A model is a folder with `config.json` and `model*.safetensors`. A diffusers package (`model_index.json`) and its parts
are never taken for a model. A model that cannot be served stays in the catalogue with its cause, which clients get as
an error.

Two nodes have the same model if their content hashes are equal (`find_content`). While a node has not hashed the files,
the fingerprints are compared instead. A fingerprint is a sha256 over three parts. The first part is the files that
change prompts or answers (`IDENTITY_FILES`). The second part is the headers of the weights: names, shapes, types and
offsets of every tensor. The third part is samples of every tensor: its first, middle and last `SAMPLE_BYTES` bytes.
Other weights of the same shapes are therefore another model. A fingerprint does not show a change outside of the
samples. Hashing all bytes takes seconds for each GiB, samples of 111 tensors 1.4 ms.

The files of a loaded model may be replaced. Its description is kept while it is loaded (`pin`), because the weights in
memory, their tokenizer and their fingerprint belong together. `find_replacement` returns the model with the new files.
"""

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import structlog

from host.private_files import resolve_home
from node.engine.models.model_descriptor import ModelDescriptor
from node.models.embedding_files import (
    EmbeddingFilesError,
    has_embedding_files,
    is_known_matryoshka,
    read_embedding_layout,
)
from node.models.embedding_layout import EmbeddingLayout
from node.models.encoder_files import (
    is_cross_encoder,
    is_encoder,
    predict_encoder_transient,
    read_encoder_shape,
)
from node.models.folder_scan import FolderScan, scan_places
from node.models.folders import MODEL, find_model_folders, find_snapshots, get_hub_folder, has_gguf, list_names
from node.models.identity_files import IDENTITY_FILES
from node.models.memory_prediction import (
    estimate_loaded_bytes,
    find_unknown_dimensions,
    get_context_tokens,
    name_quantization,
    predict_kv,
    predict_transient,
)
from node.models.rerank_files import is_reranker, read_rerank_layout
from node.models.template_files import has_reasoning
from node.models.weight_files import (
    Config,
    list_visible_files,
    parse_json_object,
    read_tensor_sizes,
    read_weight_headers,
)
from node.settings import ModelSettings
from wire.identity import is_valid_model
from wire.models.kind import ModelKind
from wire.report import KvParameters

SCAN_VALID_SECONDS = 2.0
"""Age of the last scan in seconds, from which on an unknown name causes a new scan (`ModelCatalogue.find_fresh`)."""
SCAN_TIMEOUT_SECONDS = 5.0
"""Maximum seconds for which a scan waits for a folder. The thread of a scan also answers the pings of the agent."""
FIRST_SCAN_TIMEOUT_SECONDS = 10.0
"""Maximum seconds for which the first scan waits for a folder. A later scan adds the models of a slower folder."""
SCAN_INTERVAL_SECONDS = 30.0
"""Age of the last scan in seconds, from which on `ModelCatalogue.refresh` scans again."""
EMBEDDED = Path(__file__).with_name("macpool-tiny")
"""Folder of the embedded model."""
GGUF = "it is in GGUF, the format of llama.cpp: download its MLX or safetensors build, for example from mlx-community"
"""Cause of a folder with weights of llama.cpp."""

log = structlog.get_logger("node.models.catalogue")


class ModelCatalogue:
    """Models in the model folders of `settings` and in Hugging Face's cache, by the last scan.

    Models that the MLX engine cannot serve are included, with their cause. Any thread may call any method: one thread
    scans at a time, and all threads see the complete result of one scan. `environment` has the variables that locate
    the cache. `find_content` returns the content hash of a model folder, empty if a file is not hashed.
    """

    def __init__(
        self,
        settings: ModelSettings,
        environment: Mapping[str, str] = os.environ,
        find_content: Callable[[Path], str] = lambda folder: "",
    ) -> None:
        self._find_content = find_content
        self._settings = settings
        self._scans = [
            FolderScan(folder, partial(self._read_folder, folder, is_hub=False)) for folder in settings.folders
        ]
        if settings.use_huggingface_cache:
            hub = str(get_hub_folder(environment))
            self._scans.append(FolderScan(hub, partial(self._read_folder, hub, is_hub=True)))
        self._known: Mapping[str, ModelDescriptor] = {}
        self._pinned: Mapping[str, ModelDescriptor] = {}
        self._pinned_states: dict[str, tuple[object, ...]] = {}
        """State of the files of a pinned model when it was pinned."""
        self._described: dict[Path, tuple[tuple[object, ...], ModelDescriptor]] = {}
        self._scanned: float | None = None
        """Monotonic time of the last scan; None before the first one."""
        self._scanning = threading.RLock()
        """Held during a scan, also by threads that wait for its result."""
        self._changing = threading.Lock()
        """Held while `_known` or `_pinned` are replaced: the engine pins models while another thread scans."""

    def get_models(self) -> Mapping[str, ModelDescriptor]:
        """Return all models by name, including those that cannot be served (`ModelDescriptor.cause`)."""
        return {**self._known, **self._pinned}

    def get_fingerprints(self) -> Mapping[str, str]:
        """Return the fingerprints of all models by name."""
        return {name: model.fingerprint for name, model in self.get_models().items()}

    def find(self, name: str) -> ModelDescriptor | None:
        """Return the descriptor of a model by its name; None if unknown. A pinned model has that of its load."""
        return self._pinned.get(name) or self._known.get(name)

    def find_fresh(self, name: str) -> ModelDescriptor | None:
        """Return a model by its name; None if it is unknown.

        An unknown name causes a new scan, because the model may just have been downloaded. The last scan suffices if it
        ended less than `SCAN_VALID_SECONDS` ago. The scan blocks the caller, for each lost network disk by up to
        `SCAN_TIMEOUT_SECONDS`.
        """
        if self.find(name) is None:
            with self._scanning:
                if not self._is_recent(SCAN_VALID_SECONDS):
                    self.scan()
        return self.find(name)

    def pin(self, descriptor: ModelDescriptor) -> None:
        """Keep the description of a loaded model until `unpin`, even if its files are replaced."""
        state = _read_file_state(Path(descriptor.folder))
        with self._changing:
            self._pinned_states[descriptor.name] = state
            self._pinned = {**self._pinned, descriptor.name: descriptor}

    def unpin(self, name: str) -> None:
        """Use the description of the files on the disk again, after a pinned model was unloaded.

        Do nothing for a model that is not pinned.
        """
        with self._changing:
            self._pinned = {other: model for other, model in self._pinned.items() if other != name}

    def find_replacement(self, descriptor: ModelDescriptor) -> ModelDescriptor | None:
        """Return the model whose files have replaced those of the loaded model `descriptor`, by the last scan.

        Return None if the files are unchanged or missing, or the new model cannot be served.
        """
        newest = self._known.get(descriptor.name)
        return None if newest is None or newest.cause or newest.version.is_same(descriptor.version) else newest

    def is_unchanged(self, descriptor: ModelDescriptor) -> bool:
        """Read the files of a model again, without a scan, and return whether its fingerprint is unchanged.

        Return False if the files are missing, unreadable or invalid. If the fingerprint has changed, store the new
        description.
        """
        try:
            newest = self._describe(descriptor.name, Path(descriptor.folder))
        except (OSError, ValueError):
            return False
        if newest is not None and newest.fingerprint != descriptor.fingerprint:
            with self._changing:
                self._known = {**self._known, descriptor.name: newest}
        return newest is not None and newest.fingerprint == descriptor.fingerprint

    def refresh(self) -> bool:
        """Scan again if the last scan is older than `SCAN_INTERVAL_SECONDS`. Return whether the models have changed.

        Return False if no scan was due. The scan blocks the caller (`scan`).
        """
        if self._is_recent(SCAN_INTERVAL_SECONDS):
            return False
        before = self._known
        self.scan()
        return self._known != before

    def scan(self) -> None:
        """Scan all folders and replace the result of the last scan.

        The embedded model is included only if no other model can be served. A folder on a lost network disk keeps the
        models of its last scan; later they get a `cause` (`FolderScan.get_models`). The scan waits for such a folder
        for `SCAN_TIMEOUT_SECONDS`, the first scan for `FIRST_SCAN_TIMEOUT_SECONDS`.
        """
        with self._scanning:
            models = self._read_folders(FIRST_SCAN_TIMEOUT_SECONDS if self._scanned is None else SCAN_TIMEOUT_SECONDS)
            with self._changing:
                self._known, self._scanned = models, time.monotonic()
                self._pinned = {name: self._add_content(pinned) for name, pinned in self._pinned.items()}

    def _is_recent(self, seconds: float) -> bool:
        """Return whether the last scan ended less than `seconds` ago."""
        return self._scanned is not None and time.monotonic() - self._scanned < seconds

    def _read_folders(self, timeout_seconds: float) -> dict[str, ModelDescriptor]:
        models = scan_places(self._scans, timeout_seconds)
        if all(model.cause for model in models.values()):
            embedded = self._describe_cached(EMBEDDED.name, EMBEDDED)
            models |= {embedded.name: embedded} if embedded is not None else {}
        return models

    def _read_folder(self, top: str, *, is_hub: bool) -> dict[str, ModelDescriptor]:
        """Return the models of a folder, or of a cache of Hugging Face, by name. Blocks while its disk is lost."""
        path = resolve_home(top)
        found: Iterable[tuple[str, Path]] = find_snapshots(path) if is_hub else find_model_folders(path)
        models: dict[str, ModelDescriptor] = {}
        for name, folder in found:
            if name not in models and is_valid_model(name):
                described = self._describe_cached(name, folder)
                if described is not None:
                    content = self._find_content_now(folder)
                    models[name] = replace(described, content=content) if content else described
        return models

    def _find_content_now(self, folder: Path) -> str:
        """Return the content hash of a model folder, empty also if the folder cannot be read."""
        try:
            return self._find_content(folder)
        except OSError:
            return ""

    def _add_content(self, pinned: ModelDescriptor) -> ModelDescriptor:
        """Return the description of a loaded model with its content hash, if its files were hashed meanwhile.

        The hash belongs to the loaded model only if the files have not changed since they were loaded.
        """
        newest = self._known.get(pinned.name)
        if pinned.content or newest is None or not newest.content or newest.folder != pinned.folder:
            return pinned
        unchanged = _read_file_state(Path(pinned.folder)) == self._pinned_states.get(pinned.name)
        return replace(pinned, content=newest.content) if unchanged else pinned

    def _describe(self, name: str, folder: Path) -> ModelDescriptor | None:
        """Describe a folder as `describe_folder` does, with the kind that the settings name for the model."""
        return describe_folder(name, folder, self._settings.get_kinds().get(name, ""))

    def _describe_cached(self, name: str, folder: Path) -> ModelDescriptor | None:
        """Describe a folder as `_describe` does, or return the previous description if none of its files changed.

        An error of the files becomes the `cause` of the description.
        """
        try:
            state = _read_file_state(folder)
            cached = self._described.get(folder)
            if cached is not None and cached[0] == (name, *state):
                return cached[1]
            descriptor = self._describe(name, folder)
        except OSError as error:
            return ModelDescriptor(name, folder, cause=f"its files cannot be read: {error.strerror or error}")
        except Exception as error:  # unknown files may raise any error; all other models are still served
            return ModelDescriptor(name, folder, cause=f"its files are invalid: {type(error).__name__}: {error}"[:300])
        if descriptor is not None:
            descriptor = replace(descriptor, written=max((stat[2] for stat in state), default=0) / 1e9)
            self._described[folder] = ((name, *state), descriptor)
        return descriptor


def _read_file_state(folder: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return the name, bytes, time of the last change in ns and inode of each relevant file, to detect a change."""
    files = [folder / name for name in IDENTITY_FILES] + list_visible_files(folder, "*.safetensors")
    stats = [(str(file), file.stat()) for file in files if file.exists()]
    return tuple((name, stat.st_size, stat.st_mtime_ns, stat.st_ino) for name, stat in stats)


def describe_folder(name: str, folder: Path, kind: str = "") -> ModelDescriptor | None:
    """Return the descriptor of a model folder; None if its model neither generates text nor computes vectors or scores.

    `kind` is the kind of the model by setting (`ModelKind`); empty: its files decide. The `cause` of the descriptor is
    the reason why the model cannot be served. Raise `OSError` if the folder cannot be read, and `ValueError` if the
    weights of a Dense layer are invalid.
    """
    if not (folder / MODEL).exists() and has_gguf(list_names(folder)):
        return ModelDescriptor(name, folder, cause=GGUF)
    digest = hashlib.sha256()
    for part in IDENTITY_FILES:
        if (folder / part).exists():
            digest.update(part.encode() + b"\0")
            if part.endswith(".safetensors"):
                read_tensor_sizes(folder / part, digest)
            else:
                digest.update((folder / part).read_bytes())
    try:
        config = parse_json_object((folder / "config.json").read_bytes())
    except ValueError as error:
        return ModelDescriptor(name, folder, cause=f"its config.json is not a JSON object: {error}")
    model_kind = find_kind(name, folder, config, kind)
    if model_kind is None:
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
    layout, cause = _read_layout(name, folder, config, model_kind)
    dense = 0 if layout is None else sum(layer.nbytes for layer in layout.dense)
    context, kv = get_context_tokens(config), predict_kv(config, weights.float_size)
    forward = predict_transient(config, weights.float_size)
    if layout is not None and layout.encoder is not None:
        context, kv = layout.encoder.context, KvParameters(0)
        forward = predict_encoder_transient(forward)
    if layout is not None and layout.max_tokens:
        context = min(context, layout.max_tokens)
    return ModelDescriptor(
        name=name,
        folder=folder,
        fingerprint=digest.hexdigest()[:32],
        weights=estimate_loaded_bytes(config, weights) + dense,
        context=context,
        kv=kv,
        cause=weights.cause or cause,
        forward=forward,
        quantization=name_quantization(config, weights.float_size),
        removable=folder != EMBEDDED,
        stored=weights.size + dense,
        kind=model_kind,
        layout=layout,
        reasoning=model_kind is ModelKind.CHAT and has_reasoning(folder),
    )


def _read_layout(name: str, folder: Path, config: Config, kind: ModelKind) -> tuple[EmbeddingLayout | None, str]:
    """Return how a model computes vectors or scores, or the reason why it cannot be served.

    A chat model computes neither.
    """
    if kind is ModelKind.CHAT:
        return None, "it is an encoder, which generates no text" if is_encoder(config) else ""
    try:
        encoder = read_encoder_shape(config) if is_encoder(config) else None
        if encoder is not None and kind is ModelKind.EMBED and not has_embedding_files(folder):
            return None, "it is an encoder without files that name its pooling (1_Pooling/config.json)"
        if kind is ModelKind.RERANK:
            return read_rerank_layout(folder, config, encoder), ""
        return read_embedding_layout(folder, config, encoder, can_shorten=is_known_matryoshka(name, config)), ""
    except EmbeddingFilesError as error:
        return None, f"its files {error}"


def find_kind(name: str, folder: Path, config: Config, kind: str = "") -> ModelKind | None:
    """Return the kind of a model by its files; None if it neither generates text nor computes vectors or scores.

    `kind` is the `ModelKind` that the settings name for the model, which has priority; empty without one. A model with
    files of sentence-transformers computes vectors or scores, even if it could generate text.
    """
    embeds = has_embedding_files(folder)
    has_layers = embeds and (is_bare_model(config) or is_encoder(config))
    if not (is_text_model(config) or has_layers or is_cross_encoder(config)):
        return None
    if kind:
        return ModelKind(kind)
    if is_reranker(folder, name, config):
        return ModelKind.RERANK
    return ModelKind.EMBED if embeds else ModelKind.CHAT


def is_bare_model(config: Config) -> bool:
    """Return whether a parsed `config.json` belongs to a model without its output layer, such as `MistralModel`."""
    named = config.get("architectures")
    names = [str(name) for name in cast("Sequence[object]", named)] if isinstance(named, list) else []
    return isinstance(config.get("model_type"), str) and any(name.endswith("Model") for name in names)


def is_text_model(config: Config) -> bool:
    """Return whether a parsed `config.json` belongs to a model that generates text.

    Return True also for a config with a `model_type` and without `architectures`.
    """
    if not isinstance(config.get("model_type"), str):
        return False
    named = config.get("architectures")
    if not isinstance(named, Sequence) or not named:
        return True
    names = [str(name) for name in cast("Sequence[object]", named)]
    if any("CausalLM" in name or "LMHeadModel" in name for name in names):
        return True
    return "text_config" in config and any("ConditionalGeneration" in name for name in names)
