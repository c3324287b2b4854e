"""Joining over real TLS on 127.0.0.1: the cases that must succeed, and servers that are not the coordinator."""

import asyncio
import base64
import errno
import json
import os
import re
import socket
import ssl
import stat
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.cluster.local_node import LocalNode
from coordinator.tls.cluster_ca import ClusterCa, build_common_name, create_certificate_builder, write_key_pair
from node.agent.enrollment import (
    CoordinatorUnreachable,
    EnrollDenied,
    EnrollError,
    IdentityError,
    IdentityMismatch,
    NodeIdentity,
    PinMismatch,
    create_client_context,
    enroll,
    explain_unreachable,
    install_certificate,
    load_identity,
    needs_renewal,
    new_csr,
    parse_address,
    proves_itself,
    store_address,
)
from node.agent.identity import new_request, store_identity
from node.agent.machine_id import compute_machine_id
from node.agent.rejoin import OtherClusterError, load_known_identity
from node.inspect.report import dial_coordinator, report_identity
from tests.support.cluster.enrolment import HARDWARE, Door, Wall, opened
from tests.support.processes import ROOT
from wire.codec import encode
from wire.frames import EnrollAuthority, EnrollPending, EnrollStart, Frame
from wire.identity import PROTOCOL, NodeId, build_coordinator_uri
from wire.join_token import JoinToken


async def join(
    door: Door | str, folder: Path, token: JoinToken | None, name: str = "studio", machine: str = "m1"
) -> NodeIdentity:
    """Enroll a node at a coordinator or an address."""
    return await enroll(
        door if isinstance(door, str) else door.address,
        token,
        name=name,
        machine=machine,
        hardware=HARDWARE,
        folder=folder,
        on_code=lambda code, seconds: None,
    )


async def test_a_token_enrolls_a_node_at_the_coordinator(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        identity = await join(door, tmp_path / "n", door.tokens.create())
        assert load_identity(tmp_path / "n", "m1") == identity
        assert identity.cluster == door.authority.cluster
        assert identity.addresses == (door.address,)
        assert [row.node for row in door.joined] == [identity.node]
        assert await proves_itself(identity, door.address)
        context = create_client_context(identity)
        reader, writer = await asyncio.open_connection("127.0.0.1", door.port, ssl=context, server_hostname="")
        assert await reader.read() == b"known"
        assert door.peers[-1].node == identity.node
        writer.close()


async def test_the_private_key_is_private(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        identity = await join(door, tmp_path / "n", door.tokens.create())
        new_csr(identity)
    assert stat.S_IMODE((tmp_path / "n").stat().st_mode) == 0o700
    for file in (tmp_path / "n").iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


async def test_two_nodes_of_one_name_get_different_names(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        token = door.tokens.create(uses=2)
        first = await join(door, tmp_path / "a", token, "studio", "m1")
        second = await join(door, tmp_path / "b", token, "Studio", "m2")
        assert (first.name, second.name) == ("studio", "Studio-2")
        assert first.node != second.node


async def test_a_machine_that_joins_again_is_the_same_node_and_its_old_certificate_is_denied(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        token = door.tokens.create(uses=2)
        first = await join(door, tmp_path / "a", token)
        serial = door.store.members[first.node].serial
        second = await join(door, tmp_path / "a", token)
        assert (second.node, second.name) == (first.node, first.name)
        assert door.store.deny_list.is_denied(first.node, serial)
        assert not door.store.deny_list.is_denied(second.node, door.store.members[second.node].serial)


async def test_a_cloned_identity_is_refused_until_the_clone_joins_by_itself(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        token = door.tokens.create(uses=2)
        original = await join(door, tmp_path / "n", token)
        with pytest.raises(IdentityMismatch, match="another machine"):
            load_identity(tmp_path / "n", "m2")
        clone = await join(door, tmp_path / "n", token, machine="m2")
        assert clone.node != original.node
        assert load_identity(tmp_path / "n", "m2") == clone


async def test_a_damaged_identity_is_a_clear_error(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        await join(door, tmp_path / "n", door.tokens.create())
    kept = json.loads((tmp_path / "n" / "identity.json").read_text())
    (tmp_path / "n" / "identity.json").write_text(json.dumps({**kept, "node": "other"}))
    with pytest.raises(IdentityError, match="another node"):
        load_identity(tmp_path / "n", "m1")
    for text in ("{", json.dumps({**kept, "ca": base64.b64encode(b"no certificate").decode()})):
        (tmp_path / "n" / "identity.json").write_text(text)
        with pytest.raises(IdentityError, match="damaged"):
            load_identity(tmp_path / "n", "m1")
        report = report_identity(tmp_path / "n", "m1")
        assert (report["identity"], report["identity_error"].endswith(": join again")) == (None, True)
    assert load_identity(tmp_path / "elsewhere", "m1") is None


async def test_what_a_token_does_to_an_identity_that_is_there(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door, opened(tmp_path / "d") as elsewhere:
        mine, foreign = door.tokens.create(), elsewhere.tokens.create()
        folder = tmp_path / "n"
        assert load_known_identity(folder, "m1", mine) is None
        kept = await join(door, folder, mine)
        assert load_known_identity(folder, "m1", None) == kept
        assert load_known_identity(folder, "m1", mine) == kept, "the join command may be repeated"
        with pytest.raises(OtherClusterError, match="cluster leave"):
            load_known_identity(folder, "m1", foreign)
        with pytest.raises(IdentityMismatch):
            load_known_identity(folder, "m2", None)
        assert load_known_identity(folder, "m2", mine) is None, "a copied identity is replaced"
        (folder / "identity.json").write_text("{")
        with pytest.raises(IdentityError, match="damaged"):
            load_known_identity(folder, "m1", None)
        assert load_known_identity(folder, "m1", mine) is None, "a damaged identity is replaced"


async def test_a_local_node_of_another_cluster_is_logged_once_and_not_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("MACPOOL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    async with opened(tmp_path / "c") as door, opened(tmp_path / "d") as elsewhere:
        foreign = str(elsewhere.tokens.create())
        settings = ("--set", "node.machine=m1", "--set", "engine.kind=scripted")
        await join(
            door, tmp_path / "state" / "node" / "identity", door.tokens.create(), machine=compute_machine_id("m1")
        )
        local = LocalNode(tmp_path / "state", "127.0.0.1:1", settings, lambda: foreign)
        await local.start()
        await asyncio.wait_for(local.given_up.wait(), 30)
        await local.close()


async def test_a_certificate_is_renewed_with_a_new_key(tmp_path: Path) -> None:
    wall = Wall()
    async with opened(tmp_path / "c", wall) as door:
        identity = await join(door, tmp_path / "n", door.tokens.create())
        assert not needs_renewal(identity, wall.now + 59 * 86400)
        assert needs_renewal(identity, wall.now + 61 * 86400)
        key = (tmp_path / "n" / "node.pem").read_bytes()
        renewed = install_certificate(
            identity, door.authority.sign_request(new_csr(identity), identity.node, identity.name)
        )
        assert (tmp_path / "n" / "node.pem").read_bytes() != key
        assert load_identity(tmp_path / "n", "m1") == renewed
        assert await proves_itself(renewed, door.address)
        with pytest.raises(IdentityError, match="not requested"):
            install_certificate(renewed, renewed.certificate)


async def test_only_the_requested_certificate_is_installed(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        token = door.tokens.create(uses=2)
        identity = await join(door, tmp_path / "a", token, machine="m1")
        other = await join(door, tmp_path / "b", token, machine="m2")
        with pytest.raises(IdentityError, match="not requested"):
            install_certificate(identity, identity.certificate)
        csr = new_csr(identity)
        for wrong in (other.certificate, identity.certificate, b"", door.authority.sign_request(csr, other.node)):
            with pytest.raises(IdentityError):
                install_certificate(identity, wrong)
        assert load_identity(tmp_path / "a", "m1") == identity


async def test_the_coordinator_renews_its_own_certificate_while_it_runs(tmp_path: Path) -> None:
    wall = Wall(time.time() - 61 * 86400)
    async with opened(tmp_path / "c", wall) as door:
        identity = await join(door, tmp_path / "n", door.tokens.create())
        assert not door.authority.renew()

        async def serial() -> str | None:
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port, ssl=create_client_context(identity))
            shown = writer.get_extra_info("peercert")["serialNumber"]
            assert await reader.read() == b"known"
            writer.close()
            return shown

        before = await serial()
        wall.now += 61 * 86400
        assert door.authority.renew()
        assert await serial() != before


async def test_addresses_are_remembered_latest_first(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        identity = await join(door, tmp_path / "n", door.tokens.create())
    moved = store_address(store_address(identity, "10.0.0.7:1"), "[fd00::1]:1")
    assert moved.addresses == ("[fd00::1]:1", "10.0.0.7:1", door.address)
    assert load_identity(tmp_path / "n", "m1") == moved
    assert store_address(moved, "10.0.0.7:1").addresses[0] == "10.0.0.7:1"


async def test_a_pairing_code_is_approved_by_an_admin(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        codes: asyncio.Queue[str] = asyncio.Queue()
        joining = asyncio.create_task(
            enroll(
                door.address,
                None,
                name="air",
                machine="m1",
                hardware=HARDWARE,
                folder=tmp_path / "n",
                on_code=lambda code, seconds: codes.put_nowait(code),
            )
        )
        code = await codes.get()
        (waiting,) = door.approvals.list_waiting(asyncio.get_running_loop().time())
        assert (waiting.code, waiting.name, waiting.hardware) == (code, "air", HARDWARE)
        door.approvals.approve(code, asyncio.get_running_loop().time())
        identity = await joining
        assert identity.name == "air"
        assert await proves_itself(identity, door.address)


async def test_a_pairing_code_is_rejected_by_an_admin(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        codes: asyncio.Queue[str] = asyncio.Queue()
        joining = asyncio.create_task(
            enroll(
                door.address,
                None,
                name="air",
                machine="m1",
                hardware=HARDWARE,
                folder=tmp_path / "n",
                on_code=lambda code, seconds: codes.put_nowait(code),
            )
        )
        door.approvals.reject(await codes.get(), asyncio.get_running_loop().time())
        with pytest.raises(EnrollDenied) as denied:
            await joining
        assert denied.value.reason == "rejected"
        assert denied.value.final
        assert not door.joined
        assert load_identity(tmp_path / "n", "m1") is None


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("studio.local:8081", ("studio.local", 8081)),
        ("studio.local", ("studio.local", 8081)),
        ("https://10.0.0.7:99/", ("10.0.0.7", 99)),
        ("[fd00::1]:99", ("fd00::1", 99)),
        ("[fe80::1%en0]", ("fe80::1%en0", 8081)),
        ("studio.local:65535", ("studio.local", 65535)),
    ],
)
def test_parse_address_returns_host_and_port(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "a b", "host:0", "host:65536", "host:x", "fd00::1", "http://h:1/path"])
def test_an_invalid_address_is_an_error(text: str) -> None:
    with pytest.raises(EnrollError, match="not an address"):
        parse_address(text)


@pytest.mark.parametrize(
    ("platform", "number", "named"),
    [("darwin", errno.EHOSTUNREACH, True), ("darwin", errno.ECONNREFUSED, False), ("linux", errno.EHOSTUNREACH, False)],
)
def test_only_a_mac_without_the_local_network_gets_the_hint(
    monkeypatch: pytest.MonkeyPatch, platform: str, number: int, named: bool
) -> None:
    monkeypatch.setattr("sys.platform", platform)
    assert ("Local Network" in explain_unreachable(OSError(number, "x"))) is named
    assert not explain_unreachable(ValueError("no port"))


@pytest.mark.parametrize(("days", "words"), [(2, "is not yet valid"), (-4000, "has expired")])
async def test_a_certificate_outside_its_validity_is_the_fault_of_a_clock(
    tmp_path: Path, days: int, words: str
) -> None:
    async with opened(tmp_path / "c", Wall(time.time() + days * 86400)) as door:
        with pytest.raises(CoordinatorUnreachable) as refused:
            await join(door, tmp_path / "n", door.tokens.create())
        text = str(refused.value)
        assert f"certificate {words} (at {time.strftime('%Y-%m-%d')}" in text
        assert "correct it, or the coordinator's" in text
        request = new_request("mini")
        signed = door.authority.sign_request(request.csr, NodeId("n"), "mini")
        known = store_identity(tmp_path / "m", request, signed, door.authority.cluster, door.authority.ca, "m2")
        seen = await asyncio.to_thread(dial_coordinator, known, door.address)
        assert (seen["proven"], words in seen["error"], "correct it" in seen["error"]) == (None, True, True)
        other = replace(known, ca=ClusterCa(tmp_path / "other", time.time).ca)
        seen = await asyncio.to_thread(dial_coordinator, other, door.address)
        assert (seen["proven"], "correct it" in seen["error"]) == (False, False), "another authority comes first"
        seen = dial_coordinator(known, "a..b:8081")
        assert (seen["proven"], "label empty" in seen["error"]) == (None, True), "no name of a host"


async def test_an_unreachable_address_is_named_in_the_form_in_which_it_is_entered(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    for text in (f"127.0.0.1:{port}", f"[::1]:{port}"):
        with pytest.raises(CoordinatorUnreachable, match=re.escape(f"{text} cannot be reached: ")):
            await join(text, tmp_path, None)


@pytest.mark.parametrize("content", [None, b"no certificate"])
async def test_a_node_without_a_readable_certificate_finds_no_coordinator(
    tmp_path: Path, content: bytes | None
) -> None:
    async with opened(tmp_path / "c") as door:
        identity = await join(door, tmp_path / "n", door.tokens.create())
        file = identity.folder / "node.pem"
        file.unlink()
        if content is not None:
            file.write_bytes(content)
        assert not await proves_itself(identity, door.address)


@asynccontextmanager
async def answering(context: ssl.SSLContext, *answers: Sequence[Frame]) -> AsyncGenerator[tuple[str, list[bytes]]]:
    """Run a TLS server that sends `answers[n]` on its n-th connection and closes it. Yield its address, and the bytes
    that it received on each connection."""
    received: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(received)
        received.append(b"")
        with suppress(OSError):
            received[number] = await reader.read(65536)
            writer.write(b"".join(map(encode, answers[number])))
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", received
    finally:
        server.close()
        await server.wait_closed()


START = encode(EnrollStart(PROTOCOL))
"""First frame of a node that has a token; it contains nothing secret."""


@pytest.mark.parametrize(
    ("broken", "error", "words"),
    [
        ("pin", PinMismatch, "not the one that made the token.*Nothing was sent"),
        ("changed", PinMismatch, "changed its CA between two connections"),
        ("cluster", CoordinatorUnreachable, "no valid cluster id"),
        ("silent", CoordinatorUnreachable, "closed the connection without an answer"),
        (
            "frame",
            CoordinatorUnreachable,
            "does not respond as a coordinator: EnrollPending instead of EnrollAuthority",
        ),
    ],
)
async def test_a_server_that_does_not_prove_the_coordinator_gets_no_token(
    tmp_path: Path, broken: str, error: type[EnrollError], words: str
) -> None:
    async with opened(tmp_path / "c") as door, opened(tmp_path / "d") as elsewhere:
        token = (elsewhere if broken == "pin" else door).tokens.create()
        valid = EnrollAuthority(door.authority.ca, door.authority.cluster, "lab")
        first, second = {
            "pin": ([valid], []),
            "changed": ([valid], [EnrollAuthority(elsewhere.authority.ca, door.authority.cluster, "lab")]),
            "cluster": ([EnrollAuthority(door.authority.ca, "a/../b", "lab")], []),
            "silent": ([], []),
            "frame": ([EnrollPending(60.0)], []),
        }[broken]
        async with answering(door.authority.get_server_context(), first, second) as (address, received):
            door.address = address
            with pytest.raises(error, match=words):
                await join(door, tmp_path / "n", token)
            assert received == [START] * (2 if broken == "changed" else 1)
    assert not (tmp_path / "n").exists()


async def check_pose_is_refused(door: Door, folder: Path, certificate: Path, words: str) -> None:
    """Join at a server that relays the CA of the cluster and has a certificate that is not the coordinator's.

    The node must refuse it before the token is sent, and create no `folder`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    valid = [EnrollAuthority(door.authority.ca, door.authority.cluster, "lab")]
    token = door.tokens.create()
    async with answering(context, valid, valid) as (address, received):
        door.address = address
        with pytest.raises(CoordinatorUnreachable, match=words):
            await join(door, folder, token)
        assert [data for data in received if data] == [START], "only the connection that fetches the CA"
    assert folder.name not in os.listdir(folder.parent)


async def test_a_node_of_the_cluster_cannot_pose_as_its_coordinator(tmp_path: Path) -> None:
    """A member has a certificate of the cluster's own authority, and knows the CA to which the token is pinned."""
    async with opened(tmp_path / "c") as door:
        member = await join(door, tmp_path / "member", door.tokens.create(), machine="m2")
        await check_pose_is_refused(door, tmp_path / "n", member.folder / "node.pem", "certificate")


async def test_a_member_that_answers_at_an_address_of_the_coordinator_does_not_prove_it(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        member = await join(door, tmp_path / "member", door.tokens.create(), machine="m2")
        identity = await join(door, tmp_path / "n", door.tokens.create())
        assert await proves_itself(identity, door.address)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(member.folder / "node.pem")
        async with answering(context, []) as (address, _):
            assert not await proves_itself(identity, address)


async def test_a_coordinator_of_another_authority_cannot_pose_with_the_right_id(tmp_path: Path) -> None:
    """The attacker relays the authority of the cluster, and shows a certificate with the coordinator's URI of its own
    authority."""
    async with opened(tmp_path / "c") as door:
        key = ec.generate_private_key(ec.SECP256R1())
        uri = build_coordinator_uri(door.authority.cluster)
        certificate = (
            create_certificate_builder("forged", key.public_key(), build_common_name("forged"), time.time(), 1e6)
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False)
            .sign(key, hashes.SHA256())
        )
        write_key_pair(tmp_path / "forged.pem", key, certificate)
        await check_pose_is_refused(door, tmp_path / "n", tmp_path / "forged.pem", "does not speak the cluster's TLS")
