"""Select the files of a repository that serving a model needs. Pure.

Serving needs the weights, the JSON and text files next to them, and `IDENTITY_FILES`, also in subfolders. Weights are
the files `model*.safetensors`, or all safetensors files if none has such a name. Other formats of the weights, code,
pictures and texts for people are not needed.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from node.models.identity_files import IDENTITY_FILES
from wire.models.files import ModelFile

WEIGHTS = "model*.safetensors"
_NEEDED = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")


def select_files(files: Sequence[ModelFile]) -> tuple[tuple[ModelFile, ...], tuple[ModelFile, ...]]:
    """Return the files that serving needs, and those that it does not need, both in the order of `files`."""
    has_weights = any(is_weight_file(file.path) for file in files)
    needed = tuple(file for file in files if _is_needed(file.path, has_weights=has_weights))
    return needed, tuple(file for file in files if file not in needed)


def is_weight_file(path: str) -> bool:
    """Return whether the path of a file in a repository names weights that the engine loads (`WEIGHTS`)."""
    return "/" not in path and fnmatchcase(path, WEIGHTS)


def _is_needed(path: str, *, has_weights: bool) -> bool:
    if path in IDENTITY_FILES or is_weight_file(path):
        return True
    if "/" in path or path.startswith("."):
        return False
    if path.endswith(".safetensors"):
        return not has_weights
    return any(fnmatchcase(path, pattern) for pattern in _NEEDED)
