"""A complete node process that is paused, and a coordinator that ignores the pause and sends requests."""

import sys
import time
from pathlib import Path

import pytest

from host.node_marks import PauseFile
from host.node_marks import PauseRecord as Kept
from tests.support.cluster.older_protocol import old_coordinator
from tests.support.processes import Process
from wire.codec import encode
from wire.frames import (
    ClearCache,
    CountTokens,
    Finished,
    Generate,
    GenerationParams,
    LeaseRefused,
    LeaseRequest,
    LoadModel,
    Message,
    PauseNode,
    Refusal,
    Report,
)
from wire.refusals import RefusalCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]
HI = (Message("user", "hi"),)


async def test_a_paused_node_begins_nothing_for_any_key(tmp_path: Path) -> None:
    async with old_coordinator(tmp_path) as asker:
        asker.also = frozenset({LeaseRefused})
        state = asker.node("studio")
        PauseFile(state / "node").write(Kept(time.time() + 7200, "ann"))
        command = [sys.executable, "-P", "-m", "node.run", "--state", str(state)]
        settings = ("engine.kind=scripted", "node.machine=studio")
        node = Process([*command, *(word for one in settings for word in ("--set", one))], tmp_path / "node.err")
        try:
            told = await asker.ready()
            assert told.draining, "an older coordinator is told that the node drains"
            for number, frame in (
                (1, Generate(1, 1, "r", "scripted-1", HI, GenerationParams(), 0)),
                (2, LoadModel(2, "scripted-1")),
                (3, CountTokens(3, "scripted-1", HI, 0)),
            ):
                asker.send_new(encode(frame))
                refusal = await asker.until(Refusal)
                assert refusal.request == number
                assert refusal.refused.code is RefusalCode.DRAINING
                assert "paused by ann" in refusal.refused.message
                assert 7000 < (refusal.refused.retry_after or 0) <= 7200
            asker.send_new(encode(ClearCache(5, "")))
            assert (await asker.until(Finished)).request == 5, "this is no work for the pool"
            asker.send_new(encode(LeaseRequest("l1", 1, "job", "wan", 2**30, b"{}")))
            assert (await asker.until(LeaseRefused)).code == "node_paused"
            asker.send_new(encode(PauseNode(0.0)))
            await asker.until(Report, lambda one: not one.draining)
            asker.send_new(encode(CountTokens(4, "scripted-1", HI, 0)))
            assert (await asker.until(Finished)).prompt_tokens > 0
            assert not asker.unknown
        except BaseException:
            print(node.log.read_text()[-3000:])
            raise
        finally:
            node.close()
