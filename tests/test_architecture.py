"""The rules that separate the rooms, checked on the current code."""

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from wire import frames
from wire.frames import TAGS, Frame, GrammarKind
from wire.node_state import EngineStage, NodeState
from wire.refusals import FailureCode, RefusalCode
from wire.video import LeaseEndCode, LeaseRefusalCode, ReleaseCause

ROOT = Path(__file__).parents[1]
PACKAGES = ("coordinator", "host", "node", "router", "simulation", "wire")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
IGNORES = {"coordinator": 2, "host": 1, "node": 0, "router": 0, "simulation": 0, "wire": 0}
"""Number of lines that the type checker ignores. These numbers only fall: lower them, never raise them."""
FORBIDDEN = {
    r"\bpickle\b": "what is unpickled can run code",
    r"\btrust_remote_code\s*=\s*True": "a model repository must not run code",
    r"\bshell\s*=\s*True": "words are never put together for a shell",
    r"\bverify\s*=\s*False|CERT_NONE|_create_unverified_context": "a peer proves who it is",
    r"\b(?:eval|exec)\(": "text is never run",
    r"\btime\.sleep\(": "what is waited for is awaited, with a limit",
    r"\buvloop\.(?:run|new_event_loop|install)\(": "`host.event_loop` has one clock on macOS",
    r"\.when\(\)": "uvloop gives a timer that is due within half a millisecond a handle without it",
    r"\b0x?o?777\b|\bos\.umask\b": "files are private by their own mode",
}
"""Patterns that no line may contain, and the reasons."""
ALLOWED = {
    (
        "node/agent/enrollment.py",
        "CERT_NONE",
    ): "the first connection of an enrolment only fetches the CA, which the pin then proves",
    (
        "coordinator/cli/commands/clients/trust_ca.py",
        "CERT_NONE",
    ): "it only fetches a public certificate, which its fingerprint or a person then proves",
    ("host/event_loop.py", "uvloop.run("): "it starts the loop with that clock",
    ("node/engine/memory/footprint.py", "time.sleep("): "the system reports no event when a footprint falls",
    ("deploy/mac_engine.py", "time.sleep("): "the same",
}
"""Exceptions: file and the words found, with the reason."""
BROUGHT = {
    "starlette": "fastapi",
    "pydantic_core": "pydantic",
    "transformers": "mlx-lm",
    "tokenizers": "mlx-lm",
    "jinja2": "mlx-lm",
}
"""Packages that the code imports but the requirements do not name, because a named package depends on them."""
PERIODIC_SLEEPS = {
    "coordinator/alerts/evaluator.py": "the next look at what needs a person",
    "coordinator/alerts/webhook.py": "back-off before a message is sent again",
    "coordinator/models/wish_runner.py": "the floor between two rounds, because reports arrive more often",
    "coordinator/observe/load_sampler.py": "the next reading of the load",
    "coordinator/observe/log_reader.py": "the next look at a log that is followed",
    "coordinator/cluster/links/node_fetches.py": "the next look at a log that is followed",
    "coordinator/cluster/local_node.py": "back-off before the node is started again",
    "coordinator/startup/background.py": "the next look at our certificate",
    "coordinator/ui/live_stream.py": "the next look at the pool, while a page is open",
    "coordinator/http/server.py": "until a connection is accepted again after there was no descriptor for one",
    "coordinator/video/job_files.py": "until a node is asked again that did not answer",
    "host/bonjour_announce.py": "looks at our own addresses, which nobody announces",
    "node/agent/discovery.py": "the time in which a second cluster may answer",
    "node/hub/idle_hasher.py": "the period of checks of an idle node",
    "node/engine_process/supervisor.py": "the period of pings to a busy engine",
    "node/hub/quantization/quantizer.py": "the next reading of a child's footprint",
    "node/hub/serving/relay_listener.py": "the next try to reach the coordinator",
    "node/hub/serving/server.py": "the next look at a file that another process downloads",
    "node/video/ray/local_ray.py": "back-off before the driver is started again",
    "node/video/capability.py": "the next look at folders, which tell nobody of a change",
    "node/video/worker/worker_monitor.py": "the end of processes that are not our children",
}
"""Files that may sleep, because they wait for a clock and not for an event."""


def modules(*packages: str) -> list[Path]:
    return [file for package in packages or PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


class ModuleFacts(NamedTuple):
    """Facts of the syntax of one module, for the tests here."""

    docstring: str
    classes: frozenset[str]
    imported: frozenset[str]
    """Imported top-level modules."""
    texts: frozenset[str]
    """All literal texts."""


@cache
def read_facts(file: Path) -> ModuleFacts:
    tree, classes, imported, texts = ast.parse(file.read_text()), set[str](), set[str](), set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            classes.add(node.name)
        elif isinstance(node, ast.Import):
            imported |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported.add(node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.add(node.value)
    packages = frozenset(name.partition(".")[0] for name in imported)
    return ModuleFacts(ast.get_docstring(tree) or "", frozenset(classes), packages, frozenset(texts))


@cache
def find_distributions() -> Mapping[str, Sequence[str]]:
    """Return the distributions of each top-level package that is installed."""
    return importlib.metadata.packages_distributions()


def loaded_by(code: str) -> set[str]:
    """Return the top-level modules that are loaded after running this in a new interpreter."""
    report = "import json, sys; print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


# Imports between packages


def test_the_import_rules_hold():
    program = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([program, "--no-cache"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_files_import_each_other_in_a_circle():
    import grimp

    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=False)
    circles = set[tuple[str, str]]()
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            if graph.chain_exists(imported, module):
                circles.add((module, imported))
    assert circles == set()


@pytest.mark.parametrize("package", [*PACKAGES, "tests"])
def test_no_folder_has_more_than_sixteen_modules(package: str):
    folders = Counter(file.parent for file in modules(package) if file.name != "__init__.py")
    assert {str(folder.relative_to(ROOT)): count for folder, count in folders.items() if count > 16} == {}


def test_a_class_name_has_one_meaning():
    where: dict[str, set[str]] = {}
    for file in modules(*PACKAGES):
        for name in read_facts(file).classes:
            where.setdefault(name, set()).add(name_of(file))
    assert {name: sorted(files) for name, files in where.items() if len(files) > 1} == {}


def test_the_import_rules_name_modules_that_exist():
    contracts = PROJECT["tool"]["importlinter"]["contracts"]
    assert len(contracts) >= 5
    named = {module for contract in contracts for module in contract.get("source_modules", ())}
    assert [m for m in named if not _exists(m)] == []


def _exists(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@pytest.mark.parametrize(
    "module",
    [
        "node.run",
        "node.agent.agent",
        "node.engine_process.supervisor",
        "coordinator.run",
        "coordinator.cli.commands.up",
    ],
)
def test_what_must_stay_light_imports_neither_mlx_nor_ray(module: str):
    assert (
        loaded_by(f"import {module}") & {"mlx", "mlx_lm", "mlx_vlm", "ray", "torch", "numpy", "transformers"} == set()
    )


def test_the_node_imports_no_web_framework():
    assert (
        loaded_by("import node.run") & {"fastapi", "starlette", "uvicorn", "pydantic", "coordinator", "router"} == set()
    )


def test_help_imports_next_to_nothing():
    run = "import sys; sys.argv = ['cluster', '--help']; from coordinator.cli import main; main()"
    heavy = {"fastapi", "uvicorn", "cryptography", "rich", "pydantic", "zeroconf", "msgspec", "asyncio", "ssl"}
    assert loaded_by(run) & heavy == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_other_distribution_owns_the_names_of_our_packages(package: str):
    owners = find_distributions().get(package, [])
    assert [owner for owner in owners if owner != "macpool"] == []


# style


def test_every_module_has_a_docstring():
    silent = [name_of(file) for file in modules() if not read_facts(file).docstring]
    assert silent == []


def test_the_linter_demands_docstrings_of_everything_public():
    lint = PROJECT["tool"]["ruff"]["lint"]
    assert "D1" in lint["select"]
    assert {rule for rule in lint["ignore"] if rule.startswith("D")} == {"D105", "D107"}
    excused = [pattern for pattern, rules in lint["per-file-ignores"].items() if any(r.startswith("D") for r in rules)]
    assert excused == ["tests/**"]


def test_the_types_are_checked_strictly():
    checker = PROJECT["tool"]["basedpyright"]
    assert checker["typeCheckingMode"] == "strict"
    assert {*PACKAGES, "tests"} <= set(checker["include"])
    assert not set(checker) & {"ignore", "exclude", "strict"}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_number_of_type_ignores_only_falls(package: str):
    found = [
        f"{name_of(file)}:{number}"
        for file in modules(package)
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if re.search(r"#\s*(?:pyright|type):\s*(?:ignore|basic|standard)", line)
    ]
    assert len(found) <= IGNORES[package], f"there may be {IGNORES[package]}: {found}"
    assert len(found) == IGNORES[package], f"lower the number for {package} to {len(found)}"


def test_every_noqa_names_its_rule():
    files = [*modules(), *modules("tests", "deploy", "docs")]
    bare = [
        f"{name_of(file)}:{number}"
        for file in files
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if re.search(r"#\s*noqa(?!: [A-Z]+[0-9]+)", line) and file != Path(__file__)
    ]
    assert bare == []


@pytest.mark.parametrize("pattern", FORBIDDEN)
def test_what_is_forbidden_is_nowhere(pattern: str):
    found = [
        f"{name_of(file)}:{number}: {line.strip()}"
        for file in [*modules(), *modules("deploy")]
        for number, line in enumerate(file.read_text().splitlines(), 1)
        for match in [re.search(pattern, line)]
        if match and (name_of(file), match[0]) not in ALLOWED
    ]
    assert found == [], FORBIDDEN[pattern]


def test_exceptions_are_still_needed():
    gone = [key for key in ALLOWED if key[1] not in (ROOT / key[0]).read_text()]
    assert gone == []


def test_only_clocks_are_slept_for():
    sleeping = {name_of(file) for file in modules() if "asyncio.sleep(" in file.read_text()}
    assert sleeping == set(PERIODIC_SLEEPS)


def test_no_file_contains_a_path_of_one_machine():
    pattern = re.compile(r"(?<![\w.\]}])/(?:work|root|Users|home)/\w")
    found = [
        f"{name_of(file)}:{number}: {line.strip()[:100]}"
        for file in texts()
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def texts() -> Iterator[Path]:
    """Yield every text file of the repository."""
    for folder in (*PACKAGES, "tests", "deploy", "dashboards", "docs", "requirements", ".ci"):
        for file in sorted((ROOT / folder).rglob("*")):
            if not file.is_file() or "__pycache__" in file.parts or file.suffix in (".safetensors", ".png"):
                continue
            if file != Path(__file__):
                yield file
    yield from (ROOT / name for name in ("Makefile", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "pyproject.toml"))


@pytest.mark.parametrize("folder", [*PACKAGES, "tests", "deploy", "dashboards", "docs"])
def test_the_rooms_exist(folder: str):
    assert any((ROOT / folder).iterdir())


# Installed packages


@pytest.mark.parametrize("name", ["run.txt", "dev.txt"])
def test_requirements_are_locked_by_hash_and_name_no_host(name: str):
    text = (ROOT / "requirements" / name).read_text()
    assert "://" not in text
    wanted = [part for part in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE | re.IGNORECASE) if "==" in part]
    assert len(wanted) > 20
    assert [part.split()[0] for part in wanted if "--hash=sha256:" not in part] == []
    assert re.findall(r"^-.*", text, flags=re.MULTILINE) == []


def test_dependencies_are_locked():
    locked = {line.partition("==")[0] for line in (ROOT / "requirements" / "run.txt").read_text().splitlines()}
    wanted = {re.split(r"[><=\[;]", need)[0] for need in PROJECT["project"]["dependencies"]}
    assert wanted - locked == set()


# the wire


def test_every_frame_has_one_tag_and_no_tag_is_used_twice():
    kinds = {
        kind
        for kind in vars(frames).values()
        if isinstance(kind, type) and issubclass(kind, Frame) and kind is not Frame
    }
    assert set(TAGS.values()) == kinds
    assert len(TAGS) == len(kinds)
    source = re.search(
        r"^TAGS.*?^}", (ROOT / "wire" / "frames" / "registry.py").read_text(), flags=re.MULTILINE | re.DOTALL
    )
    assert source
    written = re.findall(r"(\d+): \w+", source[0])
    assert len(written) == len(set(written)) == len(TAGS)
    assert all(0 < tag < 256 for tag in TAGS)


# safety


def test_what_is_imported_is_what_an_installation_brings() -> None:
    """The tests' own environment has more packages than an installation."""
    extras = PROJECT["project"]["optional-dependencies"].values()
    named = [*PROJECT["project"]["dependencies"], *(one for extra in extras for one in extra)]
    brought = {re.split(r"[^\w.-]", one)[0].lower().replace("_", "-") for one in named}
    assert set(BROUGHT.values()) <= brought
    owners = find_distributions()
    missing = {
        (path, name)
        for path, name in third_party()
        if name not in BROUGHT and not {one.lower().replace("_", "-") for one in owners.get(name, ())} & brought
    }
    assert missing == set()


def third_party() -> Iterator[tuple[str, str]]:
    """Yield every import of a third-party package: the file and the package."""
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for name in read_facts(path).imported:
            if name not in PACKAGES and name not in sys.stdlib_module_names:
                yield str(path.relative_to(ROOT)), name


CLOSED_SETS = (
    FailureCode,
    RefusalCode,
    LeaseEndCode,
    LeaseRefusalCode,
    ReleaseCause,
    NodeState,
    EngineStage,
    GrammarKind,
)
LITERALS_ALLOWED = {
    "coordinator/video/state/jobs.py": "codes of jobs, some of which have the words of a request's codes",
    "node/engine/grammar/compiler.py": "fields of llguidance's format",
    "node/engine/grammar/lark_builder.py": "fields of llguidance's format",
    "node/video/worker/worker.py": "the worker's environment contains no module of the project",
    "router/dialects/anthropic/schema.py": "types of the client's body",
    "router/dialects/openai/responses_schema.py": "types of the client's body",
    "router/dialects/shared/formats.py": "types and fields of the client's body",
}
"""Modules outside wire with texts that equal a value of a closed set, with the reason."""


def test_values_of_closed_sets_are_written_in_wire_only():
    values = {member.value for each in CLOSED_SETS for member in each if "_" in member.value}
    found = {
        str(path.relative_to(ROOT))
        for package in ("coordinator", "host", "node", "router")
        for path in (ROOT / package).rglob("*.py")
        if values & read_facts(path).texts
    }
    assert found == LITERALS_ALLOWED.keys()
