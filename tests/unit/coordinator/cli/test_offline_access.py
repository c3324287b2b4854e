"""Operations on tokens and keys without a running coordinator."""

import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import structlog
from click.testing import CliRunner
from structlog.testing import capture_logs

from coordinator.cli import cluster
from coordinator.cli.commands.tokens_and_keys import call_route
from coordinator.cli.offline_access import run_offline
from coordinator.client.api_client import ApiSession
from coordinator.client.errors import NOT_FOUND, REFUSED, UNREACHABLE, CommandError
from coordinator.state.database import Database
from coordinator.tls.cluster_ca import ClusterCa
from router.admission.usage import UsageTotals


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("authority", "authority.pem"),
        ("no authority", "authority.pem cannot be read .*: restore it from a backup"),
        ("pepper", "pepper"),
        ("disk", "could not be written"),
    ],
)
def test_a_file_that_cannot_be_used_is_a_clear_error(tmp_path: Path, broken: str, words: str) -> None:
    store = Database(tmp_path)
    store.create_cluster(ClusterCa(tmp_path / "authority", time.time).cluster, "home")
    store.close()
    if broken == "authority":
        (tmp_path / "authority" / "authority.pem").write_text("junk")
    elif broken == "no authority":
        (tmp_path / "authority" / "authority.pem").unlink()
    elif broken == "pepper":
        (tmp_path / "pepper").mkdir()
    else:
        with closing(sqlite3.connect(tmp_path / "cluster.db")) as connection:
            connection.execute("CREATE TRIGGER full BEFORE INSERT ON keys BEGIN SELECT RAISE(ABORT, 'disk full'); END")
    body = {"name": "laptop", "scopes": ["infer"], "ttl_seconds": None, "limits": None}
    body = {"name": "laptop", "uses": 1, "ttl_seconds": 60.0} if broken != "disk" else body | {"limits": {}}
    kind = "tokens" if broken != "disk" else "keys"
    with pytest.raises(CommandError, match=words):
        run_offline(ApiSession(tmp_path, None, None, "text"), "POST", f"/api/v1/{kind}", body)


def test_a_refused_operation_is_not_in_the_audit_log(tmp_path: Path) -> None:
    store = Database(tmp_path)
    store.create_cluster(ClusterCa(tmp_path / "authority", time.time).cluster, "home")
    store.close()
    session = ApiSession(tmp_path, None, None, "text")
    body = {"name": "laptop", "scopes": ["infer"], "ttl_seconds": None, "limits": {}}
    refused = [
        ("DELETE", "/api/v1/keys/unknown", {}, "there is no key unknown", NOT_FOUND),
        ("POST", "/api/v1/keys", body | {"limits": {"models": 5}}, "limits: ", 2),
        ("POST", "/api/v1/keys", body | {"name": "local"}, "is reserved for the owner of this machine", 2),
        ("PUT", "/api/v1/keys/unknown/name", {"name": "page"}, "is reserved for the owner of this machine", 2),
    ]
    for method, path, fields, words, code in refused:
        with pytest.raises(CommandError, match=words) as raised:
            run_offline(session, method, path, fields)
        assert raised.value.exit_code == code
    made = run_offline(session, "POST", "/api/v1/keys", body)
    run_offline(session, "DELETE", f"/api/v1/keys/{made['id']}", {})
    acts = run_offline(session, "GET", "/api/v1/audit?last=10", {})["acts"]
    assert [(act["action"], act["subject"]) for act in acts] == [
        ("create_key", f"laptop {made['id']}"),
        ("revoke_key", made["id"]),
    ]
    assert run_offline(session, "GET", "/api/v1/audit?last=0", {})["acts"] == []


def test_keys_are_changed_offline_as_by_the_coordinator(tmp_path: Path) -> None:
    store = Database(tmp_path)
    store.create_cluster(ClusterCa(tmp_path / "authority", time.time).cluster, "home")
    store.close()
    session = ApiSession(tmp_path, None, None, "text")

    def list_keys() -> dict[str, dict[str, Any]]:
        return {row["id"]: row for row in run_offline(session, "GET", "/api/v1/keys", {})["keys"]}

    body = {"name": "laptop", "scopes": ["infer"], "ttl_seconds": None, "limits": {}}
    before = time.time()
    made = run_offline(session, "POST", "/api/v1/keys", body | {"ttl_seconds": 60.0})
    key = made["id"]
    assert before + 60.0 <= list_keys()[key]["expires"] <= time.time() + 60.0
    other = run_offline(session, "POST", "/api/v1/keys", body | {"name": "phone"})["id"]
    run_offline(session, "PUT", f"/api/v1/keys/{key}/name", {"name": "desk"})
    run_offline(session, "PUT", f"/api/v1/keys/{key}/limits", {"limits": {"requests_per_minute": 7}})
    before = time.time()
    run_offline(session, "PUT", f"/api/v1/keys/{key}/expiry", {"ttl_seconds": 3600.0})
    row = list_keys()[key]
    assert (row["name"], row["limits"]["requests_per_minute"]) == ("desk", 7)
    assert before + 3600.0 <= row["expires"] <= time.time() + 3600.0
    rotated = run_offline(session, "POST", f"/api/v1/keys/{key}/rotate", {})
    assert rotated["key"] not in ("", made["key"])
    assert list_keys().keys() == {key, other}
    for operation, fields in (
        ("name", {"name": "tablet"}),
        ("limits", {"limits": {}}),
        ("expiry", {"ttl_seconds": None}),
        ("rotate", {}),
    ):
        with pytest.raises(CommandError, match="there is no key unknown") as raised:
            run_offline(session, "PUT", f"/api/v1/keys/unknown/{operation}", fields)
        assert raised.value.exit_code == NOT_FOUND
    with pytest.raises(CommandError, match="desk") as taken:
        run_offline(session, "PUT", f"/api/v1/keys/{other}/name", {"name": "desk"})
    assert taken.value.exit_code == REFUSED
    rows = run_offline(session, "GET", "/api/v1/audit?last=10", {})["acts"]
    assert {row["actor"] for row in rows} == {"offline"}
    acts = [act["action"] for act in rows]
    assert acts == ["create_key", "create_key", "rename_key", "limit_key", "expire_key", "rotate_key"]


def test_join_tokens_are_made_listed_and_revoked_offline(tmp_path: Path) -> None:
    store = Database(tmp_path)
    store.create_cluster(ClusterCa(tmp_path / "authority", time.time).cluster, "home")
    store.close()
    session = ApiSession(tmp_path, None, None, "text")
    made = run_offline(session, "POST", "/api/v1/tokens", {"name": "desk", "uses": 2, "ttl_seconds": 60.0})
    (row,) = run_offline(session, "GET", "/api/v1/tokens", {})["tokens"]
    assert (row["id"], row["name"], row["uses_left"]) == (made["id"], "desk", 2)
    assert made["token"] not in str(row), "the secret is shown once"
    run_offline(session, "DELETE", f"/api/v1/tokens/{row['id']}", {})
    with pytest.raises(CommandError, match="there is no token "):
        run_offline(session, "DELETE", "/api/v1/tokens/unknown", {})
    unnamed = run_offline(session, "POST", "/api/v1/tokens", {"name": "", "uses": 1, "ttl_seconds": 60.0})
    acts = run_offline(session, "GET", "/api/v1/audit?last=10", {})["acts"]
    assert [(act["action"], act["subject"]) for act in acts] == [
        ("create_token", f"desk {made['id']}"),
        ("revoke_token", made["id"]),
        ("create_token", unnamed["id"]),
    ]


def test_usage_is_summed_offline_by_key_and_day(tmp_path: Path) -> None:
    store = Database(tmp_path)
    store.create_cluster(ClusterCa(tmp_path / "authority", time.time).cluster, "home")
    for key, day in (("k1", "2026-01-30"), ("k1", "2026-01-31"), ("k2", "2026-01-31")):
        used = UsageTotals()
        used.count(10, 0, 1, failed=False)
        store.usage.add(key, "tiny", day, used)
    store.close()
    session = ApiSession(tmp_path, None, None, "text")

    def list_usage(query: str) -> list[tuple[str, int]]:
        rows = run_offline(session, "GET", f"/api/v1/keys/usage?{query}", {})["usage"]
        return [(row["key"], row["requests"]) for row in rows]

    assert list_usage("") == [("k1", 2), ("k2", 1)]
    assert list_usage("since=2026-01-31") == [("k1", 1), ("k2", 1)]
    assert list_usage("key=k1&since=2026-01-31") == [("k1", 1)]


def test_output_without_a_coordinator_is_the_answer_alone(tmp_path: Path) -> None:
    store = Database(tmp_path)
    store.create_cluster(ClusterCa(tmp_path / "authority", time.time).cluster, "home")
    store.close()
    done = CliRunner(env={"MACPOOL_URL": None}).invoke(
        cluster, ["token", "create", "--name", "desk", "--state", str(tmp_path), "-o", "json"]
    )
    assert (json.loads(done.stdout).keys(), done.stderr) == ({"schema", "id", "token"}, "")
    with capture_logs() as logs:
        structlog.get_logger().info("later")
    assert logs, "the log of this process is as before"


def test_a_folder_without_a_cluster_says_how_to_create_one(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=r"there is no cluster in .*: create one with `cluster up`") as raised:
        run_offline(ApiSession(tmp_path, None, None, "text"), "GET", "/api/v1/keys", {})
    assert raised.value.exit_code == NOT_FOUND
    assert not (tmp_path / "cluster.db").exists()
    (tmp_path / "node" / "identity").mkdir(parents=True)
    stored = {"cluster": "c", "node": "n", "machine": "m", "ca": "Y2E=", "addresses": ["10.0.0.1:8081"]}
    (tmp_path / "node" / "identity" / "identity.json").write_text(json.dumps(stored))
    with pytest.raises(CommandError, match=r"this Mac is a node, its coordinator runs on 10\.0\.0\.1: ") as raised:
        run_offline(ApiSession(tmp_path, None, None, "text"), "GET", "/api/v1/keys", {})
    assert raised.value.exit_code == UNREACHABLE


def test_a_coordinator_that_was_killed_does_not_keep_its_owner_from_the_keys(tmp_path: Path) -> None:
    store = Database(tmp_path)
    store.create_cluster(ClusterCa(tmp_path / "authority", time.time).cluster, "home")
    store.close()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound and not listening: a connection is refused
        run: dict[str, Any] = {"url": f"http://127.0.0.1:{closed.getsockname()[1]}", "secret": "mp_a_b", "ca": None}
        (tmp_path / "run.json").write_text(json.dumps(run | {"pid": ended.pid}))
        session = ApiSession(tmp_path, None, None, "text")
        made = call_route(session, "POST", "/api/v1/tokens", {"name": "", "uses": 1, "ttl_seconds": 60.0})
        assert str(made["token"]).startswith("mpj1.")
        (tmp_path / "run.json").write_text(json.dumps(run | {"pid": os.getpid()}))
        with pytest.raises(CommandError, match="cannot be reached"):
            call_route(session, "GET", "/api/v1/tokens")


@pytest.mark.parametrize(
    ("path", "wrong", "words"),
    [
        ("keys", {"name": ""}, "name: String should have at least 1 character"),
        ("keys", {"name": "a\nb"}, "name: String should match pattern"),
        ("keys", {"name": "a\udcff"}, "name: Input should be a valid string"),
        ("keys", {"ttl_seconds": 1e12}, "ttl_seconds: Input should be less than or equal to 315360000"),
        ("keys/KEY/name", {"name": ""}, "name: String should have at least 1 character"),
        ("keys/KEY/expiry", {"ttl_seconds": 1e12}, "ttl_seconds: Input should be less than or equal to 315360000"),
        ("tokens", {"ttl_seconds": 1e12}, "ttl_seconds: Input should be less than or equal to 2592000"),
        ("tokens", {"name": "a\udcff"}, "name: Input should be a valid string"),
    ],
)
def test_what_the_api_refuses_is_refused_without_a_coordinator(
    tmp_path: Path, path: str, wrong: dict[str, Any], words: str
) -> None:
    store = Database(tmp_path)
    store.create_cluster(ClusterCa(tmp_path / "authority", time.time).cluster, "home")
    store.close()
    session = ApiSession(tmp_path, None, None, "text")
    good = {"name": "laptop", "scopes": ["infer"], "ttl_seconds": None, "limits": {}}
    key = run_offline(session, "POST", "/api/v1/keys", good)["id"]
    full = {"keys": good | {"name": "other"}, "tokens": {"name": "", "uses": 1, "ttl_seconds": 60.0}}.get(path, {})
    method = "PUT" if "/" in path else "POST"
    with pytest.raises(CommandError, match=words):
        run_offline(session, method, f"/api/v1/{path.replace('KEY', key)}", full | wrong)
    stored = run_offline(session, "GET", "/api/v1/keys", {})["keys"]
    assert [(row["name"], row["expires"]) for row in stored] == [("laptop", None)]
    assert run_offline(session, "GET", "/api/v1/tokens", {})["tokens"] == []
