"""Commands of users: key files and settings that cannot be read, and the model of a chat."""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from coordinator.cli import cluster
from coordinator.client.errors import REFUSED
from host.node_marks import has_left, mark_left
from tests.support.coordinator.answering_server import Server


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"\xff\xfe", "must contain one key and nothing else"),
    ],
)
def test_env_with_an_unreadable_key_file_is_a_clear_error(tmp_path: Path, content: bytes | None, text: str) -> None:
    key = tmp_path / "key"
    if content is not None:
        key.write_bytes(content)
    line = ["env", "--state", str(tmp_path), "--url", "https://10.0.0.1:8080", "--key-file", str(key)]
    done = CliRunner().invoke(cluster, line)
    assert done.exit_code == 4
    assert f"Error: {key} {text}" in done.output


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


def test_place_of_a_refused_request_fails_with_the_reason(server: Server):
    refused = {"code": "no_headroom", "status": 503, "message": "needs 43.5 GiB"}
    server.answer = {"model": "tiny", "candidates": [], "node": None, "name": None, "refused": refused}
    done = server.run("place", "tiny", "--prompt-tokens", "7")
    assert (done.exit_code, done.stderr) == (REFUSED, "Error: needs 43.5 GiB\n")
    assert server.asked == [("/api/v1/place", {"model": "tiny", "prompt_tokens": 7, "max_tokens": None})]


class ChatServer:
    """Server that lists one model and answers chats with `answers`, each a status and a body, in order."""

    def __init__(self, *answers: tuple[int, str]) -> None:
        rest, self.chats = list(answers), 0
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send(200, json.dumps({"data": [{"id": "tiny", "type": "llm"}]}))

            def do_POST(self) -> None:
                server.chats += 1
                self.rfile.read(int(self.headers["content-length"]))
                self.send(*rest.pop(0))

            def send(self, status: int, body: str) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, format: str, *args: object) -> None:
                return

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def chat(self, folder: Path, *words: str) -> Result:
        key = folder / "key"
        key.write_text("mp_a_b")
        url = f"http://127.0.0.1:{self.http.server_port}"
        try:
            return CliRunner().invoke(cluster, ["chat", "hi", *words, "--url", url, "--key-file", str(key)])
        finally:
            self.http.shutdown()
            self.http.server_close()


def build_error(message: str) -> str:
    return json.dumps({"error": {"message": message}})


def build_chunk(text: str) -> str:
    return "data: " + json.dumps({"choices": [{"delta": {"content": text}}]}) + "\n\n"


def test_chat_is_repeated_while_no_node_is_ready_and_prints_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("coordinator.cli.commands.use.RETRY_INTERVAL_SECONDS", 0.01)
    stream = build_chunk("one ") + ": a comment\n\n" + build_chunk("two") + "data: [DONE]\n\n"
    server = ChatServer((503, build_error("no node")), (503, build_error("no node")), (200, stream))
    assert (server.chat(tmp_path).stdout, server.chats) == ("one two\n", 3)


@pytest.mark.parametrize(("words", "status", "code"), [((), 404, 5), (("--wait", "0"), 503, REFUSED)])
def test_chat_is_not_repeated_after_a_refusal_or_its_wait(
    tmp_path: Path, words: tuple[str, ...], status: int, code: int
):
    server = ChatServer((status, build_error("no such model")))
    done = server.chat(tmp_path, *words)
    assert (done.exit_code, done.stderr, server.chats) == (code, "Error: no such model\n", 1)


def test_chat_that_breaks_off_prints_its_beginning_and_the_error(tmp_path: Path):
    done = ChatServer((200, build_chunk("one") + "data: " + build_error("the node was lost") + "\n\n")).chat(tmp_path)
    assert (done.exit_code, done.stdout, done.stderr) == (1, "one", "Error: the node was lost\n")


@pytest.mark.parametrize(("shell", "line"), [("sh", "export {}={}"), ("fish", "set -gx {} {}")])
def test_env_prints_variables_in_the_syntax_of_a_shell(server: Server, shell: str, line: str):
    url = server.options[1]
    lines = server.run("env", "--shell", shell).stdout.splitlines()
    assert lines[:3] == [
        line.format("OPENAI_BASE_URL", f"{url}/v1"),
        line.format("OPENAI_API_BASE", f"{url}/v1"),
        line.format("ANTHROPIC_BASE_URL", url),
    ]
    assert line.format("OPENAI_API_KEY", "mp_a_b") in lines
    assert server.asked == []


@pytest.mark.parametrize(("protocols", "code"), [((1, 1), 0), ((1, 99), 8), ((99, 99), 8)])
def test_version_fails_if_a_member_has_another_protocol(server: Server, protocols: tuple[int, ...], code: int):
    nodes = [
        {"name": f"n{number}", "version": "0.1.0", "protocol": protocol, "state": "ready"}
        for number, protocol in enumerate(protocols)
    ]
    server.answer = {"version": "0.1.0", "protocol": 1, "nodes": nodes}
    done = server.run("version", "--cluster", "-o", "json")
    answer = json.loads(done.stdout)
    assert (done.exit_code, [member["joinable"] for member in answer["members"]]) == (code, [p == 1 for p in protocols])
    assert answer["nodes"] == {"n0": "0.1.0", "n1": "0.1.0"}
