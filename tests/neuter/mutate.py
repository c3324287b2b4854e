"""A pytest session that runs its tests once for each operator mutant of some functions.

`python -m tests.neuter.mutate RESULT OPERATORS FUNCTION… -- TEST…`. The tests are collected once. Each mutant is a fork
of this process in which the code of the live function is replaced. Only the tests that call the function run, the
quickest first, until one fails. No file is changed; tests that start processes can therefore not detect a mutant.
"""

import ast
import gc
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType, FunctionType

import hypothesis
import pytest

from tests.neuter.guards import ROOT, module_file
from tests.neuter.operators import FUNCTIONS, Mutant, mutants
from tests.neuter.syntax import definitions
from tests.neuter.warm import IMPORTED_BEFORE

LIMIT_SECONDS = 10
"""Time limit of a mutant, in addition to SLOWDOWN times the time of its tests before."""
SLOWDOWN = 5
KILLED, SURVIVED, IMPOSSIBLE = 1, 0, 4
LOOK_SECONDS = 0.002
TEMPORARY = "PYTEST_DEBUG_TEMPROOT"
"""Environment variable with the folder for temporary files of pytest."""
Key = tuple[str, int]
"""A function: its file and its first line."""


class Function:
    """One function of a module, and the live functions that run its code."""

    def __init__(self, name: str, file: str, tree: ast.Module, node: ast.AST) -> None:
        assert isinstance(node, FUNCTIONS)
        self.name = name
        self.path = str(ROOT / file)
        self.tree = tree
        self.node = node
        lines = [node.lineno, *(one.lineno for one in node.decorator_list)]
        self.key: Key = (self.path, min(lines))

    def live(self) -> list[FunctionType]:
        """Return the function objects with this code, including those that tests/conftest.py froze."""
        gc.unfreeze()
        # isinstance would look up the class of each of a million other objects, which takes 3 s
        found = [one for one in gc.get_objects() if type(one) is FunctionType and _key(one.__code__) == self.key]
        gc.freeze()
        return found

    def code(self) -> CodeType | None:
        """Compile the module from its current tree; return the code of this function."""
        waiting = [compile(self.tree, self.path, "exec", dont_inherit=True)]
        while waiting:
            code = waiting.pop()
            if _key(code) == self.key and code.co_name == self.node.name:
                return code
            waiting += [one for one in code.co_consts if isinstance(one, CodeType)]
        return None


def _key(code: CodeType) -> Key:
    return code.co_filename, code.co_firstlineno


def functions(names: list[str]) -> list[Function]:
    """Return the functions with these qualified names; a class or a module stands for all functions in it.

    Raise LookupError if a name is unknown.
    """
    found: dict[Key, Function] = {}
    trees: dict[str, ast.Module] = {}
    for name in names:
        file, path = module_file(name)
        tree = trees.setdefault(file, ast.parse((ROOT / file).read_text()))
        module = ".".join(name.split(".")[: len(name.split(".")) - len(path)])
        held = definitions(tree, path)
        if not held:
            raise LookupError(f"there is no {name}: correct tests/neuter/functions.toml")
        for chain in held:
            for qualified, node in _functions(chain[-1], ".".join([module, *path])):
                function = Function(qualified, file, tree, node)
                found.setdefault(function.key, function)
    return list(found.values())


def _functions(node: ast.AST, name: str) -> list[tuple[str, ast.AST]]:
    """Return a function itself, or those directly in a class or a module, or in its classes."""
    if isinstance(node, FUNCTIONS):
        return [(name, node)]
    children = [one for one in ast.iter_child_nodes(node) if isinstance(one, (*FUNCTIONS, ast.ClassDef))]
    return [found for child in children for found in _functions(child, f"{name}.{child.name}")]


class Mutate:
    """The plugin that replaces pytest's loop over the tests."""

    def __init__(self, names: list[str], operators: list[str], result: Path) -> None:
        self._functions = functions(names)
        self._operators = operators
        self._result = result
        self._calls: dict[Key, list[int]] = {}
        self._seconds: dict[int, float] = {}

    def pytest_configure(self) -> None:
        """Make Hypothesis draw the same examples each time, without storing or shrinking them."""
        phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
        hypothesis.settings.register_profile("mutants", hypothesis.settings.default, database=None, phases=phases)
        hypothesis.settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run all tests once, then the mutants; write the result."""
        wrong = self._measure(session)
        rows = [] if wrong else [self._row(session, function) for function in self._functions]
        self._result.write_text(json.dumps({"wrong": wrong, "functions": rows}))
        return True

    def _measure(self, session: pytest.Session) -> str:
        """Measure in a fork which tests call which function, and the seconds of each test; return the failures."""
        reading, writing = os.pipe()
        with temporary_folder() as folder:
            child = os.fork()
            if child == 0:
                os.close(reading)
                os.environ[TEMPORARY] = folder
                made = self._measured(session)
                with os.fdopen(writing, "w") as pipe:
                    json.dump(made, pipe)
                os._exit(0)
            os.close(writing)
            with os.fdopen(reading) as pipe:
                text = pipe.read()
            os.waitpid(child, 0)
        if not text:
            return "the tests ended their process"
        made = json.loads(text)
        keys = {str(function.key): function.key for function in self._functions}
        self._calls = {keys[key]: numbers for key, numbers in made["calls"].items()}
        self._seconds = {int(number): seconds for number, seconds in made["seconds"].items()}
        return made["wrong"]

    def _measured(self, session: pytest.Session) -> dict[str, object]:
        """Run all tests, with a profiler that records calls of the functions."""
        keys = {id(one.__code__): str(function.key) for function in self._functions for one in function.live()}
        calls: dict[str, set[int]] = defaultdict(set)
        seconds: dict[int, float] = {}
        number = 0

        def seen(frame: FrameType, event: str, _argument: object) -> None:
            if event == "call" and (key := keys.get(id(frame.f_code))):
                calls[key].add(number)

        threading.setprofile(seen)
        sys.setprofile(seen)
        for number in range(len(session.items)):
            began = time.monotonic()
            _protocol(session, number, number + 1)
            seconds[number] = time.monotonic() - began
            if session.testsfailed:
                return {"wrong": session.items[number].nodeid, "calls": {}, "seconds": {}}
        sys.setprofile(None)
        return {"wrong": "", "calls": {key: sorted(made) for key, made in calls.items()}, "seconds": seconds}

    def _row(self, session: pytest.Session, function: Function) -> dict[str, object]:
        """Run all mutants of one function."""
        live = function.live()
        tests = sorted(self._calls.get(function.key, []), key=lambda number: self._seconds[number])
        limit = LIMIT_SECONDS + SLOWDOWN * sum(self._seconds[number] for number in tests)
        killed, survived = list[str](), list[str]()
        for mutant in mutants(function.node, self._operators):
            text = f"{mutant.line}: {mutant}"
            outcome = SURVIVED if not tests or not live else self._try(session, function, mutant, live, tests, limit)
            if outcome != IMPOSSIBLE:
                (survived if outcome == SURVIVED else killed).append(text)
        return {"name": function.name, "tests": len(tests), "killed": killed, "survived": survived}

    def _try(
        self,
        session: pytest.Session,
        function: Function,
        mutant: Mutant,
        live: list[FunctionType],
        tests: list[int],
        limit: float,
    ) -> int:
        """Run the tests of one mutant in a fork; return KILLED, SURVIVED or IMPOSSIBLE."""
        with temporary_folder() as folder:
            child = os.fork()
            if child == 0:
                os.setsid()
                os.environ[TEMPORARY] = folder
                with suppress(BaseException):
                    os._exit(_noticed(session, function, mutant, live, tests))
                os._exit(KILLED)
            return _wait(child, limit)


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Create a folder for the files of a fork, which leaves them behind. It is deleted at the end of the block."""
    return tempfile.TemporaryDirectory(prefix="mp-", ignore_cleanup_errors=True)


def _wait(child: int, limit: float) -> int:
    """Wait for a fork and end it after `limit` seconds; return KILLED, SURVIVED or IMPOSSIBLE."""
    deadline = time.monotonic() + limit
    status: int | None = None
    while status is None and time.monotonic() < deadline:
        ended, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if ended else None
        if status is None:
            time.sleep(LOOK_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    if status is None:
        os.waitpid(child, 0)
    return status if status in (SURVIVED, IMPOSSIBLE) else KILLED


def _noticed(
    session: pytest.Session, function: Function, mutant: Mutant, live: list[FunctionType], tests: list[int]
) -> int:
    """Replace the code and run the tests in this process until one fails; return KILLED, SURVIVED or IMPOSSIBLE."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    mutant.apply()
    try:
        code = function.code()
        assert code is not None
        for one in live:
            one.__code__ = code
    except (SyntaxError, ValueError):  # a `break` outside of a loop, or another number of free variables
        return IMPOSSIBLE
    for number, following in zip(tests, [*tests[1:], len(session.items)], strict=True):
        _protocol(session, number, following)
        if session.testsfailed:
            return KILLED
    return SURVIVED


def _protocol(session: pytest.Session, number: int, following: int) -> None:
    """Run one test like pytest's own loop."""
    item = session.items[number]
    after = session.items[following] if following < len(session.items) else None
    item.config.hook.pytest_runtest_protocol(item=item, nextitem=after)


def main() -> int:
    """Run the mutants of the functions named on the command line."""
    result, operators, *rest = sys.argv[1:]
    middle = rest.index("--")
    os.environ["HYPOTHESIS_SEED"] = "1"
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "-p",
        "no:xdist",
        "--no-header",
        "-W",
        IMPORTED_BEFORE,
        "--tb=no",
        "--assert=plain",
    ]
    plugin = Mutate(rest[:middle], operators.split(","), Path(result))
    return int(pytest.main([*options, *rest[middle + 1 :]], plugins=[plugin]))


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
