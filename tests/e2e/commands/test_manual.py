"""Every command and every program of the manual's first pages, run as written against a real pool."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.effort import thin_cases
from tests.support.cluster.engine_pool import MLX
from tests.support.processes import CLI, Pool, environment, pool

DOCS = Path(__file__).parents[3] / "docs"
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")]
LONG = (
    "cluster up",
    "cluster join",
    "echo mpj1.…",
    "uv tool install",
    "cluster approve",
    "cluster login",
    "sudo ",
    "cluster open",
    "cluster doctor",
)
"""Commands that run until they are stopped, install something, or need another machine. test_walks.py types these."""
PLACEHOLDERS = {"mp_…": "{key}", "http://127.0.0.1:8080/v1": "{base}", "NAME": "studio", "MODEL": "macpool-tiny"}


def blocks(page: str) -> list[object]:
    """Return the blocks of a page that are typed or run."""
    found = BLOCK.findall((DOCS / page).read_text())
    return [pytest.param(kind, text, id=f"{page}-{at}") for at, (kind, text) in enumerate(found)]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with pool(tmp_path_factory.mktemp("manual")) as made:
        made.up()
        for name in ("mini", "studio"):
            made.join(name, *MLX)
        shim = made.folder / "bin" / "cluster"
        shim.parent.mkdir()
        shim.write_text(f'#!/bin/sh\nexec {shlex.join(CLI)} "$@" --state {shlex.quote(str(made.state))}\n')
        shim.chmod(0o755)
        yield made


@pytest.mark.parametrize(
    ("kind", "text"), [case for page in ("examples.md", "start.md") for case in thin_cases(blocks(page), 2, kept=1)]
)
def test_a_block_works_as_it_is_written(home: Pool, kind: str, text: str, tmp_path: Path):
    base = home.facts["base_url"]
    for told, meant in PLACEHOLDERS.items():
        text = text.replace(told, meant.format(key=home.key, base=base))
    if kind == "sh":
        text = "\n".join(line for line in text.splitlines() if not line.startswith(LONG))
    command = ["sh", "-euxc", text] if kind == "sh" else [sys.executable, "-c", text]
    path = f"{home.folder / 'bin'}:{os.environ['PATH']}"
    known = environment(OPENAI_BASE_URL=base, OPENAI_API_KEY=home.key, PATH=path)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env=known, check=False)
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
