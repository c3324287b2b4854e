"""Files of a repository that serving needs. Pure.

Needed are the weights, the JSON and text files next to them, and `IDENTITY_FILES` in subfolders. Weights are the files
`model*.safetensors`, or all safetensors files if none has such a name. Not needed are other formats of the weights,
code, pictures and texts for people.
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
    """Return whether a path names a file of weights that the engine loads."""
    return "/" not in path and fnmatchcase(path, WEIGHTS)


def _is_needed(path: str, *, has_weights: bool) -> bool:
    if path in IDENTITY_FILES or is_weight_file(path):
        return True
    if "/" in path or path.startswith("."):
        return False
    if path.endswith(".safetensors"):
        return not has_weights
    return any(fnmatchcase(path, pattern) for pattern in _NEEDED)
