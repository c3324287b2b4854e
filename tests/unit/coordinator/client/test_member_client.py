"""Queries of commands with the identity of a node, to a process that has a certificate of the cluster.

The queries to a complete coordinator: tests/abuse/link/test_member_queries.py.
"""

import json
import socket
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.client import member_client
from coordinator.client.api_client import ApiSession
from coordinator.client.errors import DENIED, PROTOCOL, UNREACHABLE, CommandError
from coordinator.client.member_client import (
    MemberIdentity,
    get_coordinator_host,
    query_coordinator,
    read_member_identity,
)
from coordinator.tls.cluster_ca import ClusterCa
from node.agent.identity import new_request, store_identity
from wire.codec import Splitter, decode, encode
from wire.frames import Denied, FetchChunk, MemberQuery
from wire.identity import NodeId

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


def join(folder: Path, authority: ClusterCa) -> MemberIdentity:
    """Return a member of a cluster without addresses."""
    request = new_request("studio")
    certificate = authority.sign_request(request.csr, NodeId("n-1"), "studio")
    store_identity(folder, request, certificate, authority.cluster, authority.ca, "m-1")
    return MemberIdentity(folder, authority.cluster, "n-1", "m-1", authority.ca, ())


@contextmanager
def serve(authority: ClusterCa, *answers: bytes, host: str = "127.0.0.1") -> Generator[tuple[str, list[object]]]:
    """Answer each query with one of the `answers`, and yield the address and the queries."""
    context, queries = authority.get_server_context(), list[object]()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET

    def answer(listening: socket.socket) -> None:
        for content in answers:
            plain, _ = listening.accept()
            try:
                with context.wrap_socket(plain, server_side=True) as link:
                    splitter, frames = Splitter(), list[object]()
                    while not frames and (data := link.recv(65_536)):
                        frames = [decode(tag, body) for tag, body in splitter.feed(data)]
                    queries.extend(frames)
                    link.sendall(content)
            except OSError:  # the client rejects the certificate, or has read enough
                continue

    with socket.create_server((host, 0), family=family) as listening:
        thread = threading.Thread(target=answer, args=(listening,))
        thread.start()
        try:
            number = listening.getsockname()[1]
            yield (f"[{host}]:{number}" if ":" in host else f"{host}:{number}"), queries
        finally:
            for _ in answers:  # the thread must end although a test fails before the last query
                with suppress(OSError):
                    socket.create_connection(listening.getsockname()[:2], 10).close()
            thread.join()


def chunks(*parts: bytes) -> bytes:
    """Return the frames of a complete answer."""
    return b"".join(encode(FetchChunk(0, part, last=at == len(parts))) for at, part in enumerate(parts, 1))


def test_a_query_has_the_identity_of_the_node_and_the_first_valid_answer_counts(tmp_path: Path):
    authority = ClusterCa(tmp_path / "authority", time.time)
    member = join(tmp_path / "node", authority)
    with serve(authority, b"", chunks(b"no JSON"), chunks(b'{"nodes": ', b"[]}"), host="::1") as (address, queries):
        asking = replace(member, addresses=("127.0.0.1:1", address, address, address, "127.0.0.1:2"))
        assert query_coordinator(asking, "/api/v1/nodes") == {"nodes": []}
    assert queries == [MemberQuery(member_client.SPOKEN, "n-1", "m-1", "/api/v1/nodes")] * 3


def test_every_address_without_an_answer_is_named_with_its_reason(tmp_path: Path):
    authority = ClusterCa(tmp_path / "authority", time.time)
    with serve(authority, encode(FetchChunk(0, b"{}", last=False)), chunks(b"{")) as (address, _):
        asking = replace(join(tmp_path / "node", authority), addresses=(address, address))
        with pytest.raises(CommandError) as caught:
            query_coordinator(asking, "/api/v1/nodes")
    assert (caught.value.exit_code, caught.value.message) == (
        UNREACHABLE,
        f"the coordinator of this node cannot be reached: {address} (it ended the connection before its answer was "
        f"complete), {address} (its address or its answer is invalid); check that `cluster up` runs there",
    )


def test_a_peer_that_is_not_the_coordinator_gets_no_query(tmp_path: Path):
    authority, other = (ClusterCa(tmp_path / name, time.time) for name in ("authority", "other"))
    member = join(tmp_path / "node", authority)
    another = replace(member, cluster="another")
    for shown, asking, code, message in (
        (other, member, UNREACHABLE, "certificate verify failed"),
        (authority, another, DENIED, "is not the coordinator of this node's cluster"),
    ):
        with serve(shown, chunks(b"{}")) as (address, queries), pytest.raises(CommandError, match=message) as caught:
            query_coordinator(replace(asking, addresses=(address,)), "/api/v1/nodes")
        assert (caught.value.exit_code, queries) == (code, [])


@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        (encode(Denied("removed", "this node was removed")), DENIED, "this node was removed"),
        (b"\xff" * 64, PROTOCOL, "uses another protocol: "),
    ],
)
def test_a_refusal_and_another_protocol_end_the_query(tmp_path: Path, answer: bytes, code: int, message: str):
    authority = ClusterCa(tmp_path / "authority", time.time)
    with serve(authority, answer) as (address, _), pytest.raises(CommandError, match=message) as caught:
        query_coordinator(replace(join(tmp_path / "node", authority), addresses=(address,)), "/api/v1/nodes")
    assert caught.value.exit_code == code


def test_a_certificate_of_the_node_that_cannot_be_read_is_named(tmp_path: Path):
    authority = ClusterCa(tmp_path / "authority", time.time)
    member = join(tmp_path / "node", authority)
    (member.folder / "node.pem").write_text("no certificate")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        with pytest.raises(CommandError, match="the certificate of this node cannot be read") as caught:
            query_coordinator(replace(member, addresses=(address,)), "/api/v1/nodes")
    assert caught.value.exit_code == DENIED


def test_an_answer_without_end_is_not_read_further(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(member_client, "MAX_ANSWER_BYTES", 100_000)
    authority = ClusterCa(tmp_path / "authority", time.time)
    endless = b"".join(encode(FetchChunk(0, b"x" * 60_000, last=False)) for _ in range(4))
    with serve(authority, endless) as (address, _), pytest.raises(CommandError, match="its answer is invalid"):
        query_coordinator(replace(join(tmp_path / "node", authority), addresses=(address,)), "/api/v1/nodes")
