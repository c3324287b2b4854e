"""Followed logs, the live view, and `cluster metrics-config` with the token with which Prometheus scrapes."""

import json
import stat
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from coordinator.cli import cluster
from coordinator.cli.commands.logs_and_top import EVENTS_TIMEOUT_SECONDS, LiveView, print_log
from coordinator.client.api_client import ApiSession
from coordinator.client.errors import CommandError
from coordinator.observe.event_log import KEEPALIVE_SECONDS
from tests.support.cluster.whole_pool import Served, served
from tests.support.coordinator.answering_server import Server


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
