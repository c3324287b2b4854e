"""Identity of a node with which commands query its coordinator.

The queries: tests/abuse/link/test_member_queries.py.
"""

import json
from pathlib import Path

import pytest

from coordinator.client.api_client import ApiSession
from coordinator.client.errors import UNREACHABLE, CommandError
from coordinator.client.member_client import (
    MemberIdentity,
    get_coordinator_host,
    query_coordinator,
    read_member_identity,
)

STORED = {"cluster": "c", "node": "n", "machine": "m", "ca": "Y2E=", "addresses": ["[fe80::1]:8081", "10.0.0.1:8081"]}


def store(state: Path, content: str) -> Path:
    folder = state / "node" / "identity"
    folder.mkdir(parents=True)
    (folder / "identity.json").write_text(content)
    return folder


def test_a_node_is_read_from_its_folder(tmp_path: Path):
    folder = store(tmp_path, json.dumps(STORED))
    identity = read_member_identity(tmp_path)
    assert identity == MemberIdentity(folder, "c", "n", "m", b"ca", ("[fe80::1]:8081", "10.0.0.1:8081"))
    assert identity is not None
    assert get_coordinator_host(identity) == "[fe80::1]"
    with pytest.raises(CommandError, match="its coordinator runs on"):
        ApiSession(tmp_path, None, None, "text").select_coordinator()


def test_the_state_of_a_coordinator_is_no_node(tmp_path: Path):
    store(tmp_path, json.dumps(STORED))
    (tmp_path / "cluster.db").touch()
    assert read_member_identity(tmp_path) is None
    with pytest.raises(CommandError, match="start one with `cluster up`"):
        ApiSession(tmp_path, None, None, "text").select_coordinator()


@pytest.mark.parametrize("content", ["", "[]", "{}", "7", json.dumps(STORED | {"ca": 5}), json.dumps({"ca": "Y2E="})])
def test_a_damaged_identity_is_no_node(tmp_path: Path, content: str):
    store(tmp_path, content)
    assert read_member_identity(tmp_path) is None
    assert read_member_identity(tmp_path / "other") is None


@pytest.mark.parametrize(
    ("addresses", "tried"),
    [((), "no address is known"), (("10.0.0.1:many",), "10.0.0.1:many .its address or its answer")],
)
def test_an_address_that_is_missing_or_wrong_is_named(tmp_path: Path, addresses: tuple[str, ...], tried: str):
    identity = MemberIdentity(tmp_path, "c", "n", "m", b"ca", addresses)
    with pytest.raises(CommandError, match=f"cannot be reached: {tried}") as caught:
        query_coordinator(identity, "/api/v1/status")
    assert caught.value.exit_code == UNREACHABLE


def test_a_node_without_a_coordinator_of_its_own_reads_three_paths_with_its_certificate(tmp_path: Path):
    store(tmp_path, json.dumps(STORED | {"addresses": ["127.0.0.1:1"]}))
    session = ApiSession(tmp_path, None, None, "text")
    for path in ("/api/v1/status", "/api/v1/nodes", "/api/v1/models"):
        with pytest.raises(CommandError, match=r"127\.0\.0\.1:1"):
            session.request_json("GET", path)
    for method, path in (("GET", "/api/v1/keys"), ("POST", "/api/v1/nodes")):
        with pytest.raises(CommandError) as refused:
            session.request_json(method, path)
        assert "127.0.0.1:1" not in refused.value.message
    (tmp_path / "login.json").write_text(json.dumps({"url": "http://127.0.0.1:2", "key": "mp_a"}))
    with pytest.raises(CommandError, match=r"127\.0\.0\.1:2"):
        session.request_json("GET", "/api/v1/status")
