import ast
import functools
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.neuter.__main__ import Run, in_order
from tests.neuter.guards import ROOT, Guard, load, module_file
from tests.neuter.mutants import areas
from tests.neuter.mutate import functions
from tests.neuter.operators import OPERATORS, mutants
from tests.neuter.pool import Copy, tracked
from tests.neuter.syntax import definitions

FILES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/guards/*.toml"))


@functools.lru_cache
def text(path: str) -> str:
    return (ROOT / path).read_text()


def has(test: str) -> bool:
    """Return whether a test named by a guard is defined."""
    file, _, function = test.partition("::")
    return (f"def {function.partition('[')[0]}(" if function else "def test_") in text(file)


@pytest.mark.parametrize("file", FILES)
def test_every_guard_changes_its_module(file: str):
    guards = load(ROOT, file)
    assert guards
    assert [guard.name for guard in guards if guard.broken() == text(guard.path())] == []


def test_every_guard_names_tests_that_exist():
    guards = load()
    assert [guard.name for guard in guards if not guard.tests] == []
    assert [(guard.name, test) for guard in guards for test in guard.tests if not has(test)] == []


def test_no_guard_makes_a_change_that_an_operator_makes_in_a_listed_function():
    guards = defaultdict[str, list[Guard]](list)
    for guard in load():
        guards[guard.at].append(guard)
    needless = list[str]()
    for function in functions([name for area in areas([]) for name in area.functions]):
        for guard in guards[function.name]:
            changed = definitions(ast.parse(guard.broken()), module_file(guard.at)[1])
            wanted = {ast.dump(chain[-1]) for chain in changed}
            for mutant in mutants(function.node, OPERATORS):
                mutant.apply()
                if ast.dump(function.node) in wanted:
                    needless.append(guard.name)
                mutant.undo()
    assert needless == []


@pytest.mark.slow
def test_a_guard_is_right_only_when_its_tests_fail_because_of_the_change():
    shared: dict[str, Any] = {
        "property": "",
        "at": "wire.capacity.arithmetic.compute_current",
        "tests": ["tests/unit/wire/capacity/test_arithmetic.py"],
    }
    elsewhere: dict[str, Any] = shared | {"tests": ["tests/none.py"]}
    guards = [
        Guard(name="noticed", node="max(active, phys, recent)", becomes="0", **shared),
        Guard(name="unnoticed", node="max(active, phys, recent)", becomes="max(recent, phys, active)", **shared),
        Guard(name="gone", node="min(active, phys, recent)", becomes="0", **shared),
        Guard(name="no-test", node="max(active, phys, recent)", becomes="0", **elsewhere),
    ]
    run = Run(in_order(guards))
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder), tracked())
        run.work(copy)
        copy.close()
    wrong = {result.guard.name: result.wrong for result in run.results}
    assert wrong["noticed"] == ""
    assert "pass although" in wrong["unnoticed"]
    assert "found 0 times" in wrong["gone"]
    assert "do not run" in wrong["no-test"]
