"""Read the headers of safetensors files: sizes, types and completeness, and hash samples of every tensor."""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, cast

MAX_HEADER_BYTES = 100 * 1024 * 1024
"""Maximum bytes of a safetensors header (the format's own limit)."""
SAMPLE_BYTES = 4096
"""Bytes of one sample of a tensor: the physical sector size of most disks. Smaller samples would not be faster."""
NUMBER_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "F32": 4, "F16": 2, "BF16": 2}
"""Bytes of one number by the names of its type, in configs and in headers."""
_FP8 = frozenset({"F8_E4M3", "F8_E5M2"})

Config = Mapping[str, Any]
"""JSON object of a file of a model, such as its `config.json`."""


class Digest(Protocol):
    """Hash that is updated with bytes, such as those of hashlib."""

    def update(self, data: bytes, /) -> None:
        """Add bytes to the hash."""
        ...


@dataclass(frozen=True, slots=True)
class WeightHeaders:
    """Sizes of a model's weights, from the headers of its safetensors files."""

    size: int = 0
    """Bytes of all tensors."""
    float_size: int = 2
    """Bytes of one number of the widest unquantized type, such as 2 for bf16.

    The last file with an unquantized type decides; 2 if no file has such a type.
    """
    cause: str = ""
    """Reason why the weights cannot be used; empty if they can."""
    fp8: int = 0
    """Bytes of the tensors in fp8."""


def read_weight_headers(folder: Path, digest: Digest) -> WeightHeaders:
    """Read the headers of all weight files in a model folder, and return the sizes of the weights.

    The headers and samples of all tensors are added to `digest`. If files are missing, incomplete or invalid, the
    result has only a `cause`, and its sizes are defaults. Raise `OSError` if a file cannot be read.
    """
    files = sorted(folder.glob("model*.safetensors"))
    missing = sorted(_list_indexed_files(folder) - {file.name for file in files})
    if missing:
        return WeightHeaders(
            cause=f"{len(missing)} of its weight files are missing, such as {missing[0]}: download the model again"
        )
    if not files:
        return WeightHeaders(cause="it has no model*.safetensors")
    headers = WeightHeaders()
    for file in files:
        try:
            size, float_size, fp8 = read_tensor_sizes(file, digest)
        except ValueError as error:
            return WeightHeaders(cause=f"{file.name}: {error}")
        headers = replace(
            headers, size=headers.size + size, float_size=float_size or headers.float_size, fp8=headers.fp8 + fp8
        )
    return headers


def _list_indexed_files(folder: Path) -> set[str]:
    try:
        index = parse_json_object((folder / "model.safetensors.index.json").read_bytes())
    except (OSError, ValueError):
        return set()
    named = index.get("weight_map")
    return {str(name) for name in cast("dict[str, object]", named).values()} if isinstance(named, dict) else set()


def list_visible_files(folder: Path, pattern: str) -> list[Path]:
    """Return the sorted files in a folder that match `pattern` and whose names do not begin with a dot.

    Some disks, such as exFAT, and network shares have no extended attributes. There, macOS stores the attributes of a
    file `NAME` in a file `._NAME`, which has no content of the model.
    """
    return sorted(file for file in folder.glob(pattern) if not file.name.startswith("."))


def read_tensor_sizes(file: Path, digest: Digest) -> tuple[int, int, int]:
    """Read the header of a safetensors file, and add the header and samples of the tensors to `digest`.

    Return the sizes in bytes of all tensors, of one number of the widest unquantized type, and of the tensors in fp8.
    The second is 0 if all types are quantized. Raise `ValueError` if the header is invalid or the file is
    incomplete, and `OSError` if the file cannot be read.
    """
    raw, end = read_header(file)
    tensors = [cast("Config", tensor) for key, tensor in parse_json_object(raw).items() if key != "__metadata__"]
    digest.update(raw)
    _hash_samples(file, 8 + len(raw), [tensor["data_offsets"] for tensor in tensors], digest)
    fp8 = sum(
        tensor["data_offsets"][1] - tensor["data_offsets"][0] for tensor in tensors if tensor.get("dtype") in _FP8
    )
    return end, max((NUMBER_BYTES.get(str(tensor.get("dtype")), 0) for tensor in tensors), default=0), fp8


def _hash_samples(file: Path, begin: int, extents: Iterable[Sequence[int]], digest: Digest) -> None:
    """Add the first, middle and last `SAMPLE_BYTES` bytes of every tensor to `digest`, in the order of the header.

    Of a tensor without more bytes than that, add all. Extents count from `begin`, the end of the header.
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

    Raise `ValueError` if the header is not a JSON object, a tensor has no valid offsets, or the file is incomplete.
    Raise `OSError` if the file cannot be read.
    """
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise ValueError(f"not a safetensors file: its header claims {length} bytes")
        raw = opened.read(length)
        size = os.fstat(opened.fileno()).st_size
    if len(raw) < length:
        raise ValueError(f"the file ends within its header, at {size} bytes: download it again")
    entries = parse_json_object(raw).items()
    end = max((_get_end(name, entry) for name, entry in entries if name != "__metadata__"), default=0)
    if 8 + length + end > size:
        raise ValueError(f"the file is incomplete: it has {size} of {8 + length + end} bytes: download it again")
    return raw, end


def _get_end(name: str, entry: object) -> int:
    """Return the end of a tensor in the data of its file. Raise `ValueError` if its entry has no valid offsets."""
    offsets = cast("Config", entry).get("data_offsets") if isinstance(entry, dict) else None
    match offsets:
        case [int(first), int(last)] if 0 <= first <= last:
            return last
        case _:
            raise ValueError(f"its tensor {name[:100]!r} has no valid data_offsets: download the file again")


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """Parse a JSON object. Raise `ValueError` for any other content."""
    parsed = parse_json_value(raw)
    if not isinstance(parsed, dict):
        raise ValueError("it is not a JSON object")  # noqa: TRY004  one error for all broken files
    return cast("dict[str, Any]", parsed)


def parse_json_value(raw: bytes) -> object:
    """Parse a JSON document of any type. Raise `ValueError` for any other content, or if the nesting is too deep."""
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("its JSON has too many levels of nesting") from None
