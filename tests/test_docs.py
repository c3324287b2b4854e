"""The generated pages of the manual equal the output of the generator, and describe everything."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from coordinator.state.settings import NODE_SECTIONS, CoordinatorSettings
from docs.generate import HERE, PAGES, contexts
from host.settings_loader import find_invalid_settings, from_tree, list_settings
from node.engine.kv.prefix_memory import AUTO_SHARE
from node.engine.memory.leak_check import TOLERATED_BYTES
from node.memory.cap import SMALL_RESERVE_BYTES, TIERS
from node.memory.enforcer import BUSY_POLL_SECONDS, EMPTY_POLL_SECONDS
from node.memory.reading import RECENT_POLLS
from node.settings import COORDINATOR_SECTIONS, SECTIONS, MlxSettings, NodeSettings
from router.placement.candidate import Placement, ResourceDemand
from router.placement.cluster_view import ClusterView
from router.placement.place import place
from router.placement.policies import Policy
from router.placement.reservations import ReservationLedger
from tests.support.cluster.loopback_cluster import a_memory
from tests.support.processes import environment
from tests.unit.router.placement.test_place import NOW, node
from wire.capacity.arithmetic import (
    MARGIN_SHARE,
    MAX_MARGIN_BYTES,
    MIN_MARGIN_BYTES,
    MIN_PROFILED_MARGIN_SHARE,
    RESIDUAL_FACTOR,
    compute_default_margin,
    judge,
)
from wire.refusals import MemoryNumbers, Refused
from wire.report import EngineState, Memory
from wire.units import GIB, MIB

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str):
    assert (HERE / name).read_text() == PAGES[name](), f"docs/{name} is not what the code says now: run `make docs`"


@pytest.mark.parametrize("kind", [CoordinatorSettings, NodeSettings])
def test_every_setting_has_a_meaning(kind: type):
    assert [setting.key for setting in list_settings(kind) if len(setting.description) < 10] == []


def test_every_setting_is_read():
    """A setting whose name is no attribute in the code has no effect. Modules of settings also name keys in texts."""
    read = set[str]()
    for path in (path for package in ("coordinator", "node", "router") for path in (ROOT / package).rglob("*.py")):
        pattern = r"\bself\.(\w+)" if "settings" in (path.stem, path.parent.name) else r"\.([a-z]\w*)\b"
        read.update(re.findall(pattern, path.read_text()))
    settings = [setting.key for kind in (CoordinatorSettings, NodeSettings) for setting in list_settings(kind)]
    unread = [key for key in settings if key.split(".")[-1] not in read]
    assert unread == [], "no code reads these settings: use or remove them"


def test_each_section_belongs_to_one_process():
    coordinators = {setting.key.split(".")[0] for setting in list_settings(CoordinatorSettings)}
    assert not coordinators & SECTIONS
    assert coordinators == COORDINATOR_SECTIONS, (
        "else the node refuses the config.toml that it shares with `cluster up`"
    )
    assert NODE_SECTIONS == SECTIONS


def test_the_code_that_a_page_names_exists():
    wrong, seen = [], 0
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]:
        text = re.sub(r"\n\s*", " ", page.read_text())
        for names, file in re.findall(r"((?:`[A-Za-z_][\w.]*`(?:, | and | or )?)+) (?:in |\()`([\w/]+/\w+\.py)`", text):
            code = (ROOT / file).read_text() if (ROOT / file).exists() else ""
            parts = [part for name in re.findall(r"`(.*?)`", names) for part in name.split(".")]
            seen += len(parts)
            wrong += [(page.name, part, file) for part in parts if not re.search(rf"\b{part}\b", code)]
    assert seen > 40
    assert wrong == []


def test_the_settings_of_examples_exist():
    settings_of = {kind: list_settings(kind) for kind in (CoordinatorSettings, NodeSettings)}
    known = {setting.key for found in settings_of.values() for setting in found}
    wrong, seen = [], 0
    for page in [ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md")]:
        for example in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL):
            settings = tomllib.loads(example)
            if settings.keys() <= SECTIONS | COORDINATOR_SECTIONS:
                flat = from_tree(settings)
                seen += len(flat)
                tables = find_invalid_settings(CoordinatorSettings, flat, NODE_SECTIONS)
                wrong += [(page.name, fault.key) for fault in tables]
                wrong += [(page.name, key) for key in flat if key.startswith(tuple(SECTIONS)) and key not in known]
    assert seen > 4
    assert wrong == []


def test_every_page_that_is_linked_exists():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
    links = [(page, target) for page in pages for target in re.findall(r"\]\(([^)#:]+)[)#]", page.read_text())]
    assert len(links) > 5
    missing = [(page.name, target) for page, target in links if not (page.parent / target).exists()]
    assert missing == []


def test_the_numbers_of_the_memory_page_are_those_of_the_code():
    page = (HERE / "memory.md").read_text()
    error = json.loads(re.sub(r"…", "", page.split("```json\n")[1].split("```")[0]))["error"]
    numbers = MemoryNumbers(**error["memory"])
    memory = Memory(
        numbers.cap,
        numbers.ceiling,
        compute_default_margin(numbers.cap),
        numbers.current,
        0,
        0,
        numbers.current,
        numbers.reserved,
        bound_by=numbers.bound_by,
    )
    refused = judge(memory, numbers.estimate)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.numbers) == (error["code"], numbers)
    safe, balanced, aggressive = (TIERS[tier].reserve // GIB for tier in ("safe", "balanced", "aggressive"))
    told = {
        f"`safe` {safe} GiB, `balanced` {balanced}, `aggressive` {aggressive}; "
        f"{SMALL_RESERVE_BYTES // GIB} on a machine",
        f"{MARGIN_SHARE * 100:.1f} % of the cap, at least {MIN_MARGIN_BYTES // MIB} MiB, "
        f"at most {MAX_MARGIN_BYTES // GIB} GiB",
        f"{RESIDUAL_FACTOR:.2f} × the worst",
        f"at least {MIN_PROFILED_MARGIN_SHARE * 100:.0f} % of the cap",
        f"every {BUSY_POLL_SECONDS} s while it works",
        f"every {EMPTY_POLL_SECONDS:.0f} s with no model",
        f"more than {TOLERATED_BYTES // MIB} MiB",
        f"from {MlxSettings().prefill_step_size} tokens",
        f"at most {AUTO_SHARE * 100:.0f} % of the cap without",
    }
    assert {text for text in told if text not in page} == set()
    assert RECENT_POLLS == 5, "the manual says: the last five polls"
    picture = (HERE / "memory.svg").read_text()
    for size in (
        numbers.cap,
        numbers.ceiling,
        numbers.current or 0,
        numbers.reserved,
        numbers.margin,
        numbers.headroom or 0,
    ):
        assert f"{size / GIB:.1f}" in picture


def test_the_policy_in_the_manual_is_one_that_the_router_takes(tmp_path: Path):
    text = (HERE / "placement.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    assert len(code.splitlines()) <= 40
    (tmp_path / "thrifty.py").write_text(code)
    spec = importlib.util.spec_from_file_location("thrifty", tmp_path / "thrifty.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    policy: Policy = module.Thrifty()
    small, big = node("small", a_memory(2 * GIB, total=16 * GIB)), node("big", a_memory(64 * GIB, total=192 * GIB))
    busy = node("small", a_memory(2 * GIB, total=16 * GIB), engine=EngineState("mlx", "ready", queued_tokens=9000))
    full = node("small", a_memory(MIB, total=16 * GIB))
    for nodes, expected in (((small, big), "small"), ((busy, big), "big"), ((full, big), "big")):
        result = place(
            ClusterView(nodes),
            ResourceDemand("tiny", 0, 1000),
            ReservationLedger(),
            now=NOW,
            draw=lambda: 0.5,
            policy=policy,
        )
        assert isinstance(result, Placement)
        assert result.chosen.name == expected


VERBS = dict(contexts())


def commands() -> list[object]:
    """Return every `cluster …` line of every shell block of every page."""
    pages = [ROOT / "README.md", *sorted(HERE.glob("*.md"))]
    lines = [
        (page.name, line.strip())
        for page in pages
        for block in re.findall(r"^```(?:sh)?\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
        if line.startswith("cluster ")
    ]
    return [pytest.param(line, id=f"{name}:{line[:60]}") for name, line in dict.fromkeys(lines)]


@pytest.mark.parametrize("line", commands())
def test_every_command_in_the_manual_is_one_that_exists(line: str):
    words = shlex.split(line.replace("…", "x").replace("[", "").replace("]", ""), comments=True)[1:]
    path: tuple[str, ...] = ("cluster",)
    while words and (*path, words[0]) in VERBS:
        path = (*path, words.pop(0))
    assert len(path) > 1, "there is no such verb"
    command, context = VERBS[path].command, VERBS[path]
    _, rest, _ = command.make_parser(context).parse_args(words)
    assert rest == [] or any(isinstance(one, click.Argument) for one in command.params), rest


def test_the_manual_builds_without_a_warning(tmp_path: Path):
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment(NO_MKDOCS_2_WARNING="1"))
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    pages = {file.relative_to(HERE).with_suffix(".html") for file in HERE.rglob("*.md")}
    assert {file for file in pages if not (tmp_path / file).exists()} == set()
    loaded = re.compile(r'(?:src|href)="(https?://[^"]+\.(?:js|css|woff2?|png|svg)\b[^"]*)"')
    outside = {url for file in tmp_path.rglob("*.html") for url in loaded.findall(file.read_text())}
    assert outside == set(), "the site loads something from elsewhere"
