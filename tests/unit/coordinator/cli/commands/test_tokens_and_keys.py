"""Durations, output and requests of the commands for tokens and keys."""

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import Result

from coordinator.cli.commands.tokens_and_keys import Duration
from tests.support.coordinator.answering_server import Server


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("1.5h", 5400.0), ("30d", 2_592_000.0)])
def test_a_duration_is_converted_to_seconds(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["nans", "infd", "-1h", "0s", "5", "h", "", "1w"])
def test_a_text_that_is_no_finite_duration_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a duration"):
        Duration().convert(text, None, None)


# commands

KEY = {
    "id": "k1",
    "name": "laptop",
    "scopes": ["infer", "admin"],
    "created": 0.0,
    "expires": None,
    "limits": {"concurrency": 2},
}
TOKEN = {"id": "t1", "name": "", "uses_left": 3, "created": 0.0, "expires": 60.0}
ANSWER = {"keys": [KEY], "tokens": [TOKEN], "key": "mp_k1_secret", "token": "mpj_t1_secret"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    made.answer = ANSWER
    yield made
    made.http.shutdown()
    made.http.server_close()


def read_lines(done: Result) -> list[str]:
    """Return the printed lines with single spaces."""
    assert done.exit_code == 0, done.output
    return [" ".join(line.split()) for line in done.stdout.splitlines()]


def test_a_token_is_printed_with_its_command_where_there_is_one(server: Server):
    assert read_lines(server.run("token", "create")) == ["mpj_t1_secret"]
    server.answer = ANSWER | {"join": "cluster join …"}
    done = server.run("token", "create", "--expires", "2m", "--uses", "5", "--name", "lab")
    assert read_lines(done) == ["cluster join …"]
    assert [body for _, body in server.asked] == [
        {"ttl_seconds": 3600.0, "uses": 1, "name": ""},
        {"ttl_seconds": 120.0, "uses": 5, "name": "lab"},
    ]


def test_tokens_are_shown_and_revoked_by_their_id(server: Server):
    assert read_lines(server.run("token", "list"))[1].startswith("t1 3 ")
    assert read_lines(server.run("token", "show", "t1"))[:3] == ["id t1", "name -", "uses left 3"]
    assert read_lines(server.run("token", "revoke", "t1", "--yes")) == ["token t1 revoked"]
    assert server.asked[-1][0] == "/api/v1/tokens/t1"


def test_a_new_key_is_sent_with_its_scopes_and_limits_and_printed(server: Server):
    assert read_lines(server.run("key", "create", "laptop")) == ["mp_k1_secret"]
    words = ("--scope", "admin", "--scope", "metrics", "--expires", "1d", "--concurrency", "2")
    server.run("key", "create", "desk", *words)
    assert [body for _, body in server.asked] == [
        {"name": "laptop", "scopes": ["infer"], "ttl_seconds": None, "limits": {}},
        {"name": "desk", "scopes": ["admin", "metrics"], "ttl_seconds": 86400.0, "limits": {"concurrency": 2}},
    ]


def test_keys_are_shown_without_their_secret(server: Server):
    listed = read_lines(server.run("key", "list"))
    assert listed[1].startswith("k1 laptop ")
    shown = dict(line.split(maxsplit=1) for line in read_lines(server.run("key", "show", "laptop")))
    assert (shown["id"], shown["name"], "2" in shown["limits"]) == ("k1", "laptop", True)
    assert all(scope in shown["scopes"] for scope in ("infer", "admin"))
    assert "secret" not in "".join(listed) + str(shown)
    answer = json.loads(server.run("key", "show", "laptop", "-o", "json").stdout)
    assert answer == {"schema": 1, "key": KEY}


def test_an_id_is_preferred_to_the_same_name_of_another_key(server: Server):
    server.answer = ANSWER | {"keys": [KEY | {"id": "k2", "name": "k1"}, KEY]}
    assert read_lines(server.run("key", "show", "k1"))[:2] == ["id k1", "name laptop"]
    server.answer = ANSWER | {"keys": [KEY | {"id": "k2"}, KEY]}
    done = server.run("key", "show", "laptop")
    assert (done.exit_code, "2 keys are named laptop: name one by its id (k2, k1)" in done.stderr) == (2, True)


def test_the_new_expiry_is_read_after_its_change(server: Server):
    read_lines(server.run("key", "expire", "laptop", "1d"))
    keys, change = ("/api/v1/keys", None), ("/api/v1/keys/k1/expiry", {"ttl_seconds": 86400.0})
    assert server.asked == [keys, change, keys]


@pytest.mark.parametrize(("words", "sent"), [(("1d", "--never"), 0), ((), 0), (("--never",), 3)])
def test_an_expiry_is_a_time_or_never(server: Server, words: tuple[str, ...], sent: int):
    assert server.run("key", "expire", "laptop", *words).exit_code == (0 if sent else 2)
    assert len(server.asked) == sent
    assert ("/api/v1/keys/k1/expiry", {"ttl_seconds": None}) in server.asked or not sent


@pytest.mark.parametrize(
    ("words", "path", "text"),
    [
        (("rotate", "laptop"), "/api/v1/keys/k1/rotate", "mp_k1_secret"),
        (("revoke", "k1"), "/api/v1/keys/k1", "key laptop (k1) revoked"),
    ],
)
def test_a_secret_is_voided_only_after_a_confirmation(server: Server, words: tuple[str, ...], path: str, text: str):
    assert server.run("key", *words).exit_code == 2
    assert [asked for asked, _ in server.asked] == ["/api/v1/keys"]
    assert read_lines(server.run("key", *words, "--yes")) == [text]
    assert server.asked[-1][0] == path


def test_a_change_of_one_limit_keeps_every_other_one(server: Server):
    kept = {"models": ["m*"], "tokens_per_minute": 5, "waiting": 0, "priority": "low", "upstreams": False}
    limits = {**kept, "labels": [], "requests_per_minute": None, "concurrency": 2}
    server.answer = ANSWER | {"keys": [KEY | {"limits": limits}]}
    read_lines(server.run("key", "limit", "laptop", "--concurrency", "3"))
    read_lines(server.run("key", "limit", "laptop", "--clear", "concurrency"))
    sent = [body for path, body in server.asked if path == "/api/v1/keys/k1/limits"]
    assert sent == [{"limits": {**kept, "concurrency": 3}}, {"limits": kept}]


def test_usage_and_the_audit_log_are_tables(server: Server):
    used = {"requests": 7, "failed": 1, "prompt_tokens": 20, "cached_tokens": 5, "completion_tokens": 9}
    server.answer = ANSWER | {"usage": [{"key": "k1", "name": "laptop", "model": "tiny", **used}]}
    done = server.run("key", "usage", "laptop", "--since", "2026-01-31")
    assert read_lines(done)[1] == "k1 laptop tiny 7 1 20 5 9"
    assert server.asked[-1][0] == "/api/v1/keys/usage?key=k1&since=2026-01-31"
    acts = [
        {"at": 0.0, "actor": "k1", "actor_name": "laptop", "address": "10.0.0.1", "action": "cordon", "subject": "n1"},
        {"at": 0.0, "actor": "local", "actor_name": "", "address": "", "action": "remove", "subject": "n2"},
    ]
    server.answer = {"acts": acts}
    lines = read_lines(server.run("audit", "--last", "2"))
    assert lines[1].endswith("laptop 10.0.0.1 cordon n1")
    assert lines[2].endswith("local - remove n2")
    assert server.asked[-1][0] == "/api/v1/audit?last=2"
