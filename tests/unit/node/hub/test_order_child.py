"""Children of orders that fail: each order ends, and no process is left."""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest

from node.hub.child_messages import ChildProgress, VerifyOrder
from node.hub.order_child import NICENESS, OrderChild
from tests.support.hub.downloads import list_children
from wire.frames.model_files import ModelOrderCode

ORDER = VerifyOrder(folder="/nonexistent", digests="/nonexistent/digests.json")


def make_module(folder: Path, monkeypatch: pytest.MonkeyPatch, content: str) -> str:
    """Write a module that a child can run, and return its name."""
    (folder / "stubborn_child.py").write_text(content)
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[4]}")
    return "stubborn_child"


async def run(module: str) -> tuple[str, str, list[ChildProgress]]:
    progress = list[ChildProgress]()
    end = await OrderChild(module, ORDER, progress.append).run()
    assert list_children("stubborn_child") == []
    return end.code, end.message, progress


@pytest.mark.parametrize(
    ("content", "code", "text"),
    [
        ("import sys; sys.exit(3)", ModelOrderCode.FAILED, "exit code 3"),
        ("raise ValueError('hf_secretsecretsecretsecret')", ModelOrderCode.FAILED, "exit code 1"),
        ("import os; os.kill(os.getpid(), 9)", ModelOrderCode.INTERRUPTED, "SIGKILL"),
        ("", ModelOrderCode.FAILED, "exit code 0"),
    ],
)
async def test_a_child_without_an_end_fails_its_order(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    content: str,
    code: ModelOrderCode,
    text: str,
):
    found, message, _ = await run(make_module(tmp_path, monkeypatch, content))
    assert (found, text in message) == (code, True)
    assert "secretsecret" not in capfd.readouterr().out + message


async def test_a_child_that_sends_garbage_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    began = time.monotonic()
    content = 'import time; print(\'{"type": "progress", "phase": "checking"}\\n[\', flush=True); time.sleep(60)'
    code, _, progress = await run(make_module(tmp_path, monkeypatch, content))
    assert (code, [message.phase for message in progress]) == (ModelOrderCode.FAILED, ["checking"])
    assert time.monotonic() - began < 30


async def test_a_child_has_a_low_priority_before_it_reads_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content = (
        "import os, sys; sys.stdin.readline(); "
        'print(\'{"type": "progress", "phase": "checking", "done": %d}\' % os.nice(0), flush=True)'
    )
    _, _, progress = await run(make_module(tmp_path, monkeypatch, content))
    assert [message.done for message in progress] == [max(NICENESS, os.nice(0))]


async def test_a_cancelled_child_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        'print(\'{"type": "progress", "phase": "checking"}\', flush=True); time.sleep(60)'
    )
    module = make_module(tmp_path, monkeypatch, content)
    child = OrderChild(module, ORDER, lambda _: child.cancel())
    end = await child.run()
    assert end.code == ModelOrderCode.CANCELLED
    assert list_children("stubborn_child") == []


async def test_a_child_that_is_cancelled_before_it_starts_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    child = OrderChild(make_module(tmp_path, monkeypatch, "import time; time.sleep(60)"), ORDER, lambda _: None)
    child.cancel()
    async with asyncio.timeout(10):
        end = await child.run()
    assert end.code == ModelOrderCode.CANCELLED
    assert list_children("stubborn_child") == []


async def test_a_program_that_cannot_be_started_fails_its_order(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    code, message, _ = await run("node.hub.verifier")
    assert (code, "cannot be started" in message) == (ModelOrderCode.FAILED, True)
