"""Conventions of every verb: plain output without a terminal, no colour with NO_COLOR, and progress of long calls."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.cli import cluster
from docs.generate import contexts
from tests.support.cluster.whole_pool import Served, served
from tests.test_routes import CLI, VERBS

ROOT = Path(__file__).parents[2]
COLOUR = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-8]|4[0-8]|9[0-7]|10[0-7])(?:;\d+)*m")
ARGUMENTS: dict[str, list[str]] = {
    "node show": ["a"],
    "node logs": ["a"],
    "video show": ["video_x"],
    "video wait": ["video_x"],
    "video get": ["video_x"],
    "pulls wait": ["pull-x"],
    "model show": ["scripted-1"],
    "key show": ["first"],
    "token show": ["first"],
    "logs": ["--bytes", "1000"],
    "top": ["--once"],
    "config check": [],
    "config show": [],
    "env": [],
    "completion": ["bash"],
    "service status": [],
    "simulate": ["--help"],
    "version": ["--cluster"],
}
"""Arguments of the verbs that only read."""
READING = sorted(
    {
        verb
        for verb, routes in VERBS.items()
        if not isinstance(routes, str) and all(one.startswith("GET") for one in routes)
    }
    - {"trust-ca", "login"}
    | set(ARGUMENTS)
)


@pytest.fixture(scope="module")
def pool() -> Iterator[Served]:
    with served() as made:
        yield made


def run_verb(verb: str, pool: Served, folder: Path, *, color: bool, **env: str) -> str:
    """Run a verb that only reads, and return its complete output, with any exit code."""
    (folder / "key").write_text(pool.keys["admin"])
    clean = dict.fromkeys(("MACPOOL_STATE", "MACPOOL_URL", "MACPOOL_KEY_FILE", "NO_COLOR", "FORCE_COLOR"))
    where = ["--state", str(folder)]
    if not verb.startswith(("config", "service", "completion", "simulate")):
        where += ["--url", pool.url, "--key-file", str(folder / "key")]
    elif not verb.startswith("config"):
        where = []
    runner = CliRunner(env={**clean, "PYTHONPATH": str(ROOT), **env})
    done = runner.invoke(cluster, [*verb.split(), *ARGUMENTS.get(verb, []), *where], color=color)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.output


def test_most_verbs_that_look_are_tried():
    assert len(READING) > 20
    assert set(READING) <= set(VERBS)


@pytest.mark.parametrize("verb", READING)
def test_no_color_is_honoured_and_plain_is_plain(verb: str, pool: Served, tmp_path: Path):
    if verb == "doctor":
        return  # takes seconds to check the machine: below
    assert COLOUR.search(run_verb(verb, pool, tmp_path, color=True, FORCE_COLOR="1", NO_COLOR="1")) is None
    assert "\x1b" not in run_verb(verb, pool, tmp_path, color=False)


def test_the_doctor_is_coloured_for_a_person_only(pool: Served, tmp_path: Path):
    shown = run_verb("doctor --all", pool, tmp_path, color=True)
    assert COLOUR.search(shown)
    assert "?[" not in shown, "the filter of the terminal knows the colours of all results"
    assert COLOUR.search(run_verb("doctor", pool, tmp_path, color=True, NO_COLOR="1")) is None


def test_commands_have_plain_text_help():
    for path, context in contexts():
        assert "\x1b" not in context.get_help()
        assert context.command.help, path


PATIENT = {
    "coordinator/client/api_client.py": "the one place that asks",
    "coordinator/client/config_inspect.py": "a child that takes a moment, and is given up if it does not",
    "coordinator/cli/commands/clients/trust_ca.py": "it asks for a password itself, or for a page of some kilobytes",
    "coordinator/cli/commands/use.py": "a chat prints its tokens as they come; an export is written as it comes",
    "coordinator/cli/commands/logs_and_top.py": "it follows what it prints",
    "coordinator/cli/commands/video/videos.py": "a video on its way to a file, whose progress is the file",
    "coordinator/cli/commands/nodes.py": "a log that is printed as it comes",
}
"""Files in which a call may last without showing progress, and the reasons."""


def test_long_commands_show_progress():
    silent = [
        f"{file.name}:{call.lineno}"
        for file in sorted(CLI.glob("*.py"))
        for call, inside in calls(ast.parse(file.read_text()), inside=False)
        if lasts(call) and not inside and f"coordinator/cli/{file.name}" not in PATIENT
    ]
    assert silent == []


def calls(node: ast.AST, *, inside: bool) -> Iterator[tuple[ast.Call, bool]]:
    """Yield every call below a node, and whether it is inside a `with waiting(…)` or a progress bar."""
    if isinstance(node, ast.With):
        inside = inside or any("waiting(" in ast.unparse(one) or "_progress(" in ast.unparse(one) for one in node.items)
    if isinstance(node, ast.Call):
        yield node, inside
    for below in ast.iter_child_nodes(node):
        yield from calls(below, inside=inside)


def lasts(call: ast.Call) -> bool:
    """Return whether a call may take more than a second: it has a timeout, or waits for a program."""
    text = ast.unparse(call.func)
    named = any(word.arg == "timeout" for word in call.keywords) or any(
        "PATIENCE" in ast.unparse(one) for one in call.args
    )
    return text.endswith("subprocess.run") or (named and text.startswith("session."))
