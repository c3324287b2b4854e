"""The cluster port against strangers, over real TLS.

Each gets a clear answer or a closed connection. Other peers are not affected, and an honest node still joins
afterwards.
"""

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.joining.enrollment import MAX_CONNECTION_BYTES, EnrollmentConnection
from coordinator.joining.join_approvals import WrongCode
from node.agent.enrollment import (
    CoordinatorUnreachable,
    EnrollDenied,
    NodeIdentity,
    PinMismatch,
    create_authority_context,
    enroll,
    proves_itself,
)
from node.agent.identity import new_request
from tests.effort import scale_examples
from tests.support.cluster.enrolment import HARDWARE, Door, opened, said
from wire.certificate import read_certificate
from wire.codec import encode, split_into_fragments
from wire.frames import Denied, Enroll, EnrollAuthority, Enrolled, EnrollStart, Frame, Hello, Ping
from wire.identity import PROTOCOL, build_coordinator_uri, build_node_uri
from wire.join_token import JoinToken, compute_request_mac, derive_token_key

START = EnrollStart(PROTOCOL)


async def join(
    door: Door,
    folder: Path,
    token: JoinToken | None,
    machine: str = "m1",
    on_code: Callable[[str], None] = lambda _: None,
) -> NodeIdentity:
    return await enroll(
        door.address,
        token,
        name="studio",
        machine=machine,
        hardware=HARDWARE,
        folder=folder,
        on_code=lambda code, _: on_code(code),
    )


async def still_works(door: Door, folder: Path) -> None:
    identity = await join(door, folder, door.tokens.create(), "honest")
    assert await proves_itself(identity, door.address)


async def reason(door: Door, folder: Path, token: JoinToken) -> str:
    with pytest.raises(EnrollDenied) as denied:
        await join(door, folder, token)
    return denied.value.reason


def asking(token: JoinToken, csr: bytes) -> Enroll:
    return Enroll(csr, "studio", "m1", HARDWARE, token.id, compute_request_mac(derive_token_key(token.secret), csr))


async def test_two_race_for_one_token(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        token = door.tokens.create()
        outcomes = await asyncio.gather(
            *(join(door, tmp_path / f"n{number}", token, f"m{number}") for number in range(4)), return_exceptions=True
        )
        won = [outcome for outcome in outcomes if isinstance(outcome, NodeIdentity)]
        lost = [outcome.reason for outcome in outcomes if isinstance(outcome, EnrollDenied)]
        assert (len(won), lost) == (1, ["token_used"] * 3)
        assert len(door.store.members) == 1


async def test_used_expired_revoked_and_unknown_tokens(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        used, expired, revoked = door.tokens.create(uses=2), door.tokens.create(ttl=60), door.tokens.create()
        await join(door, tmp_path / "a", used, "m1")
        await join(door, tmp_path / "b", used, "m2")
        door.tokens.revoke(revoked.id)
        door.wall.now += 61
        assert await reason(door, tmp_path / "n", used) == "token_used"
        assert await reason(door, tmp_path / "n", expired) == "token_expired"
        assert await reason(door, tmp_path / "n", revoked) == "token_unknown"
        assert await reason(door, tmp_path / "n", JoinToken(used.pin, "aaaaaaaa", used.secret)) == "token_unknown"


async def test_guessed_secret_is_refused_and_keeps_the_token(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        token = door.tokens.create()
        for guess in range(5):
            assert (
                await reason(door, tmp_path / "n", JoinToken(token.pin, token.id, bytes([guess]) * 16)) == "token_wrong"
            )
        await join(door, tmp_path / "n", token)


async def test_a_wrong_pin_stops_before_anything_is_sent(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door, opened(tmp_path / "other") as other:
        with pytest.raises(PinMismatch, match="Nothing was sent"):
            await join(door, tmp_path / "n", other.tokens.create())
        assert not door.joined
        assert not (tmp_path / "n").exists()


async def test_a_replayed_request_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        frame = asking(door.tokens.create(), new_request("studio").csr)
        first = await said(door, START, frame)
        assert isinstance(first[-1], Enrolled)
        again = (await said(door, START, frame))[-1]
        assert isinstance(again, Denied)
        assert again.reason == "token_used"


async def test_a_request_for_more_than_a_node_gets_a_node(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        uris = [build_coordinator_uri(door.authority.cluster), "cluster://other/node/x"]
        csr = (
            x509.CertificateSigningRequestBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")]))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(
                x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris]), critical=False
            )
            .sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256())
        ).public_bytes(Encoding.DER)
        enrolled = (await said(door, START, asking(door.tokens.create(), csr)))[-1]
        assert isinstance(enrolled, Enrolled)
        made = x509.load_der_x509_certificate(enrolled.certificate)
        assert made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca is False
        assert read_certificate(enrolled.certificate).uri == build_node_uri(door.authority.cluster, door.joined[0].node)


async def test_too_many_bytes(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        long = encode(Enroll(b"x" * 60_000, "a", "m", HARDWARE))
        many = b"".join(encode(START) for _ in range(5000))
        for flood in (
            long,
            many,
            b"".join(split_into_fragments(long, 1)),
            (MAX_CONNECTION_BYTES + 1).to_bytes(4, "big") + b"\x01",
        ):
            frames = await said(door, flood)
            assert not frames or isinstance(frames[-1], Denied)
        await still_works(door, tmp_path / "n")


async def test_frames_of_the_link_need_a_certificate(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        hello = Hello(PROTOCOL, "n", "studio", "i", "m", "0", HARDWARE)
        for frame in (hello, Ping(1), Enrolled("n", b"", "c"), EnrollAuthority(b"", "", "")):
            (answer,) = await said(door, frame)
            assert isinstance(answer, Denied)
            assert answer.reason == "no_certificate"
        await still_works(door, tmp_path / "n")


async def test_enrolment_port_closes_connections_without_tls(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(5000), b"\x16\x03\x01" + bytes(200)):
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port)
            writer.write(noise)
            with suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 20)
            writer.transport.abort()
        await still_works(door, tmp_path / "n")


async def test_a_silent_peer_without_certificate_is_denied_and_closed(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        (answer,) = await said(door)
        assert isinstance(answer, Denied)
        assert answer.reason == "too_slow"


async def test_a_certificate_of_a_foreign_authority_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door, opened(tmp_path / "foreign") as foreign:
        theirs = await join(foreign, tmp_path / "n", foreign.tokens.create())
        context = create_authority_context(door.authority.ca)
        context.load_cert_chain(theirs.folder / "node.pem")
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", door.port, ssl=context)
            greeting = await reader.read()
            writer.close()
        except (ConnectionError, ssl.SSLError):
            greeting = b""
        assert greeting == b""
        assert not door.peers
        assert not await proves_itself(theirs, door.address)


async def test_a_man_in_the_middle_cannot_show_the_same_code(tmp_path: Path) -> None:
    """The attacker answers the node with its own CA and asks the coordinator with its own key."""
    async with opened(tmp_path / "c") as door, opened(tmp_path / "attacker") as attacker:
        loop = asyncio.get_running_loop()
        at_node: asyncio.Future[str] = loop.create_future()
        at_coordinator: asyncio.Future[str] = loop.create_future()
        victim = asyncio.create_task(join(attacker, tmp_path / "n", None, on_code=at_node.set_result))
        thief = asyncio.create_task(join(door, tmp_path / "t", None, on_code=at_coordinator.set_result))
        shown = await at_node
        assert shown != await at_coordinator
        assert door.approvals.approve(shown, loop.time()) == WrongCode(2)
        assert not door.joined
        for task in (victim, thief):
            task.cancel()
        await asyncio.gather(victim, thief, return_exceptions=True)


async def test_a_request_changed_after_both_nonces_are_known_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        csr = new_request("air").csr
        changed = Enroll(csr, "air", "m1", HARDWARE, opening=b"n" * 16)
        frames = await said(door, EnrollStart(PROTOCOL, b"another commitment"), changed)
        assert isinstance(frames[-1], Denied)
        assert frames[-1].reason == "commitment_broken"


async def test_join_to_another_server_has_a_clear_error(tmp_path: Path) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")
        await reader.read(10)
        writer.close()

    async with opened(tmp_path / "c") as door:
        token = door.tokens.create()
    server = await asyncio.start_server(babble, "127.0.0.1", 0)
    async with server:
        door.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        with pytest.raises(CoordinatorUnreachable):
            await join(door, tmp_path / "n", token)
    with pytest.raises(CoordinatorUnreachable, match="cannot be reached"):
        await join(door, tmp_path / "n", token)


FRAMES = st.one_of(
    st.binary(max_size=300),
    st.builds(
        lambda tag, body: (len(body) + 1).to_bytes(4, "big") + bytes([tag]) + body,
        st.integers(0, 60),
        st.binary(max_size=200),
    ),
    st.builds(
        lambda protocol, nonce: encode(EnrollStart(protocol, nonce)),
        st.sampled_from([PROTOCOL, PROTOCOL, -9, 99]),
        st.binary(max_size=40),
    ),
    st.builds(
        lambda csr, name, token, mac: encode(Enroll(csr, name, "m", HARDWARE, token, mac, csr)),
        st.binary(max_size=400),
        st.text(max_size=80).filter(lambda text: text.isascii()),
        st.sampled_from(["", "x"]),
        st.binary(max_size=40),
    ),
)


async def test_garbage_ends_in_a_no_and_never_in_an_exception(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:

        @settings(max_examples=scale_examples(1500), suppress_health_check=[HealthCheck.too_slow], deadline=None)
        @given(st.lists(FRAMES, max_size=6))
        def garbage(pieces: list[bytes]) -> None:
            talk = door.enrolment.start_enrollment("10.0.0.7", 0.0, lambda: None)
            if not isinstance(talk, EnrollmentConnection):
                return
            answers: list[Frame] = []
            for piece in pieces:
                answers += talk.feed(piece, 1.0)
            answers += talk.poll(1e9)
            assert talk.closed
            assert isinstance(answers[-1], Denied)
            assert all(isinstance(answer, EnrollAuthority | Denied) for answer in answers)

        garbage()
        assert not door.store.members
        await still_works(door, tmp_path / "n")


async def test_garbage_on_the_wire(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        for noise in (b"\xff" * 100, bytes(100), b"\x00\x00\x00\x02\x01\xc1", b"\x00\x00\x00\x05\x03\xdd\xff\xff\xff"):
            (answer,) = await said(door, noise)
            assert isinstance(answer, Denied)
        await still_works(door, tmp_path / "n")
