"""Read from the files of sentence-transformers how the hidden states of a model become vectors. No code is run.

`modules.json` lists the modules: the transformer, a Pooling, perhaps Dense layers, and perhaps a Normalize. A model
with an unknown module, pooling or activation is not served, because its vectors would be wrong. The folders of modules
must have fixed names, so that a list of modules cannot name other files of the machine.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

from node.models.embedding_layout import Activation, DenseLayer, EmbeddingLayout, EncoderShape, Pooling
from node.models.weight_files import Config, parse_json_object, parse_json_value, read_header

MODULES = "modules.json"
"""File with the list of modules. This path and the paths below are relative to the folder of the model."""
POOLING = "1_Pooling/config.json"
"""File with the pooling."""
PROMPTS = "config_sentence_transformers.json"
"""File with the prompts by name. A prompt is a text that precedes an input."""
LENGTH = "sentence_bert_config.json"
"""File with the maximum length of an input in tokens."""
DENSE_FOLDERS = ("2_Dense", "3_Dense", "4_Dense")
"""Folders of Dense layers, in their order."""
DENSE_FILES = tuple(f"{folder}/{name}" for folder in DENSE_FOLDERS for name in ("config.json", "model.safetensors"))
"""Files of Dense layers."""
MAX_FILE_BYTES = 1024 * 1024
"""Maximum bytes of a file of which `read_file` returns the content. A larger file is an error."""
MAX_PROMPTS = 64
"""Maximum number of prompts of a model. More prompts are an error."""
QWEN = "qwen3-embedding"
"""Part of the names of a family with Matryoshka vectors, in lower case (https://huggingface.co/Qwen/Qwen3-Embedding-0.6B)."""
_POOLING_FOLDER = POOLING.partition("/")[0]
_IGNORED = frozenset({"word_embedding_dimension", "embedding_dimension", "include_prompt"})


_MODES = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_max_tokens": Pooling.MAX,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_mean_sqrt_len_tokens": Pooling.MEAN_SQRT_LENGTH,
    "pooling_mode_weightedmean_tokens": Pooling.WEIGHTED_MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
}


class EmbeddingFilesError(ValueError):
    """Raised for files that define vectors or scores in a form that Macpool does not support.

    The text completes the sentence "its files …".
    """


def has_embedding_files(folder: Path) -> bool:
    """Return whether a model folder has `MODULES` or `POOLING`, the files that define vectors."""
    return (folder / MODULES).exists() or (folder / POOLING).exists()


def is_known_matryoshka(name: str, config: Config) -> bool:
    """Return whether a model belongs to a family whose vectors may be shortened, although its files do not state it."""
    return QWEN in name.lower() and config.get("model_type") == "qwen3"


def read_embedding_layout(
    folder: Path, config: Config, encoder: EncoderShape | None = None, *, can_shorten: bool = False
) -> EmbeddingLayout:
    """Read from the files in the folder of a model how it computes vectors.

    `config` is the parsed config.json. `encoder` is the shape of an encoder; None for any other model. `can_shorten` is
    whether vectors may be shortened although no field allows it. Without `MODULES` and `POOLING`, a vector is the
    normalized state of the last token. Raise `EmbeddingFilesError` for files that Macpool does not support, `OSError`
    for unreadable ones.
    """
    poolings, dense, normalize = (Pooling.LAST,), tuple[DenseLayer, ...](), True
    if has_embedding_files(folder):
        kinds = _list_modules(folder)
        poolings = _read_pooling(folder)
        dense = tuple(_read_dense(folder, path) for kind, path in kinds if kind == "Dense")
        normalize = any(kind == "Normalize" for kind, _ in kinds)
    prompts, default = _read_prompts(folder)
    lengths = _list_lengths(config)
    return EmbeddingLayout(
        poolings=poolings,
        dense=dense,
        normalize=normalize,
        prompts=prompts,
        default_prompt=default,
        max_tokens=read_max_tokens(folder),
        can_shorten=can_shorten or bool(lengths) or config.get("is_matryoshka") is True,
        lengths=lengths,
        encoder=encoder,
    )


def _list_lengths(config: Config) -> tuple[int, ...]:
    """Return the lengths that a config allows for shorter vectors, in numbers."""
    sizes: object = config.get("matryoshka_dimensions")
    lengths = cast("list[object]", sizes) if isinstance(sizes, list) else []
    return tuple(sorted(cast("int", size) for size in lengths if _is_count(size)))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def read_file(folder: Path, name: str) -> bytes | None:
    """Return the content of a file; None if there is none.

    Raise `EmbeddingFilesError` for more than `MAX_FILE_BYTES` bytes, `OSError` for an unreadable file.
    """
    file = folder / name
    if not file.exists():
        return None
    if file.stat().st_size > MAX_FILE_BYTES:
        raise EmbeddingFilesError(f"have a {name} of more than {MAX_FILE_BYTES} bytes")
    return file.read_bytes()


def read_object(folder: Path, name: str) -> Config:
    """Return the JSON object in a file; empty if there is no file.

    Raise `EmbeddingFilesError` for any other content and for more than `MAX_FILE_BYTES` bytes, `OSError` for an
    unreadable file.
    """
    raw = read_file(folder, name)
    try:
        return {} if raw is None else parse_json_object(raw)
    except ValueError as error:
        raise EmbeddingFilesError(f"have a {name} that is not a JSON object: {error}") from None


def _list_modules(folder: Path) -> list[tuple[str, str]]:
    """Return kind and path of each module in order; those of a bare pooling file without `modules.json`."""
    raw = read_file(folder, MODULES)
    if raw is None:
        return [("Transformer", ""), ("Pooling", _POOLING_FOLDER)]
    try:
        modules = parse_json_value(raw)
    except ValueError as error:
        raise EmbeddingFilesError(f"have a {MODULES} that is not JSON: {error}") from None
    if not isinstance(modules, list) or not 2 <= len(cast("list[object]", modules)) <= 3 + len(DENSE_FOLDERS):
        raise EmbeddingFilesError(f"have a {MODULES} without a list of 2 to {3 + len(DENSE_FOLDERS)} modules")
    kinds: list[tuple[str, str]] = []
    for entry in cast("list[object]", modules):
        module: Config = cast("Config", entry) if isinstance(entry, dict) else {}
        kinds.append((str(module.get("type", "")).rpartition(".")[2][:80], str(module.get("path", ""))[:80]))
    _check_order(kinds)
    return kinds


def _check_order(kinds: Sequence[tuple[str, str]]) -> None:
    """Raise `EmbeddingFilesError` unless the modules are a Transformer, a Pooling, Dense layers, and a Normalize."""
    names = [kind for kind, _ in kinds]
    count = names.count("Dense")
    known = ["Transformer", "Pooling", *["Dense"] * count]
    if names not in (known, [*known, "Normalize"]):
        raise EmbeddingFilesError(
            f"list the modules {', '.join(names)}: known are Transformer, Pooling, Dense and Normalize in this order"
        )
    if kinds[0][1]:
        raise EmbeddingFilesError(f"have the transformer in {kinds[0][1]!r}, known is the folder of the model itself")
    if kinds[1][1] != _POOLING_FOLDER:
        raise EmbeddingFilesError(f"have the pooling in {kinds[1][1]!r}, known is {_POOLING_FOLDER}")
    for kind, path in kinds:
        if kind == "Dense" and path not in DENSE_FOLDERS:
            raise EmbeddingFilesError(f"have a Dense layer in {path!r}, known are {', '.join(DENSE_FOLDERS)}")


def _read_pooling(folder: Path) -> tuple[Pooling, ...]:
    """Return the poolings of a model, in the order in which they are joined."""
    config = read_object(folder, POOLING)
    if config.get("include_prompt") is False:
        raise EmbeddingFilesError("exclude the prompt from the pooling, which Macpool does not support")
    named = config.get("pooling_mode")
    if named is not None:
        names = cast("list[object]", named) if isinstance(named, list) else [named]
        try:
            return tuple(Pooling(str(name)) for name in names)
        except ValueError as error:
            raise EmbeddingFilesError(f"name an unknown pooling: {str(error)[:200]}") from None
    unknown = [key for key in config if key not in _MODES and key not in _IGNORED and config[key]]
    if unknown:
        raise EmbeddingFilesError(f"name an unknown pooling: {', '.join(unknown)[:200]}")
    chosen = tuple(pooling for key, pooling in _MODES.items() if config.get(key) is True)
    if not chosen:
        raise EmbeddingFilesError(f"choose no pooling in {POOLING}")
    return chosen


def _read_dense(folder: Path, path: str) -> DenseLayer:
    """Read the shape of a Dense layer from its config and the header of its weights."""
    config, weights = read_object(folder, f"{path}/config.json"), f"{path}/model.safetensors"
    name = str(config.get("activation_function", Activation.TANH)).rpartition(".")[2]
    if name not in [activation.value for activation in Activation]:
        raise EmbeddingFilesError(f"name an unknown activation after {path}: {name[:80]}")
    if not (folder / weights).exists():
        raise EmbeddingFilesError(f"lack {weights}")
    try:
        raw, size = read_header(folder / weights)
        shape: object = cast("Config", parse_json_object(raw)["linear.weight"])["shape"]
    except (KeyError, TypeError, ValueError) as error:
        raise EmbeddingFilesError(f"have invalid weights in {weights}: {error}") from None
    inputs, outputs, bias = config.get("in_features"), config.get("out_features"), config.get("bias", True)
    if shape != [outputs, inputs] or not _is_count(inputs) or not _is_count(outputs):
        raise EmbeddingFilesError(
            f"have weights of the shape {shape} in {weights}, not {[outputs, inputs]} as configured"
        )
    return DenseLayer(weights, cast("int", inputs), cast("int", outputs), bool(bias), Activation(name), size)


def _read_prompts(folder: Path) -> tuple[Mapping[str, str], str]:
    """Return the prompts of a model by name, and the name of the default one; empty without."""
    config = read_object(folder, PROMPTS)
    named = config.get("prompts")
    texts: Config = cast("Config", named) if isinstance(named, dict) else {}
    prompts = {str(name): text for name, text in texts.items() if isinstance(text, str)}
    if len(prompts) != len(texts) or len(prompts) > MAX_PROMPTS:
        raise EmbeddingFilesError(f"have more than {MAX_PROMPTS} prompts or one that is not a text, in {PROMPTS}")
    default = config.get("default_prompt_name") or ""
    if default and default not in prompts:
        raise EmbeddingFilesError(f"name a default prompt that {PROMPTS} does not have: {str(default)[:80]}")
    return prompts, str(default)


def read_max_tokens(folder: Path) -> int:
    """Return the maximum tokens of an input, from the file `LENGTH`; 0 if it has no positive integer.

    Raise `EmbeddingFilesError` if that file is not a JSON object or is too large, and `OSError` if it is unreadable.
    """
    value = read_object(folder, LENGTH).get("max_seq_length")
    return cast("int", value) if _is_count(value) else 0
