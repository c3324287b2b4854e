"""The video packages that lie on this machine: diffusers folders, found where models are and described without loading.

A package is a folder with `model_index.json` whose `_class_name` is one that the worker knows; any other is nothing
to us. What `model_index.json` names is not what is there: components count only with files of their own, and those of a
quantized package have no configs. So sizes come from the weights, quantization from their headers, and the shape from
configs where they are, else from the engine's catalogue, which knows a package with two experts and one with one.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from node.models.catalogue import PACKAGE, Digest, read_header, roots, snapshots
from wire.identity import valid_model
from wire.video import VideoPackage

PIPELINES = frozenset({"WanPipeline"})
EXPERTS = ("transformer", "transformer_2")
NEEDED = ("transformer", "vae", "text_encoder")
TOKENIZERS = ("tokenizer.json", "spiece.model")
LONGEST_INDEX = 256 * 1024


@dataclass(frozen=True, slots=True)
class Package:
    """A package in its folder."""

    folder: Path
    described: VideoPackage


@dataclass(frozen=True, slots=True)
class Component:
    """One component's weights: bytes, the bits that they are quantized to (0: not), why they cannot be used."""

    size: int = 0
    bits: int = 0
    cause: str = ""


def find(folders: tuple[str, ...], hub: Path | None) -> dict[str, Package]:
    """Find all packages by name, those that cannot be used among them."""
    found: dict[str, Package] = {}
    for name, folder in _places(folders, hub):
        if name not in found and valid_model(name):
            described = _described(name, folder)
            if described is not None:
                found[name] = Package(folder, described)
    return found


def _places(folders: tuple[str, ...], hub: Path | None) -> Iterator[tuple[str, Path]]:
    for folder in folders:
        yield from roots(Path(folder).expanduser(), PACKAGE)
    if hub is not None:
        yield from snapshots(hub, PACKAGE)


def _described(name: str, folder: Path) -> VideoPackage | None:
    try:
        return describe(name, folder)
    except Exception as error:  # whatever a stranger's files make of us, the others are offered
        return VideoPackage(name, cause=f"its files make no sense: {type(error).__name__}: {error}"[:300])


def describe(name: str, folder: Path) -> VideoPackage | None:
    """Describe a folder; None when it is no package of a kind that the worker knows."""
    try:
        index = _object(folder / PACKAGE)
    except (OSError, ValueError, RecursionError):
        return None
    pipeline = index.get("_class_name")
    if not isinstance(pipeline, str) or pipeline not in PIPELINES:
        return None
    digest = hashlib.sha256(json.dumps(index, sort_keys=True).encode())
    parts = {part: _component(folder / part, digest) for part in sorted({*EXPERTS, *NEEDED})}
    experts = [parts[part] for part in EXPERTS if parts[part].size]
    two = len(experts) == len(EXPERTS)
    side = _token_side(folder, two=two)
    return VideoPackage(
        name, digest.hexdigest()[:32], pipeline, "", max((one.bits for one in experts), default=0),
        sum(one.size for one in parts.values()), max((one.size for one in experts), default=0), max(1, len(experts)),
        side, _vae(folder).get("scale_factor_temporal", 4), 16 if two else 24, 40 if two else 50, 81 if two else 121,
        _cause(folder, index, parts),
    )  # fmt: skip


def _cause(folder: Path, index: dict[str, Any], parts: dict[str, Component]) -> str:
    """Say why a package cannot be used; empty when it can."""
    broken = next((f"{part}: {one.cause}" for part, one in parts.items() if one.cause), "")
    missing = [part for part in NEEDED if not parts[part].size]
    if _named(index, "transformer_2") and not parts["transformer_2"].size:
        missing.append("transformer_2")
    if not any((folder / "tokenizer" / name).exists() for name in TOKENIZERS):
        missing.append("tokenizer")
    if broken or not missing:
        return broken
    return f"it has no {', '.join(missing)}: download it again"


def _named(index: dict[str, Any], part: str) -> bool:
    """Whether a component is named, and not as nothing."""
    named: object = index.get(part)
    words = cast("list[object]", named) if isinstance(named, list) else []
    return bool(words) and words[0] is not None


def _token_side(folder: Path, *, two: bool) -> int:
    """Give the pixels of a spatial token's side: what the VAE takes together, in patches of two."""
    scale = _vae(folder).get("scale_factor_spatial", 8 if two else 16)
    return 2 * scale


def _vae(folder: Path) -> dict[str, int]:
    try:
        config = _object(folder / "vae" / "config.json")
    except (OSError, ValueError):
        return {}
    return {key: value for key, value in config.items() if isinstance(value, int) and 0 < value <= 64}


def _component(folder: Path, digest: Digest) -> Component:
    """Read the headers of a component's weights; nothing of the weights is read."""
    size = bits = 0
    for file in sorted(folder.glob("*.safetensors")):
        try:
            raw, end = read_header(file)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
            return Component(size, bits, f"{file.name}: {error}")
        digest.update(folder.name.encode() + b"\0" + raw)
        size += end
        bits = max(bits, _bits(raw))
    return Component(size, bits)


def _bits(raw: bytes) -> int:
    """Find in a header what the engine wrote when it quantized."""
    said: object = json.loads(raw).get("__metadata__")
    level = cast("dict[str, object]", said).get("quantization_level") if isinstance(said, dict) else None
    return int(level) if isinstance(level, str) and level.isdigit() else 0


def _object(path: Path) -> dict[str, Any]:
    """Read a JSON object; ValueError for anything else."""
    with path.open("rb") as file:
        raw = file.read(LONGEST_INDEX)
    found: object = json.loads(raw)
    if not isinstance(found, dict):
        raise ValueError("it is no object")  # noqa: TRY004  one error for all broken files
    return cast("dict[str, Any]", found)
