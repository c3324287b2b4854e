"""Commands of users: key files and settings that cannot be read, and the model of a chat."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from coordinator.cli import cluster
from coordinator.client.errors import REFUSED
from host.node_marks import has_left, mark_left
from tests.support.cluster.answering_server import Server


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_env_with_an_unreadable_key_file_is_a_clear_error(tmp_path: Path, content: bytes | None) -> None:
    key = tmp_path / "key"
    if content is not None:
        key.write_bytes(content)
    line = ["env", "--state", str(tmp_path), "--url", "https://10.0.0.1:8080", "--key-file", str(key)]
    done = CliRunner().invoke(cluster, line)
    assert done.exit_code == 4
    assert "the key file cannot be read" in done.output


def test_up_with_settings_that_are_not_utf8_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b'name = "caf\xe9"')
    done = CliRunner().invoke(cluster, ["up", "--state", str(tmp_path)])
    assert done.exit_code == 2
    assert "config.toml: " in done.output
    assert "utf-8" in done.output


def test_up_that_is_refused_does_not_bring_back_a_node_that_left(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    mark_left(tmp_path / "node")
    plain = dict.fromkeys(name for name in os.environ if name.startswith("MACPOOL_"))
    line = ["up", "--state", str(tmp_path), "--local-node", "--models", str(tmp_path / "missing")]
    done = CliRunner(env=plain).invoke(cluster, line)
    assert (done.exit_code, "is not a folder" in done.output) == (2, True)
    assert has_left(tmp_path / "node")


def test_explain_refuses_an_id_with_export(tmp_path: Path) -> None:
    file = tmp_path / "decisions"
    done = CliRunner().invoke(cluster, ["explain", "chat-1", "--export", str(file), "--state", str(tmp_path)])
    assert (done.exit_code, "leave out either ID or --export" in done.output, file.exists()) == (2, True, False)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.http.shutdown()
    made.http.server_close()


VECTORS, SCORES = {"id": "a", "type": "embeddings"}, {"id": "b", "type": "rerank"}


@pytest.mark.parametrize(
    ("rows", "model"),
    [
        ([VECTORS, SCORES, {"id": "c", "type": "llm"}, {"id": "d", "type": "llm"}], "c"),
        ([VECTORS, {"id": "alias"}], "alias"),
    ],
)
def test_chat_goes_to_the_first_model_for_chats(server: Server, rows: list[dict[str, Any]], model: str):
    server.answer = {"data": rows}
    assert server.run("chat", "hello", "you", "-o", "json").exit_code == 0
    message = {"role": "user", "content": "hello you"}
    assert server.asked[1:] == [("/v1/chat/completions", {"model": model, "messages": [message], "stream": False})]


def test_chat_fails_after_its_wait_without_a_model_for_chats(server: Server):
    server.answer = {"data": [VECTORS, SCORES]}
    done = server.run("chat", "hello", "--wait", "0")
    assert (done.exit_code, "no node serves a model for chats" in done.stderr) == (REFUSED, True)
    assert len(server.asked) == 1
