"""The search for models in folders: its depth, its bounds, and the folders that it does not enter."""

from pathlib import Path

import pytest

from node.models import folders
from node.models.folders import MODEL, PACKAGE, find_model_folders, get_hub_folder, use_hub_folder


def make_model(folder: Path, marker: str = MODEL) -> None:
    folder.mkdir(parents=True)
    (folder / marker).touch()


def find(top: Path, marker: str = MODEL) -> list[str]:
    return [name for name, _ in find_model_folders(top, marker)]


def test_models_are_found_three_levels_below_the_folder(tmp_path: Path) -> None:
    for name in ("a", "b/c", "d/e/f", "d/e/g/h", ".hidden/i", "models--j/k", "a/inner"):
        make_model(tmp_path / name)
    assert find(tmp_path) == ["a", "b/c", "d/e/f"]
    assert list(find_model_folders(tmp_path / "b")) == [("c", tmp_path / "b" / "c")]
    assert list(find_model_folders(tmp_path / "b/c")) == [("c", tmp_path / "b" / "c")], "the folder itself"
    assert find(tmp_path / "gone") == []


def test_many_folders_are_searched_and_their_number_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        (tmp_path / f"{number:03}").mkdir()
    make_model(tmp_path / "last")
    assert find(tmp_path) == ["last"]
    monkeypatch.setattr(folders, "MAX_FOLDERS", 302)
    assert find(tmp_path) == ["last"]
    monkeypatch.setattr(folders, "MAX_FOLDERS", 301)
    assert find(tmp_path) == []


def test_a_package_is_no_model_and_its_parts_are_not_entered(tmp_path: Path) -> None:
    make_model(tmp_path / "video", PACKAGE)
    (tmp_path / "video" / MODEL).touch()
    make_model(tmp_path / "video" / "transformer")
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.GGUF").touch()
    make_model(tmp_path / "gguf" / "inner")
    assert (find(tmp_path), find(tmp_path, PACKAGE)) == (["gguf", "gguf/inner"], ["video"])


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, "HOME/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/h/hub"),
        ({"HUGGINGFACE_HUB_CACHE": "/o", "HF_HOME": "/h"}, "/o"),
        ({"HF_HUB_CACHE": "~/n", "HUGGINGFACE_HUB_CACHE": "/o"}, "HOME/n"),
        ({"HF_HUB_CACHE": "", "HF_HOME": ""}, "HOME/.cache/huggingface/hub"),
    ],
)
def test_the_hub_folder_follows_the_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], folder: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert str(get_hub_folder(environment)) == folder.replace("HOME", str(tmp_path))
    use_hub_folder("", environment)
    assert str(get_hub_folder(environment)) == folder.replace("HOME", str(tmp_path))
    use_hub_folder("/setting", environment)
    assert str(get_hub_folder(environment)) == "/setting"
