"""Find and describe the video packages on this machine: diffusers folders in the places of models. No weight is loaded.

A package is a folder with `model_index.json` whose `_class_name` the worker supports; all other folders are ignored. An
entry in `model_index.json` does not prove that the component exists. Only components with files of their own count. The
components of a quantized package have no configs. Sizes therefore come from the files of the weights, and quantization
from the headers of these files. The shape comes from configs where they exist, or else from defaults for packages with
one or two experts.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from host.private_files import resolve_home
from node.models.folders import PACKAGE, find_model_folders, find_snapshots
from node.models.weight_files import Digest, list_visible_files, read_header
from wire.identity import is_valid_model
from wire.video import VideoPackage

PIPELINES = frozenset({"WanPipeline"})
"""Values of `_class_name` that the worker supports."""
EXPERTS = ("transformer", "transformer_2")
"""Components with the weights of an expert."""
NEEDED = ("transformer", "vae", "text_encoder")
"""Components without which a package cannot be used."""
TOKENIZERS = ("tokenizer.json", "spiece.model")
"""Files of a tokenizer, of which one is needed."""
MAX_INDEX_BYTES = 256 * 1024
"""Maximum bytes that are read of an index or config."""


@dataclass(frozen=True, slots=True)
class Package:
    """Video package and the folder that contains it."""

    folder: Path
    described: VideoPackage


@dataclass(frozen=True, slots=True)
class PackageComponent:
    """Weights of one component of a video package, such as a transformer or the VAE."""

    size: int = 0
    """Bytes of the weights; 0 if the component has none."""
    bits: int = 0
    """Bits of the quantization; 0 without quantization."""
    cause: str = ""
    """Reason why the weights cannot be used; empty if they can."""


def find_packages(folders: tuple[str, ...], hub: Path | None) -> dict[str, Package]:
    """Return all packages of the model folders and of the Hugging Face cache `hub`, by name; None for no cache.

    Packages that cannot be used are included, with the reason as `cause`. Packages with invalid names are omitted. Of
    packages with equal names, the first is returned.
    """
    packages: dict[str, Package] = {}
    for name, folder in _find_folders(folders, hub):
        if name not in packages and is_valid_model(name):
            described = _describe_safely(name, folder)
            if described is not None:
                packages[name] = Package(folder, described)
    return packages


def _find_folders(folders: tuple[str, ...], hub: Path | None) -> Iterator[tuple[str, Path]]:
    for folder in folders:
        yield from find_model_folders(resolve_home(folder), PACKAGE)
    if hub is not None:
        yield from find_snapshots(hub, PACKAGE)


def _describe_safely(name: str, folder: Path) -> VideoPackage | None:
    try:
        return describe_package(name, folder)
    except Exception as error:  # unknown files may raise any error; all other packages stay available
        return VideoPackage(name, cause=f"its files are invalid: {type(error).__name__}: {error}"[:300])


def describe_package(name: str, folder: Path) -> VideoPackage | None:
    """Return the description of the package in `folder`, without loading it; None if it is not a supported package.

    Exceptions for invalid configs of its components propagate.
    """
    try:
        index = _read_object(folder / PACKAGE)
    except (OSError, ValueError, RecursionError):
        return None
    pipeline = index.get("_class_name")
    if not isinstance(pipeline, str) or pipeline not in PIPELINES:
        return None
    digest = hashlib.sha256(json.dumps(index, sort_keys=True).encode())
    parts = {part: _read_component(folder / part, digest) for part in sorted({*EXPERTS, *NEEDED})}
    experts = [parts[part] for part in EXPERTS if parts[part].size]
    two = len(experts) == len(EXPERTS)
    side = _compute_token_side(folder, two=two)
    return VideoPackage(
        name,
        digest.hexdigest()[:32],
        pipeline,
        "",
        max((expert.bits for expert in experts), default=0),
        sum(component.size for component in parts.values()),
        max((expert.size for expert in experts), default=0),
        max(1, len(experts)),
        side,
        _read_vae_config(folder).get("scale_factor_temporal", 4),
        16 if two else 24,
        40 if two else 50,
        81 if two else 121,
        _find_cause(folder, index, parts),
    )


def _find_cause(folder: Path, index: dict[str, Any], parts: dict[str, PackageComponent]) -> str:
    """Return why a package cannot be used; empty when it can."""
    broken = next((f"{part}: {component.cause}" for part, component in parts.items() if component.cause), "")
    missing = [part for part in NEEDED if not parts[part].size]
    if _is_named(index, "transformer_2") and not parts["transformer_2"].size:
        missing.append("transformer_2")
    if not any((folder / "tokenizer" / name).exists() for name in TOKENIZERS):
        missing.append("tokenizer")
    if broken or not missing:
        return broken
    return f"it has no {', '.join(missing)}: download it again"


def _is_named(index: dict[str, Any], part: str) -> bool:
    """Return whether the index names a component, and not as null."""
    named: object = index.get(part)
    words = cast("list[object]", named) if isinstance(named, list) else []
    return bool(words) and words[0] is not None


def _compute_token_side(folder: Path, *, two: bool) -> int:
    """Return the side of a spatial token in pixels: the VAE's spatial scale times patches of two."""
    scale = _read_vae_config(folder).get("scale_factor_spatial", 8 if two else 16)
    return 2 * scale


def _read_vae_config(folder: Path) -> dict[str, int]:
    try:
        config = _read_object(folder / "vae" / "config.json")
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in config.items() if isinstance(value, int) and 0 < value <= 64}


def _read_component(folder: Path, digest: Digest) -> PackageComponent:
    """Read the headers of the weight files of a component, and add them to `digest`. The weights are not read.

    The first unreadable header ends the reading and is the `cause` of the result.
    """
    size = bits = 0
    for file in list_visible_files(folder, "*.safetensors"):
        try:
            raw, end = read_header(file)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            return PackageComponent(size, bits, f"{file.name}: {error}")
        digest.update(folder.name.encode() + b"\0" + raw)
        size += end
        bits = max(bits, _parse_bits(raw))
    return PackageComponent(size, bits)


def _parse_bits(raw: bytes) -> int:
    """Return the quantization bits that the engine wrote to a header; 0 without quantization."""
    metadata: object = json.loads(raw).get("__metadata__")
    level = cast("dict[str, object]", metadata).get("quantization_level") if isinstance(metadata, dict) else None
    return int(level) if isinstance(level, str) and level.isdigit() else 0


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raise `ValueError` for any other JSON value."""
    with path.open("rb") as file:
        raw = file.read(MAX_INDEX_BYTES)
    parsed: object = json.loads(raw)
    if not isinstance(parsed, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004  one error for all broken files
    return cast("dict[str, Any]", parsed)
