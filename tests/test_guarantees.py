"""tests/guarantees lists properties that a user relies on, by area, each with the test that fails without it."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
AREAS = sorted((ROOT / "tests/guarantees").glob("*.md"))
ROW = re.compile(r"^\| (?P<text>[^|]+) \| (?P<tests>[^|]+) \|$")
TEST = re.compile(r"`(?P<file>tests/[\w/]+\.py)::(?P<name>\w+)`")


def rows(area: Path) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Yield the rows of an area's table: the sentence, and file and name of each of its tests."""
    table = [line for line in area.read_text().splitlines() if line.startswith("|")]
    for line in table[2:]:
        found = ROW.match(line)
        assert found, line
        yield found["text"], [(test["file"], test["name"]) for test in TEST.finditer(found["tests"])]


@cache
def names_of(file: str) -> frozenset[str]:
    """Return the names of all tests of a file."""
    path = ROOT / file
    if not path.is_file():
        return frozenset()
    return frozenset(
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    )


@pytest.mark.parametrize("area", AREAS, ids=lambda area: area.stem)
def test_guarantees_name_tests_that_exist(area: Path) -> None:
    listed = list(rows(area))
    assert len(listed) >= 10
    assert [text for text, tests in listed if not tests] == []
    assert [f"{file}::{name}" for _, tests in listed for file, name in tests if name not in names_of(file)] == []


def test_guarantees_are_stated_once() -> None:
    texts = [text for area in AREAS for text, _ in rows(area)]
    assert len(texts) == len(set(texts)) > 300
