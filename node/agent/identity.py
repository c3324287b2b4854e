"""Identity of this node: its files, its TLS contexts, and the renewal of its certificate.

`node.pem` has key and certificate (mode 0600, replaced whole). `identity.json` has the rest and is written last: a
folder without this file has no identity. The private key is created here and never leaves the folder. The identity is
refused on a machine with another machine id, because two machines with copies of one disk would be the same node.
"""

import ssl
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import structlog
from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import NameOID

from host.private_files import create_private_folder, write_private
from wire.certificate import read_certificate
from wire.identity import NodeId, build_coordinator_uri, build_node_uri, parse_uri
from wire.join_token import build_rejoin_text

MAX_ADDRESSES = 16
"""Maximum number of coordinator addresses that are stored."""

log = structlog.get_logger("node.agent.identity")


class IdentityError(Exception):
    """Raised if the stored identity, or a received certificate, cannot be used. The text names the reason."""


class IdentityMismatch(IdentityError):
    """Raised if the stored identity belongs to another machine."""


@dataclass(frozen=True, slots=True)
class NodeIdentity:
    """Identity of a joined node, as stored in a folder."""

    cluster: str
    """Id of the cluster."""
    node: NodeId
    """Id of the node."""
    name: str
    """Display name of the node."""
    machine: str
    """Machine id."""
    folder: Path
    """Folder of the files."""
    certificate: bytes
    """Certificate in DER."""
    ca: bytes
    """Certificate of the cluster's CA in DER."""
    addresses: tuple[str, ...] = ()
    """Addresses (`host:port`) at which the coordinator proved itself, the latest first."""
    generation: int = 0
    """Highest generation that a coordinator of the cluster has shown."""
    seal: bytes = b""
    """Signature of `generation` by the CA."""
    is_generation_stored: bool = True
    """Whether `generation` is stored in the files."""


class _StoredIdentity(msgspec.Struct, frozen=True):
    cluster: str
    node: str
    name: str
    machine: str
    ca: bytes
    addresses: tuple[str, ...] = ()
    generation: int = 0
    seal: bytes = b""


@dataclass(frozen=True, slots=True)
class CertificateRequest:
    """A new key and the certificate request for it."""

    key: bytes
    """Private key in PEM."""
    csr: bytes
    """Certificate request in DER."""


def new_request(name: str) -> CertificateRequest:
    """Create a P-256 key and a certificate request for it. The coordinator uses only the public key of the request."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    csr = x509.CertificateSigningRequestBuilder().subject_name(subject).sign(key, hashes.SHA256())
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return CertificateRequest(pem, csr.public_bytes(Encoding.DER))


def prove_identity(folder: Path, csr: bytes) -> tuple[bytes, bytes]:
    """Return the stored certificate (DER) of a former member, and a signature of `csr` (DER) by its key.

    With both, the machine joins again. Both are empty if `folder` has no readable certificate and key.
    """
    try:
        pem = (folder / "node.pem").read_bytes()
        key = load_pem_private_key(pem, None)
        certificate = _read_certificate(folder / "node.pem")
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm):
        return b"", b""
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        return b"", b""
    return certificate, key.sign(build_rejoin_text(csr), ec.ECDSA(hashes.SHA256()))


def load_identity(folder: Path, machine: str) -> NodeIdentity | None:
    """Return the identity stored in a folder; None if there is none. `machine` is the id of this machine.

    Raise `IdentityMismatch` if the identity belongs to another machine. Raise `IdentityError` if the files are damaged
    or unreadable, or the certificate names another node.
    """
    try:
        content = (folder / "identity.json").read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IdentityError(f"{folder / 'identity.json'} cannot be read: {error.strerror}") from None
    try:
        stored = msgspec.json.decode(content, type=_StoredIdentity)
        certificate = _read_certificate(folder / "node.pem")
        uri = read_certificate(certificate).uri
        read_certificate(stored.ca)
    except (OSError, ValueError, TypeError) as error:
        raise IdentityError(f"the identity in {folder} is damaged ({error}): join again") from None
    if stored.machine != machine:
        raise IdentityMismatch(
            f"the identity in {folder} belongs to another machine: this disk was cloned or the folder copied. "
            "Join again with a new token: `cluster join URL --token-file FILE`"
        )
    if uri != build_node_uri(stored.cluster, NodeId(stored.node)):
        raise IdentityError(f"the certificate in {folder} names another node: join again")
    return NodeIdentity(
        stored.cluster,
        NodeId(stored.node),
        stored.name,
        stored.machine,
        folder,
        certificate,
        stored.ca,
        stored.addresses,
        stored.generation,
        stored.seal,
    )


def store_identity(
    folder: Path, request: CertificateRequest, certificate: bytes, cluster: str, ca: bytes, machine: str
) -> NodeIdentity:
    """Store in `folder` the identity that the coordinator issued, and return it.

    `certificate` and `ca` are in DER. Raise `IdentityError` if the certificate is not for this request and cluster,
    `OSError` if the files cannot be written.
    """
    try:
        parsed = read_certificate(certificate)
    except ValueError:
        raise IdentityError("the coordinator sent no certificate") from None
    peer = parse_uri(parsed.uri)
    if peer is None or peer.node is None or peer.cluster != cluster:
        raise IdentityError("the coordinator sent a certificate that names no node of its cluster")
    identity = NodeIdentity(cluster, peer.node, parsed.name, machine, create_private_folder(folder), certificate, ca)
    _write_certificate(identity, request.key, certificate)
    _write_identity(identity)
    return identity


def delete_identity(folder: Path) -> None:
    """Remove the identity stored in a folder, key first. Do nothing if there is none. Raise `OSError` on failure."""
    for name in ("node.pem", "next.key", "identity.json"):
        (folder / name).unlink(missing_ok=True)


def store_address(identity: NodeIdentity, address: str) -> NodeIdentity:
    """Store an address (`host:port`) at which the coordinator proved itself, as the latest. Return the new identity.

    At most `MAX_ADDRESSES` are stored. Raise `OSError` if the identity cannot be written.
    """
    others = [other for other in identity.addresses if other != address]
    after = replace(identity, addresses=(address, *others)[:MAX_ADDRESSES])
    if after.addresses != identity.addresses:
        _write_identity(after)
    return after


def remove_address(identity: NodeIdentity, address: str) -> NodeIdentity:
    """Remove the stored address (`host:port`) of a superseded coordinator. Return the new identity.

    Return `identity` itself if the address is not stored. Raise `OSError` if the identity cannot be written.
    """
    after = replace(identity, addresses=tuple(other for other in identity.addresses if other != address))
    if after.addresses != identity.addresses:
        _write_identity(after)
    return after


def adopt_generation(identity: NodeIdentity, generation: int, seal: bytes) -> NodeIdentity:
    """Store the generation of a proven coordinator and its seal, if the generation is higher than the stored one.

    Return the new identity, or `identity` itself if nothing changed. If the identity cannot be written, as on a full
    disk, the new identity still has the generation. A log line names the error, and the next call tries to store it.
    """
    if generation > identity.generation:
        identity = replace(identity, generation=generation, seal=seal, is_generation_stored=False)
    if identity.is_generation_stored:
        return identity
    try:
        _write_identity(identity)
    except OSError as error:
        effect = "after a restart, this node would follow an older coordinator: free disk space"
        log.warning("generation not stored", generation=identity.generation, error=str(error), effect=effect)
        return identity
    return replace(identity, is_generation_stored=True)


def create_client_context(identity: NodeIdentity) -> ssl.SSLContext:
    """Return the TLS context of the link: TLS 1.3, the certificate of this node, only the cluster's CA.

    The context does not check that the remote end is the coordinator: call `proves_coordinator` as well. Raise
    `OSError` or `ssl.SSLError` if the certificate of this node cannot be loaded. Raise `ssl.SSLError` or `ValueError`
    if the stored CA is no certificate.
    """
    context = create_authority_context(identity.ca)
    context.load_cert_chain(identity.folder / "node.pem")
    return context


def create_authority_context(ca: bytes) -> ssl.SSLContext:
    """Return a client's TLS context that trusts only one CA (DER).

    Host names are not checked, because addresses change: the URI in the SAN identifies the peer. Raise `ssl.SSLError`
    or `ValueError` if `ca` is not a certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_verify_locations(cadata=ca)
    return context


def proves_coordinator(shown: ssl.SSLObject | ssl.SSLSocket, cluster: str) -> bool:
    """Return whether the certificate of the remote end names the coordinator of `cluster` (an id).

    TLS must have verified the certificate.
    """
    der = shown.getpeercert(binary_form=True)
    return bool(der) and read_certificate(der).uri == build_coordinator_uri(cluster)


def needs_renewal(identity: NodeIdentity, now: float) -> bool:
    """Return whether two thirds of the certificate's lifetime have passed. `now` is in Unix seconds."""
    return now >= read_certificate(identity.certificate).renew_from


def new_csr(identity: NodeIdentity) -> bytes:
    """Create and store the key of the next certificate. Return the request (DER) for `wire.frames.RenewCertificate`.

    The key of an earlier request without an answer is replaced. Raise `OSError` if the key cannot be stored.
    """
    request = new_request(identity.name)
    write_private(identity.folder / "next.key", request.key)
    return request.csr


def install_certificate(identity: NodeIdentity, certificate: bytes) -> NodeIdentity:
    """Store the renewed certificate (DER) with the key that `new_csr` created. Return the new identity.

    Raise `IdentityError` if no certificate was requested, or if `certificate` is not for the node and that key. Raise
    `OSError` if the certificate cannot be written.
    """
    pending = identity.folder / "next.key"
    try:
        key = pending.read_bytes()
    except OSError:
        raise IdentityError("received a certificate that was not requested") from None
    _write_certificate(identity, key, certificate)
    pending.unlink()
    return replace(identity, certificate=certificate)


def _write_identity(identity: NodeIdentity) -> None:
    stored = _StoredIdentity(
        identity.cluster,
        identity.node,
        identity.name,
        identity.machine,
        identity.ca,
        identity.addresses,
        identity.generation,
        identity.seal,
    )
    write_private(identity.folder / "identity.json", msgspec.json.encode(stored))


def _write_certificate(identity: NodeIdentity, key: bytes, certificate: bytes) -> None:
    try:
        parsed = x509.load_der_x509_certificate(certificate)
        parsed.verify_directly_issued_by(x509.load_der_x509_certificate(identity.ca))
        ours = load_pem_private_key(key, None).public_key() == parsed.public_key()
        uri = read_certificate(certificate).uri
    except (InvalidSignature, UnsupportedAlgorithm, ValueError, TypeError) as error:
        raise IdentityError(
            f"the certificate is not from this cluster's CA: {str(error) or type(error).__name__}"
        ) from None
    if not ours or uri != build_node_uri(identity.cluster, identity.node):
        raise IdentityError("the certificate is not for this node and its key")
    write_private(identity.folder / "node.pem", key + parsed.public_bytes(Encoding.PEM))


def _read_certificate(path: Path) -> bytes:
    return x509.load_pem_x509_certificate(path.read_bytes()).public_bytes(Encoding.DER)
