"""Commands of users: files that cannot be read, the model of a chat, and the requests and output of each command."""

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from coordinator.cli import cluster
from coordinator.cli.commands.clients import trust_ca
from coordinator.cli.commands.use import BUNDLE_VARIABLES
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


def test_chat_sends_its_limit_and_a_prompt_of_standard_input_and_refuses_an_empty_one(server: Server):
    server.answer = {"data": [{"id": "tiny", "type": "llm"}], "id": "chat-1"}
    words = ["chat", "--model", "big", "--max-tokens", "7", "-o", "json", *server.options]
    done = CliRunner().invoke(cluster, words, input="from a pipe\n")
    assert json.loads(done.stdout) == {"schema": 1, **server.answer}
    message = {"role": "user", "content": "from a pipe\n"}
    body = {"model": "big", "messages": [message], "stream": False, "max_tokens": 7}
    assert server.asked[1:] == [("/v1/chat/completions", body)]
    for text in ("", " \n"):
        done = CliRunner().invoke(cluster, words, input=text)
        assert (done.exit_code, "the prompt is empty" in done.stderr) == (2, True)
    assert len(server.asked) == 2


@pytest.mark.parametrize(("model", "noted"), [("macpool-tiny", True), ("tiny", False)])
def test_chat_with_the_demo_model_says_so(tmp_path: Path, model: str, noted: bool):
    done = ChatServer((200, build_chunk("hello"))).chat(tmp_path, "--model", model)
    assert (done.stdout, "is a demo with a few fixed answers" in done.stderr) == ("hello\n", noted)


def test_the_link_to_the_page_is_printed_and_not_opened_without_a_terminal(
    server: Server, monkeypatch: pytest.MonkeyPatch
):
    opened = list[str]()
    monkeypatch.setattr("click.launch", opened.append)
    server.answer = {"url": "http://127.0.0.1:8080/#in=x", "seconds": 120}
    assert server.run("open").stdout == "http://127.0.0.1:8080/#in=x\n"
    assert (server.methods, server.asked, opened) == (["POST"], [("/api/v1/page/links", {})], [])


def test_requests_are_listed_shown_by_their_id_or_exported(server: Server, tmp_path: Path):
    server.answer = {"requests": [], "decisions": [], "under_way": []}
    file = tmp_path / "decisions"
    assert server.run("explain", "--last", "7").exit_code == 0
    assert server.run("explain", "chat/1", "-o", "json").exit_code == 0
    assert server.run("explain", "--export", str(file)).stdout == ""
    paths = ["/api/v1/requests?last=7", "/api/v1/requests/chat%2F1", "/api/v1/decisions"]
    assert [path for path, _ in server.asked] == paths
    assert json.loads(file.read_bytes()) == server.answer


@pytest.mark.parametrize("policy", ["balanced", "most_headroom"])
def test_a_file_of_decisions_is_compared_with_a_policy(tmp_path: Path, policy: str):
    file = tmp_path / "decisions"
    file.write_bytes(b"")
    done = CliRunner().invoke(cluster, ["replay", str(file), "--policy", policy, "-o", "json"])
    answer = json.loads(done.stdout)
    assert (answer["schema"], answer["policy"], answer["decisions"], answer["instead"]) == (1, policy, 0, [])
    done = CliRunner().invoke(cluster, ["replay", str(file), "--policy", policy])
    assert done.stdout.startswith(f"0 decisions, 0 of them refusals: 0 the same with {policy}, 0 different; ")
    file.write_bytes(b"no decision\n")
    done = CliRunner().invoke(cluster, ["replay", str(file), "--policy", policy])
    assert (done.exit_code, f"{file}, line 1: " in done.stderr) == (2, True)


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


CERTIFICATE_NOTE = "# the certificate: run `cluster trust-ca` once on each machine"


@pytest.mark.parametrize(
    ("url", "trusted", "base", "file", "is_noted"),
    [
        ("http://10.0.0.1:8080", None, "http://10.0.0.1:8080", None, False),
        ("https://10.0.0.1:8080", None, "https://10.0.0.1:8080", None, True),
        ("https://10.0.0.1:8080", ("https://10.0.0.1:8080", "/ca.pem"), "https://10.0.0.1:8080", "/ca.pem", False),
        (None, ("https://10.0.0.9:8080", "/ca.pem"), "https://10.0.0.9:8080", "/ca.pem", False),
    ],
)
def test_env_names_the_endpoint_of_another_machine_and_its_certificate(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    url: str | None,
    trusted: tuple[str, str] | None,
    base: str,
    file: str | None,
    is_noted: bool,
):
    monkeypatch.setattr(trust_ca, "find_trusted_endpoint", lambda *_: trusted)
    words = ["env", "--state", str(tmp_path), *(["--url", url] if url else [])]
    plain = dict.fromkeys(name for name in os.environ if name.startswith("MACPOOL_"))
    lines = CliRunner(env=plain).invoke(cluster, words).stdout.splitlines()
    assert f"export OLLAMA_HOST={base}" in lines
    assert [line for line in lines if "_CA_" in line or "CERT_" in line] == [
        f"export {name}={file}" for name in BUNDLE_VARIABLES if file
    ]
    assert "# OPENAI_API_KEY, ANTHROPIC_API_KEY, OLLAMA_API_KEY: the key that" in "\n".join(lines)
    assert any(line.startswith(CERTIFICATE_NOTE) for line in lines) is is_noted
    variables = json.loads(CliRunner(env=plain).invoke(cluster, [*words, "-o", "json"]).stdout)
    assert (variables["schema"], variables["OPENAI_BASE_URL"], variables["SSL_CERT_FILE"]) == (1, f"{base}/v1", file)
    assert variables["OPENAI_API_KEY"] is None


@pytest.mark.parametrize(("authority", "file"), [("", None), ("PEM", None), ("PEM", "/bundle.pem")])
def test_env_names_the_endpoint_of_a_coordinator_on_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, authority: str, file: str | None
):
    facts = {"url": "https://127.0.0.1:8443", "secret": "mp_a_b", "pid": os.getpid(), "ca": authority}
    (tmp_path / "run.json").write_text(json.dumps(facts))
    monkeypatch.setattr(trust_ca, "find_bundle", lambda _, pem: file if pem == authority else None)
    monkeypatch.setattr(trust_ca, "find_trusted_endpoint", lambda *_: ("https://10.0.0.9:8080", "/ca.pem"))
    plain = dict.fromkeys(name for name in os.environ if name.startswith("MACPOOL_"))
    lines = CliRunner(env=plain).invoke(cluster, ["env", "--state", str(tmp_path)]).stdout.splitlines()
    assert lines[0] == "export OPENAI_BASE_URL=https://127.0.0.1:8443/v1"
    assert (f"export SSL_CERT_FILE={file}" in lines) is (file is not None)
    assert any(line.startswith(CERTIFICATE_NOTE) for line in lines) is (bool(authority) and file is None)
    assert "mp_a_b" not in "\n".join(lines), "the key of local commands is for this machine only"


def test_version_lists_the_members_with_the_next_step(server: Server):
    nodes = [
        {"name": "same", "version": "0.1.0", "protocol": 1, "state": "ready"},
        {"name": "away", "version": "", "protocol": 0, "state": "lost"},
    ]
    server.answer = {"version": "0.1.0", "protocol": 1, "nodes": nodes}
    assert len(server.run("version").stdout.splitlines()) == 1
    assert server.asked == []
    rows = [line.split() for line in server.run("version", "--cluster").stdout.splitlines()[1:]]
    assert rows[0] == ["MEMBER", "STATE", "VERSION", "PROTOCOL", "NEXT", "STEP"]
    assert [row[0] for row in rows[1:]] == ["coordinator", "same", "away"]
    assert rows[2] == ["same", "ready", "0.1.0", "1", "ok"]
    assert rows[3][1:4] == ["lost", "-", "-"]


def test_help_is_that_of_a_command_or_a_clear_error():
    assert (
        "Usage: cluster key limit" in CliRunner().invoke(cluster, ["help", "key", "limit"], prog_name="cluster").stdout
    )
    for words, message in (
        (("status", "now"), "`cluster status` has no commands of its own"),
        (("key", "limt"), "did you mean `cluster key limit`?"),
    ):
        done = CliRunner().invoke(cluster, ["help", *words], prog_name="cluster")
        assert (done.exit_code, message in done.stderr) == (2, True)


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
