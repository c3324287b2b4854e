"""Children of orders that fail: each order ends, and no process is left."""

import asyncio
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from structlog.testing import capture_logs

from node.hub import order_child
from node.hub.child_messages import ChildProgress, VerifyOrder
from node.hub.order_child import MAX_LINE_BYTES, NICENESS, OrderChild
from tests.support.hub.downloads import list_children
from tests.support.processes import until
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


@pytest.mark.parametrize("niceness", [0, NICENESS + 5])
async def test_a_child_has_a_low_priority_and_its_own_group_before_it_reads_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, niceness: int
):
    content = (
        "import os, sys; sys.stdin.readline(); "
        'print(\'{"type": "progress", "phase": "checking", "done": %d, "total": %d}\' '
        "% (os.nice(0), os.getpgrp() == os.getpid()), flush=True)"
    )
    monkeypatch.setattr(order_child, "os", SimpleNamespace(**{**vars(os), "nice": lambda _: niceness}))
    _, _, progress = await run(make_module(tmp_path, monkeypatch, content))
    assert [(message.done, message.total) for message in progress] == [(max(NICENESS, niceness, os.nice(0)), 1)]


@pytest.mark.parametrize(("size", "code"), [(MAX_LINE_BYTES // 2, "completed"), (2 * MAX_LINE_BYTES, "failed")])
async def test_a_message_may_be_long_up_to_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, code: str
):
    content = f'print(\'{{"type": "end", "code": "completed", "message": "%s"}}\' % ("a" * {size}), flush=True)'
    found, message, _ = await run(make_module(tmp_path, monkeypatch, content))
    assert (found, message == "a" * size) == (code, code == "completed")


async def test_the_end_of_the_errors_of_a_child_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content = "import sys; sys.stderr.write('first' + 'a' * 9000 + 'hf_secretsecretsecretsecret last'); sys.exit(3)"
    with capture_logs() as events:
        await run(make_module(tmp_path, monkeypatch, content))
    (errors,) = [event["errors"] for event in events]
    assert errors.endswith(" last")
    assert ("first" in errors, "secretsecret" in errors) == (False, False)


async def test_a_cancelled_run_kills_its_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    content = 'import time; print(\'{"type": "progress", "phase": "checking"}\', flush=True); time.sleep(60)'
    started = asyncio.Event()
    child = OrderChild(make_module(tmp_path, monkeypatch, content), ORDER, lambda _: started.set())
    task = asyncio.create_task(child.run())
    await asyncio.wait_for(started.wait(), 30)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await asyncio.to_thread(until, lambda: not list_children("stubborn_child"), 20)


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
