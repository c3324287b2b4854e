"""Queries of commands on a node's machine, over the coordinator's cluster port with the node's certificate.

Queries only read.
"""

import base64
import json
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.client.errors import DENIED, PROTOCOL, UNREACHABLE, CommandError
from wire.certificate import read_certificate
from wire.codec import Splitter, WireError, decode, encode
from wire.frames import Denied, FetchChunk, MemberQuery
from wire.identity import PROTOCOL as SPOKEN
from wire.identity import build_coordinator_uri

CONNECT_TIMEOUT_SECONDS = 5.0
"""Timeout of the connection and of each read, in seconds."""
MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Maximum bytes of an answer. A longer answer is not read to its end and counts as invalid."""


@dataclass(frozen=True, slots=True)
class MemberIdentity:
    """Identity of the node in a state folder, with which commands query the coordinator."""

    folder: Path
    """Folder with the node's certificate and key."""
    cluster: str
    """Id of the cluster that the node has joined."""
    node: str
    """Id of the node."""
    machine: str
    """Id of this machine."""
    ca: bytes
    """Certificate of the cluster's CA in DER."""
    addresses: tuple[str, ...]
    """Addresses of the coordinator's cluster port (HOST:PORT). The address of the last link is first."""


def read_member_identity(state: Path) -> MemberIdentity | None:
    """Return the identity of the node that joined from a state folder.

    Return None if there is no readable identity, or if the folder contains the state of a coordinator.
    """
    folder = state / "node" / "identity"
    if (state / "cluster.db").exists():
        return None
    try:
        stored = json.loads((folder / "identity.json").read_text())
        addresses = tuple(str(address) for address in stored.get("addresses", ()))
        return MemberIdentity(
            folder,
            str(stored["cluster"]),
            str(stored["node"]),
            str(stored["machine"]),
            base64.b64decode(stored["ca"]),
            addresses,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def get_coordinator_host(member: MemberIdentity) -> str:
    """Return the host of the coordinator's first known address, or a description if none is known."""
    return member.addresses[0].rpartition(":")[0] if member.addresses else "the coordinator's Mac"


def query_coordinator(member: MemberIdentity, path: str) -> dict[str, Any]:
    """Return the JSON that the coordinator's API has at `path`, from the first address that answers.

    Raise `CommandError` if no address gives a valid answer, or if the coordinator refuses. Other reasons: the peer is
    not the coordinator, the peer uses another protocol, or the certificate of the node cannot be read.
    """
    failures: list[str] = []
    for address in member.addresses:
        try:
            return json.loads(_query_address(member, address, path))
        except OSError as error:
            failures.append(f"{address} ({error.strerror or error})")
        except ValueError:
            failures.append(f"{address} (its address or its answer is invalid)")
    tried = ", ".join(failures) or "no address is known"
    raise CommandError(
        UNREACHABLE, f"the coordinator of this node cannot be reached: {tried}; check that `cluster up` runs there"
    )


def _query_address(member: MemberIdentity, address: str, path: str) -> bytes:
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_SECONDS) as plain,
        _create_context(member).wrap_socket(plain) as link,
    ):
        shown = link.getpeercert(binary_form=True)
        if not shown or read_certificate(shown).uri != build_coordinator_uri(member.cluster):
            raise CommandError(DENIED, f"{address} is not the coordinator of this node's cluster")
        link.sendall(encode(MemberQuery(SPOKEN, member.node, member.machine, path)))
        return _receive_answer(link, address)


def _receive_answer(link: ssl.SSLSocket, address: str) -> bytes:
    splitter, answer = Splitter(), bytearray()
    while data := link.recv(65536):
        try:
            frames = [decode(tag, body) for tag, body in splitter.feed(data)]
        except WireError as error:
            raise CommandError(PROTOCOL, f"{address} uses another protocol: {error}") from None
        for frame in frames:
            if isinstance(frame, Denied):
                raise CommandError(DENIED, frame.message)
            if isinstance(frame, FetchChunk):
                answer += frame.payload
                if frame.last or len(answer) > MAX_ANSWER_BYTES:
                    return bytes(answer)
    raise ConnectionResetError("it ended the connection before its answer was complete")


def _create_context(member: MemberIdentity) -> ssl.SSLContext:
    """Return the node's TLS context, which accepts only certificates of the cluster's CA.

    Host names are not checked, because addresses change. Raise `CommandError` if the certificate of the node cannot be
    read.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata=member.ca)
    try:
        context.load_cert_chain(member.folder / "node.pem")
    except (OSError, ssl.SSLError) as error:
        raise CommandError(DENIED, f"the certificate of this node cannot be read: {error}") from None
    return context
