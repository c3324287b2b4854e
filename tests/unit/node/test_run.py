"""Program of a node: the line that it prints once it is ready."""

import json
import os
import sys
from pathlib import Path

import pytest
import structlog.testing

from node.agent.identity import NodeIdentity
from node.run import Announce
from wire.identity import NodeId

IDENTITY = NodeIdentity("c1", NodeId("n1"), "studio", "m1", Path("/nowhere"), b"", b"")


@pytest.mark.parametrize("output", ["text", "json"])
def test_node_announces_once_that_it_is_ready(output: str, capsys: pytest.CaptureFixture[str]) -> None:
    announce = Announce(output, IDENTITY)
    announce("mac:8081")
    announce("other:8081")
    (line,) = capsys.readouterr().out.splitlines()
    if output == "json":
        line = json.loads(line)["cluster_url"]
    assert line in ("macpool://mac:8081", "studio is in the pool of mac:8081; Ctrl-C stops it")


def test_output_without_a_reader_does_not_end_the_link(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(os.dup(write), "w") as closed, structlog.testing.capture_logs() as logs:
        monkeypatch.setattr(sys, "stdout", closed)
        Announce("text", IDENTITY)("mac:8081")
        monkeypatch.undo()
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), closed.fileno())  # the buffer still has the line
    os.close(write)
    assert [line["event"] for line in logs] == ["ready line not printed"]
