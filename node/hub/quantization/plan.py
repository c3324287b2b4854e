"""Plan a quantization on this node: check the order, choose the folders and predict the cost.

The result is written to a temporary folder next to its target. The catalogue ignores that folder, because its name
begins with a dot. A complete result is renamed to the target. The target is in the first writable model folder of the
settings, or else in the node's own model folder, which the catalogue always searches.
"""

import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from host.private_files import create_private_folder, resolve_home
from node.hub.download.disk_space import DiskSpace
from node.hub.errors import ModelFileError
from node.hub.model_places import locate_model
from node.hub.quantization.prediction import BITS, QuantizationCost, StoredTensor, predict_cost
from node.models.catalogue import EMBEDDED, describe_folder
from node.models.folders import MAX_DEPTH, MODEL, PACKAGE, has_gguf, list_names
from node.models.memory_prediction import is_quantized, name_quantization
from node.models.weight_files import parse_json_object, read_header
from node.settings import ModelSettings
from wire.frames import QuantizeModel
from wire.frames.model_files import ModelOrderCode
from wire.identity import is_valid_model

TEMPORARY = ".quantizing-"
"""Prefix of the temporary folder in which a result is written."""
OTHER_CONFIG = "hf_quant_config.json"
"""File in which exports of ModelOpt describe their quantization."""
DEFAULT_RESERVE = -1
"""Value of `reserve` in `DiskSpace` for the default reserve."""


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """Checked quantization with its name, folders and cost. Its memory is not leased yet."""

    name: str
    """Name of the result."""
    bits: int
    """Bits per weight of the result."""
    source: Path
    """Folder of the model."""
    target: Path
    """Folder of the result."""
    root: Path
    """Folder of models below which `target` is created (`choose_folder`)."""
    cost: QuantizationCost
    """Predicted disk space and memory."""

    @property
    def temporary(self) -> Path:
        """Folder of the incomplete result."""
        return self.target.with_name(f"{TEMPORARY}{self.target.name}")

    def prepare(self) -> None:
        """Create the parent folders of the target, and delete an incomplete result of an earlier quantization.

        Raise `OSError` on failure.
        """
        self.target.parent.mkdir(parents=True, exist_ok=True)
        if self.temporary.exists():
            shutil.rmtree(self.temporary)

    def complete(self) -> None:
        """Check that the result can be loaded, and rename its folder to the target.

        Raise `ModelFileError` if the result cannot be loaded or the target exists; `OSError` if the result cannot be
        read or renamed. Raise `ValueError` if the weights of a Dense layer are invalid.
        """
        descriptor = describe_folder(self.name, self.temporary)
        if descriptor is None or descriptor.cause:
            cause = descriptor.cause if descriptor is not None else "it is not a text model"
            raise ModelFileError(ModelOrderCode.FAILED, f"the result {self.name} cannot be loaded: {cause}")
        if self.target.exists():
            raise _build_taken(self.name)
        os.rename(self.temporary, self.target)

    def discard(self) -> None:
        """Delete an incomplete result, and then all empty folders between it and `root`. Errors are ignored."""
        with suppress(OSError):
            shutil.rmtree(self.temporary)
        for parent in self.target.parents:
            if parent == self.root:
                break
            with suppress(OSError):
                parent.rmdir()


def plan_quantization(
    order: QuantizeModel, settings: ModelSettings, own: Path, environment: Mapping[str, str]
) -> QuantizationPlan:
    """Check an order and return its plan.

    `own` is the node's own model folder. `environment` are the variables that locate the Hugging Face cache.

    Raise `ModelFileError` if the order cannot be performed, because of the model, the name, the bits or the free disk
    space. Raise `OSError` if the weights cannot be read, `ValueError` if those of a Dense layer are invalid.
    """
    if order.bits not in BITS:
        known = ", ".join(map(str, BITS[:-1]))
        raise ModelFileError(
            ModelOrderCode.INVALID, f"weights cannot have {order.bits} bits: use {known} or {BITS[-1]}"
        )
    _check_name(order.name)
    source = _find_source(order.model, settings, environment)
    _check_source(order.model, source)
    if _has_model(order.name, settings, environment):
        raise _build_taken(order.name)
    root = choose_folder(settings, own)
    target = root / order.name
    _check_parents(target, root)
    if target.exists():
        raise _build_taken(order.name)
    cost = predict_cost(read_tensors(source), order.bits)
    DiskSpace(root, DEFAULT_RESERVE, "the quantized model").check(cost.stored)
    return QuantizationPlan(order.name, order.bits, source, target, root, cost)


def choose_folder(settings: ModelSettings, own: Path) -> Path:
    """Return the first writable model folder of the settings; without one, create `own` and return it.

    A folder that is a model itself is skipped, because the catalogue finds no models below it. Raise `ModelFileError`
    if `own` cannot be created.
    """
    for folder in (resolve_home(path) for path in settings.folders):
        if folder != own and folder.is_dir() and os.access(folder, os.W_OK | os.X_OK) and not _is_model(folder):
            return folder
    try:
        return create_private_folder(own)
    except OSError as error:
        raise ModelFileError(
            ModelOrderCode.FAILED, f"the model folder {own} cannot be created: {error.strerror}"
        ) from None


def read_tensors(folder: Path) -> list[StoredTensor]:
    """Return the tensors of all weight files in the folder of a model, from the headers of the files.

    Raise `OSError` if a file cannot be read, `ModelFileError` if a header is invalid or a file is incomplete.
    """
    tensors: list[StoredTensor] = []
    for file in sorted(folder.glob("model*.safetensors")):
        try:
            tensors += _parse_tensors(parse_json_object(read_header(file)[0]))
        except ValueError as error:
            raise ModelFileError(ModelOrderCode.INVALID, f"{file.name}: {error}") from None
    return tensors


def _parse_tensors(header: Mapping[str, Any]) -> list[StoredTensor]:
    """Return the tensors of a header. Raise `ValueError` for a tensor without shape."""
    tensors: list[StoredTensor] = []
    for name, tensor in header.items():
        if name != "__metadata__":
            (first, last), shape = tensor["data_offsets"], tensor.get("shape")
            if not isinstance(shape, list):
                raise ValueError(f"its tensor {name[:100]!r} has no shape: download the file again")
            is_fp8 = str(tensor.get("dtype")).startswith("F8")
            tensors.append(StoredTensor(name, tuple(cast("list[int]", shape)), last - first, is_fp8))
    return tensors


def _find_source(model: str, settings: ModelSettings, environment: Mapping[str, str]) -> Path:
    return EMBEDDED if model == EMBEDDED.name else locate_model(settings, model, environment).folder


def _check_source(model: str, folder: Path) -> None:
    """Raise `ModelFileError` if the weights of a model cannot be quantized."""
    described = describe_folder(model, folder)
    if described is None or described.cause:
        cause = described.cause if described is not None else "it is not a text model"
        raise ModelFileError(ModelOrderCode.INVALID, f"{model} cannot be quantized: {cause}")
    config = parse_json_object((folder / MODEL).read_bytes())
    if is_quantized(config) or (folder / OTHER_CONFIG).exists():
        kind = name_quantization(config, 2)
        text = f"{model} is quantized already ({kind}): quantize the model with unquantized weights"
        raise ModelFileError(ModelOrderCode.INVALID, text)


def _check_name(name: str) -> None:
    """Raise `ModelFileError` if the catalogue would not find a model of this name below a model folder."""
    parts = name.split("/")
    wrong = not is_valid_model(name) or any(not part or part.startswith((".", "models--")) for part in parts)
    if wrong or len(parts) > MAX_DEPTH:
        raise ModelFileError(
            ModelOrderCode.INVALID,
            f"{name[:200]!r} cannot be the name of a model in a model folder: use at most {MAX_DEPTH} parts of "
            "letters, digits, dots and dashes",
        )


def _check_parents(target: Path, root: Path) -> None:
    """Raise `ModelFileError` if a folder above the target is a model, because nothing below a model is found."""
    for parent in target.parents:
        if parent == root:
            return
        if _is_model(parent):
            raise ModelFileError(ModelOrderCode.INVALID, f"{parent} is a model itself: give another name")


def _is_model(folder: Path) -> bool:
    names = list_names(folder)
    return MODEL in names or PACKAGE in names or has_gguf(names)


def _has_model(name: str, settings: ModelSettings, environment: Mapping[str, str]) -> bool:
    if name == EMBEDDED.name:
        return True
    try:
        locate_model(settings, name, environment)
    except ModelFileError:
        return False
    return True


def _build_taken(name: str) -> ModelFileError:
    return ModelFileError(
        ModelOrderCode.NAME_TAKEN, f"this node has a model {name}: give another name, or remove that model"
    )
