"""Find the folders of models on this machine: below configured folders, and in Hugging Face's cache."""

import os
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path

from host.private_files import resolve_home

MODEL, PACKAGE = "config.json", "model_index.json"
"""Files that identify a model and a diffusers package."""
MAX_DEPTH = 3
"""Maximum levels of the search below a configured folder, such as FOLDER/publisher/model and one level more."""
MAX_FOLDERS = 20_000
"""Maximum number of folders in one scan, because a home directory set by mistake must not hang a node."""


def get_hub_folder(environment: Mapping[str, str]) -> Path:
    """Return the folder of Hugging Face's cache: `HF_HUB_CACHE`, else `HUGGINGFACE_HUB_CACHE`, else `hub` in `HF_HOME`.

    The default of `HF_HOME` is `huggingface` in `XDG_CACHE_HOME` or `~/.cache`. `~` in a variable stands for the home
    folder. Other variables in a value are not expanded.

    Source: `constants.py` of huggingface_hub
    """
    home = environment.get("HF_HOME") or os.path.join(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    named = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
    return resolve_home(named or os.path.join(home, "hub"))


def use_hub_folder(setting: str, environment: MutableMapping[str, str]) -> None:
    """Replace the folder of Hugging Face's cache in `environment` by the path `setting`, if that is not empty.

    `setting` is `models.huggingface_cache`. Child processes inherit the folder with the environment.
    """
    if setting:
        environment["HF_HUB_CACHE"] = setting


def get_own_folder(state: Path) -> Path:
    """Return the node's own model folder, for models that the node quantizes. `state` is the state folder."""
    return state / "node" / "models"


def find_model_folders(top: Path, marker: str = MODEL) -> Iterator[tuple[str, Path]]:
    """Yield name and folder of each model at or below `top`; with the marker PACKAGE, of each diffusers package.

    The name of a model is its path below `top`, or the folder name of `top` itself. The search ends at `MAX_DEPTH`
    levels and `MAX_FOLDERS` folders. It does not enter a folder with `config.json` or `model_index.json`, a hidden
    folder, or a repository `models--…` of Hugging Face's cache. Folders with GGUF files count as models, and are
    entered. Folders that cannot be read count as empty.
    """
    visited = 0
    waiting: list[tuple[Path, int]] = [(top, 0)]
    while waiting and visited < MAX_FOLDERS:
        folder, depth = waiting.pop(0)
        visited += 1
        names = list_names(folder)
        kind = next((candidate for candidate in (PACKAGE, MODEL) if candidate in names), None)
        if kind == marker or (kind is None and marker == MODEL and has_gguf(names)):
            yield (folder.name if folder == top else str(folder.relative_to(top))), folder
        if kind is None and depth < MAX_DEPTH:
            waiting += [(folder / name, depth + 1) for name in names if _should_descend(folder / name)]


def has_gguf(names: Iterable[str]) -> bool:
    """Return whether a folder with these names has weights in GGUF, the format of llama.cpp."""
    return any(name.lower().endswith(".gguf") for name in names)


def _should_descend(path: Path) -> bool:
    return not path.name.startswith((".", "models--")) and os.path.isdir(path)


def list_names(folder: Path) -> list[str]:
    """Return the sorted names in a folder; empty if the folder cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def find_snapshots(hub: Path, marker: str = MODEL) -> Iterator[tuple[str, Path]]:
    """Yield name (`publisher/name`) and folder of each model in a Hugging Face cache.

    The folder is `models--publisher--name/snapshots/REVISION`. The revision is the one of `refs/main` if it contains
    the file `marker`, or else another one that does. If none does, a revision with GGUF files counts. A revision with
    `model_index.json` is no model. With the marker PACKAGE, diffusers packages are yielded instead.
    """
    for entry in list_names(hub):
        kind, _, rest = entry.partition("--")
        if kind != "models" or not rest:
            continue
        folder = hub / entry
        snapshot = _find_snapshot(folder, marker)
        if snapshot is not None and (marker == PACKAGE or not os.path.exists(snapshot / PACKAGE)):
            yield rest.replace("--", "/"), snapshot


def _find_snapshot(folder: Path, marker: str) -> Path | None:
    try:
        revision = (folder / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        revision = ""
    named = folder / "snapshots" / revision
    if revision and os.path.exists(named / marker):
        return named
    snapshots = [folder / "snapshots" / name for name in list_names(folder / "snapshots")]
    chosen = next((snapshot for snapshot in snapshots if os.path.exists(snapshot / marker)), None)
    if chosen is None and marker == MODEL:
        chosen = next((snapshot for snapshot in snapshots if has_gguf(list_names(snapshot))), None)
    return chosen
