"""Followed logs, the live view, and `cluster metrics-config` with the token with which Prometheus scrapes."""

import io
import json
import stat
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from coordinator.cli import cluster
from coordinator.cli.commands.logs_and_top import (
    EVENTS_TIMEOUT_SECONDS,
    LiveView,
    format_log_line,
    print_log,
    render_node_table,
)
from coordinator.client.api_client import ApiSession
from coordinator.client.errors import CommandError
from coordinator.observe.event_log import KEEPALIVE_SECONDS
from tests.support.cluster.whole_pool import Served, served
from tests.support.coordinator.answering_server import Server
from tests.unit.coordinator.cli.test_tables import a_node
from wire.node_state import NodeState


@pytest.fixture(scope="module")
def pool() -> Iterator[Served]:
    with served() as made:
        yield made


def test_a_damaged_token_file_is_replaced_and_no_key_is_revoked(server: Server, tmp_path: Path) -> None:
    (tmp_path / "p").mkdir(mode=0o700)
    token = tmp_path / "p" / "macpool.token"
    token.write_bytes(b"mp_\xff\xfe_secret")
    keys = [{"id": "old", "name": "prometheus"}]
    server.answer = {"keys": keys, "key": "mp_new_secret", "base_url": "http://10.0.0.1:8080/v1"}
    done = server.run("metrics-config", "--folder", str(tmp_path / "p"), "--renew")
    assert done.exit_code == 0, done.output
    assert token.read_text() == "mp_new_secret"
    posted = [(path, body) for path, body in server.asked if path.startswith("/api/v1/keys")]
    assert posted == [("/api/v1/keys", None), ("/api/v1/keys", {"name": "prometheus-2", "scopes": ["metrics"]})]


@pytest.mark.parametrize(
    ("words", "route"),
    [
        (("logs",), "/api/v1/logs?"),
        (("logs", "my mac"), "/api/v1/nodes/my%20mac/logs?"),
        (("events",), "/api/v1/events?"),
    ],
)
def test_a_followed_log_that_the_coordinator_ends_is_an_error(
    server: Server, words: tuple[str, ...], route: str
) -> None:
    server.answer = {"event": "x"}
    done = server.run(*words, "-f")
    assert (done.exit_code, "can no longer be read" in done.stderr) == (3, True)
    path = server.asked[0][0]
    assert (path.startswith(route), path.endswith("&follow=true")) == (True, True)
    assert server.run(*words).exit_code == 0
    assert "follow" not in server.asked[-1][0]


@pytest.mark.parametrize("mode", [None, 0o755])
def test_an_existing_folder_of_prometheus_keeps_its_mode(server: Server, tmp_path: Path, mode: int | None) -> None:
    folder = tmp_path / "etc" / "prometheus"
    if mode is not None:
        folder.mkdir(parents=True)
        folder.chmod(mode)
    server.answer = {"keys": [], "key": "mp_new_secret", "base_url": "http://10.0.0.1:8080/v1"}
    assert server.run("metrics-config", "--folder", str(folder)).exit_code == 0
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "macpool.token")}
    assert modes == {"prometheus": mode or 0o700, "macpool.token": 0o600}


def test_renew_revokes_the_former_scrape_token_and_writes_another(pool: Served, tmp_path: Path):
    (tmp_path / "key").write_text(pool.keys["admin"])
    where = ["--state", str(tmp_path), "--url", pool.url, "--key-file", str(tmp_path / "key"), "-o", "json"]

    def run(*words: str) -> dict[str, Any]:
        done = CliRunner().invoke(cluster, [*words, *where])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    def list_ids() -> set[str]:
        return {key["id"] for key in run("key", "list")["keys"] if key["name"].startswith("prometheus")}

    folder = tmp_path / "scrape"
    token = folder / "macpool.token"
    assert run("metrics-config", "--folder", str(folder))["token_file"] == str(token)
    first = token.read_text()
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert list_ids() == {first.split("_")[1]}
    run("metrics-config", "--folder", str(folder))
    assert token.read_text() == first, "a second call keeps the token"
    run("metrics-config", "--folder", str(folder), "--renew")
    assert token.read_text() != first
    assert list_ids() == {token.read_text().split("_")[1]}
    assert [key["name"] for key in run("key", "list")["keys"] if key["id"] in list_ids()] == ["prometheus"]
    renewed = token.read_text()
    run("key", "revoke", renewed.split("_")[1], "--yes")
    run("metrics-config", "--folder", str(folder))
    assert list_ids() == {token.read_text().split("_")[1]} != {renewed.split("_")[1]}, "a revoked token is replaced"
    before = token.read_text()
    run("key", "rotate", before.split("_")[1], "--yes")
    run("metrics-config", "--folder", str(folder))
    assert list_ids() == {token.read_text().split("_")[1]} != {before.split("_")[1]}, "a replaced secret as well"
    later = token.read_text()
    run("key", "expire", later.split("_")[1], "30d")
    run("metrics-config", "--folder", str(folder))
    assert token.read_text() == later, "a token that expires later stays"
    top = run("top")
    assert (top["nodes"], top["cluster"]) == (run("nodes")["nodes"], run("status")["cluster"])


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("as_json", [False, True])
def test_a_log_is_printed_whole_also_if_its_last_line_is_not_ended(
    as_json: bool, fails: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = "first ä\nsecond\nhalf a line"
    raw = lines.encode()
    cut = raw.index("ä".encode()) + 1  # within a character

    def iterate_pieces() -> Iterator[bytes]:
        yield from (raw[:cut], raw[cut:14], raw[14:])
        if fails:
            raise CommandError(3, "the connection broke")

    session = ApiSession(tmp_path, None, None, "json" if as_json else "text")
    with pytest.raises(CommandError) if fails else nullcontext():
        print_log(session, iterate_pieces())
    assert capsys.readouterr().out == (lines if as_json else f"{lines}\n")


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ((), "10.0.0.1:8080"),
        (("--host", "pool.example"), "pool.example:8080"),
        (("--host", "fd00::1"), "[fd00::1]:8080"),
    ],
)
def test_prometheus_scrapes_the_named_host(server: Server, tmp_path: Path, words: tuple[str, ...], target: str) -> None:
    server.answer = {"keys": [], "key": "mp_new_secret", "base_url": "http://10.0.0.1:8080/v1"}
    done = server.run("metrics-config", "--folder", str(tmp_path / "p"), *words)
    assert done.exit_code == 0, done.output
    text = (tmp_path / "p" / "prometheus.yml").read_text()
    assert target in text
    assert text in done.stdout
    assert ("10.0.0.1" in text) is (not words)


def write_run_file(folder: Path, url: str, secret: str) -> None:
    (folder / "run.json").write_text(json.dumps({"url": url, "secret": secret}))


def test_the_live_view_continues_after_a_restart_of_the_coordinator(pool: Served, tmp_path: Path):
    view, console = LiveView(ApiSession(tmp_path, None, None, "text")), Console(width=160)

    def render() -> str:
        with console.capture() as shown:
            console.print(view.render(160))
        return shown.get()

    with pytest.raises(CommandError, match="no coordinator runs"):
        render()
    write_run_file(tmp_path, pool.url, pool.keys["admin"])
    assert "home  up" in render()
    (tmp_path / "run.json").unlink()
    stopped = render()
    assert "no coordinator runs" in stopped
    assert "Trying again. The state below is 0s old." in stopped.replace("\n", " ")
    assert "home  up" in stopped
    write_run_file(tmp_path, "http://127.0.0.1:1", "mp_a_b")
    assert "http://127.0.0.1:1 cannot be reached" in render()
    write_run_file(tmp_path, pool.url, pool.keys["admin"])
    assert "Trying again" not in render()
    write_run_file(tmp_path, pool.url, "mp_a_b")
    with pytest.raises(CommandError, match="unknown, expired or revoked") as refused:
        render()
    assert refused.value.exit_code == 4


def test_followed_events_end_if_the_coordinator_is_silent(server: Server, monkeypatch: pytest.MonkeyPatch):
    """The connection to a Mac without power stays open."""
    assert EVENTS_TIMEOUT_SECONDS > 3 * KEEPALIVE_SECONDS
    monkeypatch.setattr("coordinator.cli.commands.logs_and_top.EVENTS_TIMEOUT_SECONDS", 0.2)
    server.may.clear()
    done = server.run("events", "-f")
    server.may.set()
    assert (done.exit_code, "did not answer within 0 s" in done.stderr) == (7, True), done.output


def test_a_followed_log_ends_with_an_error_when_its_key_is_revoked(
    pool: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("coordinator.api.routes.logs_and_events.FOLLOW_INTERVAL_SECONDS", 0.001)
    log = pool.folder / "coordinator.log"
    log.write_text("first\n")
    made = pool.built.admin.create_key("auditor", ["admin"], None)
    write_run_file(tmp_path, pool.url, made["key"])
    pieces = ApiSession(tmp_path, None, None, "text").follow("/api/v1/logs?follow=true")
    assert next(pieces) == b"first\n"
    assert pool.call(lambda: pool.built.admin.revoke_key(made["id"]))
    with log.open("a") as file:
        file.write("secret\n")
    with pytest.raises(CommandError, match="create another with `cluster key create NAME`") as refused:
        next(pieces)
    assert refused.value.exit_code == 4


def test_a_followed_log_that_can_no_longer_be_read_ends_with_an_error(
    pool: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("coordinator.api.routes.logs_and_events.FOLLOW_INTERVAL_SECONDS", 0.001)
    log = pool.folder / "coordinator.log"
    log.write_text("first\n")
    write_run_file(tmp_path, pool.url, pool.keys["admin"])
    pieces = ApiSession(tmp_path, None, None, "text").follow("/api/v1/logs?follow=true")
    assert next(pieces) == b"first\n"
    log.unlink()
    log.mkdir()
    assert b"Is a directory" in next(pieces)
    with pytest.raises(CommandError, match="check the node with `cluster nodes`") as ended:
        next(pieces)
    assert ended.value.exit_code == 3
    log.rmdir()


LINKED_AT = "2026-11-29T10:00:00.500000Z"


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            f'{{"timestamp":"{LINKED_AT}","level":"info","logger":"x","event":"node linked","node":"a","n":1}}',
            "{}  info     node linked  node=a  n=1",
        ),
        (
            '{"timestamp":"yesterday T at noon, or so","event":"a\\nb","k":"\\u001b[2J"}',
            "yesterday   at noon           a b",
        ),
        ("no json", "no json"),
        ("[1]", "[1]"),
        ("7", "7"),
    ],
)
def test_a_line_of_a_log_is_formatted_if_it_is_an_event(line: str, text: str):
    formatted = format_log_line(line)
    assert formatted.startswith(text.format(f"{datetime.fromisoformat(LINKED_AT).astimezone():%Y-%m-%d %H:%M:%S}"))
    assert "\x1b" not in formatted
    assert "\n" not in formatted


def test_events_are_printed_as_lines_or_as_json(server: Server, monkeypatch: pytest.MonkeyPatch):
    pieces = [b'id: 1\ndata: {"event":"one","level":"info"}\n\n: still', b' here\n\nid: 2\ndata: {"event":"two"}\n\n']
    asked = list[str]()
    monkeypatch.setattr(ApiSession, "stream", lambda _, path: asked.append(path) or iter(pieces))
    done = server.run("events", "--last", "7", "-o", "json")
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"event": "one", "level": "info"},
        {"event": "two"},
    ]
    assert [line.split() for line in server.run("events").stdout.splitlines()] == [["info", "one"], ["two"]]
    assert asked == ["/api/v1/events?last=7", "/api/v1/events?last=50"]


def test_the_state_is_printed_once_without_a_terminal(server: Server):
    condition = {"name": "GuardOff", "summary": "off on \x1ba", "severity": "critical"}
    server.answer = {
        "cluster": {"name": "home"},
        "uptime_seconds": 7200.0,
        "nodes": [a_node("a", 2), a_node("b", 2, NodeState.LOST)],
        "in_flight": 3,
        "queued": 4,
        "conditions": [condition],
    }
    states = dict.fromkeys(NodeState, 0) | {"ready": 1, "lost": 1}
    answers: dict[str, Any] = {"/api/v1/status": {**server.answer, "nodes": states}, "/api/v1/nodes": server.answer}
    server.on_request = lambda: setattr(server, "answer", answers["/api/v1/" + server.asked[-1][0].rpartition("/")[2]])
    lines = [line.rstrip() for line in server.run("top").stdout.splitlines()]
    assert lines[0] == "home  up 2h  1 ready, 1 lost  3 in flight  4 queued"
    assert lines[2].startswith("GuardOff: off on ")
    assert "\x1b" not in lines[2]
    assert lines[3].split()[:3] == ["NODE", "STATE", "MEMORY"]
    assert [line.split()[:2] for line in lines[4:6]] == [["a", "ready"], ["b", "lost"]]
    assert lines[-1] == "█ current  ▒ reserved  ░ margin  · free"
    for columns, shown in ((200, True), (80, False)):
        screen = io.StringIO()
        Console(width=columns, file=screen).print(render_node_table(answers["/api/v1/nodes"]["nodes"], columns))
        assert ("LAST REPORT" in screen.getvalue()) is shown
