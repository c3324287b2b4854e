"""transformers has the same names with the kept structure as without, and no file can make an import fail."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from node.engine.transformers_import import Structure, create_reader

import_utils: Any = import_module("transformers.utils.import_utils")
SHOW = (
    "import transformers, transformers.models, json; "
    "print(json.dumps([sorted(transformers.__all__), transformers._class_to_module, "
    "sorted(transformers.models.__all__), transformers.models._class_to_module, "
    "transformers.PreTrainedTokenizerFast.__module__, transformers.AutoTokenizer.__module__], sort_keys=True))"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of models as transformers has it, with two files. Files may be written as bytecode may."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    models = tmp_path / "transformers" / "models"
    (models / "tiny").mkdir(parents=True)
    for file in (models.parent / "__init__.py", models / "__init__.py", models / "tiny" / "__init__.py"):
        file.write_text("")
    (models / "tiny" / "configuration_tiny.py").write_text('__all__ = ["TinyConfig"]\n')
    (models / "tiny" / "modeling_tiny.py").write_text('__all__ = ["TinyModel"]\n')
    return models


EXPECTED: Structure = {
    frozenset(): {"tiny.configuration_tiny": {"TinyConfig"}},
    frozenset({"torch"}): {"tiny.modeling_tiny": {"TinyModel"}},
}


class Counted:
    """transformers' own function, and the number of its calls."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, path: Path, prefix: str | None = None) -> Structure:
        self.calls += 1
        import_utils.create_import_structure_from_path.cache_clear()
        return import_utils.spread_import_structure(import_utils.create_import_structure_from_path(path))


def load(program: str, environment: dict[str, str] | None = None) -> Any:
    """Run a program in a process of its own; return the JSON that it prints."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout)


def test_transformers_has_the_same_names_as_without():
    assert load(f"import node.engine; {SHOW}") == load(SHOW)


def test_transformers_does_not_read_the_sources_of_its_models():
    """A renamed function of transformers would make every import slow again."""
    counted = (
        "import node.engine, sys, json; opened = []; "
        "sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == 'open' else None); "
        "import transformers; transformers.AutoTokenizer; "
        "print(json.dumps(len([path for path in opened if '/models/' in path and path.endswith('.py')])))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    load(counted, environment)
    assert load(counted, environment) < 100


def test_the_folder_is_read_once_by_all_processes(folder: Path, tmp_path: Path):
    for process in (1, 2):
        counted = Counted()
        read = create_reader(folder, counted, tmp_path / "cache" / "structure.json")
        assert read(folder) == read(str(folder / "__init__.py")) == EXPECTED
        prefixed = read(folder, prefix="models")
        assert prefixed[frozenset()] == {"models.tiny.configuration_tiny": {"TinyConfig"}}
        prefixed[frozenset()].clear()
        assert read(folder) == EXPECTED, "a caller may change what it gets"
        assert counted.calls == (1 if process == 1 else 0)


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b"\xff", b'{"key": null, "structure": []}'])
def test_a_file_that_is_no_structure_is_replaced(folder: Path, tmp_path: Path, content: bytes):
    file = tmp_path / "structure.json"
    file.write_bytes(content)
    assert create_reader(folder, Counted(), file)(folder) == EXPECTED
    counted = Counted()
    assert create_reader(folder, counted, file)(folder) == EXPECTED
    assert counted.calls == 0


def test_another_version_is_read_anew(folder: Path, tmp_path: Path):
    file = tmp_path / "structure.json"
    create_reader(folder, Counted(), file)(folder)
    (folder.parent / "__init__.py").write_text("__version__ = '6'")
    (folder / "tiny" / "configuration_tiny.py").write_text('__all__ = ["OtherConfig"]\n')
    found = create_reader(folder, Counted(), file)(folder)
    assert found[frozenset()] == {"tiny.configuration_tiny": {"OtherConfig"}}


def test_a_file_that_cannot_be_written_is_no_error(folder: Path, tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert create_reader(folder, Counted(), tmp_path / "file" / "structure.json")(folder) == EXPECTED


def test_nothing_is_written_where_no_bytecode_is(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert create_reader(folder, Counted(), tmp_path / "structure.json")(folder) == EXPECTED
    assert not (tmp_path / "structure.json").exists()


def test_other_folders_are_left_to_transformers(folder: Path, tmp_path: Path):
    counted = Counted()
    read = create_reader(tmp_path / "elsewhere", counted, tmp_path / "structure.json")
    assert read(folder) == EXPECTED
    assert counted.calls == 1
