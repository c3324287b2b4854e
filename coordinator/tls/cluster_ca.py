"""The cluster's certificate authority, which issues certificates and identifies peers by their certificates.

All keys are ECDSA P-256, because Apple's TLS rejects Ed25519 leaves. The CA in `authority.pem` is valid for ten years,
the coordinator's certificate in `coordinator.pem` for 90 days. Each file has mode 0600 and contains both key and
certificate. The cluster's id is part of the CA: the file is the cluster's identity.

Invariants
- Only the public key of a certificate request is used. The authority sets names, SANs and extensions.
- The SAN names the holder: a node by its id, or the coordinator. Peers accept as coordinator only a certificate with
  the coordinator's SAN. A stolen node therefore cannot pose as coordinator.
- Certificates pass `VERIFY_X509_STRICT` (Python's default from 3.13 on). Their validity starts a day early, for clocks
  that are slow.
"""

import datetime
import re
import ssl
import uuid
from collections.abc import Callable
from pathlib import Path

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
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from host.private_files import create_private_folder, write_private
from wire.certificate import BACKDATED_SECONDS, LEAF_VALIDITY_SECONDS, read_certificate
from wire.identity import NodeId, PeerIdentity, build_coordinator_uri, build_node_uri, is_valid_id, parse_uri
from wire.join_token import build_rejoin_text

log = structlog.get_logger()

CA_VALIDITY_SECONDS = 3650 * 24 * 3600.0
"""Validity of the CA, and of the endpoint's authority (`https_ca`), in seconds."""
MAX_REQUEST_BYTES = 4096
"""Maximum bytes of a certificate request, and of the certificate of a member that joins again.

A request for P-256 has about 200 bytes.
"""

_SUBJECT = re.compile(r"macpool cluster ([A-Za-z0-9-]{1,36})")


class AuthorityError(Exception):
    """Raised if a key, certificate or HTTPS setting cannot be used. The text names it, and describes the fault."""


class CertificateRequestError(ValueError):
    """Raised for a certificate request that the authority does not sign. The text has the reason."""


class ClusterCa:
    """CA of one cluster, with the coordinator's own certificate. Both are created in `folder` on first use.

    A coordinator certificate that is damaged or that another CA issued is replaced. `clock` returns Unix seconds.
    `node_life` is the validity of node certificates, in seconds. `is_new_cluster` permits the creation of a CA; for an
    existing cluster, a new CA would refuse every node. The constructor raises `AuthorityError` if the CA's file is
    damaged, or missing for an existing cluster, and `OSError` if a file cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        clock: Callable[[], float],
        node_life: float = LEAF_VALIDITY_SECONDS,
        *,
        is_new_cluster: bool = True,
    ) -> None:
        create_private_folder(folder)
        self._clock = clock
        self._node_life = node_life
        self._own = folder / "coordinator.pem"
        file = folder / "authority.pem"
        if is_new_cluster and not file.exists():
            write_key_pair(file, *_create_ca(clock()))
        self._key, self._certificate = read_key_pair(file)
        self.cluster = _get_cluster_id(self._certificate, file)
        """Id of the cluster."""
        self.ca = self._certificate.public_bytes(Encoding.DER)
        """Certificate of the CA in DER."""
        if not self._own.exists() or not self._has_issued_own_certificate():
            self._issue_own_certificate()
        self._context = self._create_context()
        self.renew()

    def sign_request(self, csr: bytes, node: NodeId, name: str = "") -> bytes:
        """Issue a node's certificate (DER) for the public key of a certificate request (DER).

        `name` is the node's display name, which becomes the common name; if it is empty, the node's id does. The
        certificate is valid for both ends of TLS, because a node can be the mirror of another node. Raise
        `CertificateRequestError` if the request is too long, malformed, not for P-256, or not signed by its own key.
        """
        certificate = self._issue_leaf(
            extract_public_key(csr),
            name or node,
            build_node_uri(self.cluster, node),
            (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH),
            self._node_life,
        )
        return certificate.public_bytes(Encoding.DER)

    def identify_signer(self, certificate: bytes, csr: bytes, proof: bytes) -> tuple[NodeId, str] | None:
        """Return the node id and certificate serial (hex) of the member that signed a request to join again.

        `certificate` is the member's certificate (DER), `csr` the request (DER), and `proof` the signature by the
        certificate's key. Return None if this CA did not issue the certificate, or if its key did not sign the request.
        Return None also if the certificate does not name a node of this cluster. An expired certificate is accepted.
        """
        try:
            loaded = x509.load_der_x509_certificate(certificate[:MAX_REQUEST_BYTES])
            loaded.verify_directly_issued_by(self._certificate)
            key, peer = loaded.public_key(), parse_uri(read_certificate(certificate).uri)
            if not isinstance(key, ec.EllipticCurvePublicKey) or peer is None or peer.node is None:
                return None
            key.verify(proof, build_rejoin_text(csr), ec.ECDSA(hashes.SHA256()))
        except (InvalidSignature, ValueError, TypeError, UnsupportedAlgorithm):
            return None
        return (peer.node, read_certificate(certificate).serial) if peer.cluster == self.cluster else None

    def seal_generation(self, generation: int) -> bytes:
        """Return a signature by the CA's key that states that this cluster has reached a generation."""
        return self._key.sign(_build_generation_text(self.cluster, generation), ec.ECDSA(hashes.SHA256()))

    def is_sealed(self, generation: int, seal: bytes) -> bool:
        """Return whether `seal` is a signature of `seal_generation` for this generation, by the key of this CA."""
        try:
            self._key.public_key().verify(
                seal, _build_generation_text(self.cluster, generation), ec.ECDSA(hashes.SHA256())
            )
        except InvalidSignature:
            return False
        return True

    def get_server_context(self) -> ssl.SSLContext:
        """Return the TLS context of the cluster port: TLS 1.3, with an optional client certificate.

        A client certificate must be valid and issued by this CA, or the handshake fails.
        """
        return self._context

    @property
    def ca_validity(self) -> tuple[float, float]:
        """Times of issue and expiry of the CA's certificate, in Unix seconds."""
        ca = read_certificate(self.ca)
        return ca.issued, ca.expires

    @property
    def validity(self) -> tuple[float, float]:
        """Times of issue and expiry of the coordinator's certificate, in Unix seconds.

        Raise `AuthorityError` if its file cannot be read.
        """
        own = read_certificate(self._read_own_certificate())
        return own.issued, own.expires

    @property
    def renew_from(self) -> float:
        """Unix time in seconds from which `renew` issues a new coordinator certificate.

        Raise `AuthorityError` if the file of the current certificate cannot be read.
        """
        return read_certificate(self._read_own_certificate()).renew_from

    def renew(self) -> bool:
        """Issue a new coordinator certificate if the current one is due. Return whether one was issued.

        A certificate is due after two thirds of its validity. It is also due if it is from the future because the clock
        was set back, since nodes would refuse it. New connections use the new certificate. Log a warning if the clock
        is before the issue of the CA's certificate. Raise `AuthorityError` if the current certificate cannot be read,
        and `OSError` if the new one cannot be written.
        """
        own, now, created = read_certificate(self._read_own_certificate()), self._clock(), self.ca_validity[0]
        if now < created - BACKDATED_SECONDS:
            clock, day = (f"{datetime.datetime.fromtimestamp(at, datetime.UTC):%Y-%m-%d}" for at in (now, created))
            log.warning(
                "no node can link: correct the clock, it is before the cluster's creation", clock=clock, created=day
            )
        if own.issued <= now < own.renew_from:
            return False
        self._issue_own_certificate()
        self._context.load_cert_chain(self._own)
        log.info("coordinator certificate renewed", expires=read_certificate(self._read_own_certificate()).expires)
        return True

    def identify_peer(self, presented: bytes | ssl.SSLObject | ssl.SSLSocket | None) -> PeerIdentity | None:
        """Return the node of this cluster that a certificate names; None if there is no certificate or no such node.

        `presented` is the certificate (DER), or the TLS object of the connection. The signature of the certificate must
        already be verified. Raise `ValueError` for bytes that are not a certificate.
        """
        der = (
            presented.getpeercert(binary_form=True)
            if isinstance(presented, ssl.SSLObject | ssl.SSLSocket)
            else presented
        )
        peer = parse_uri(read_certificate(der).uri) if der else None
        return peer if peer is not None and peer.cluster == self.cluster and peer.node is not None else None

    def _read_own_certificate(self) -> bytes:
        return read_key_pair(self._own)[1].public_bytes(Encoding.DER)

    def _has_issued_own_certificate(self) -> bool:
        """Return whether this CA issued `coordinator.pem`. Every node would refuse a certificate of another CA."""
        try:
            read_key_pair(self._own)[1].verify_directly_issued_by(self._certificate)
        except (AuthorityError, InvalidSignature, ValueError, TypeError) as error:
            log.warning("coordinator certificate replaced", why=str(error) or type(error).__name__)
            return False
        return True

    def _issue_own_certificate(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        uri = build_coordinator_uri(self.cluster)
        write_key_pair(
            self._own, key, self._issue_leaf(key.public_key(), "coordinator", uri, (ExtendedKeyUsageOID.SERVER_AUTH,))
        )

    def _issue_leaf(
        self,
        key: ec.EllipticCurvePublicKey,
        name: str,
        uri: str,
        purposes: tuple[x509.ObjectIdentifier, ...],
        life: float = LEAF_VALIDITY_SECONDS,
    ) -> x509.Certificate:
        issuer = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        return (
            create_certificate_builder(name, key, self._certificate.subject, self._clock(), life)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(build_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(purposes), critical=False)
            .add_extension(x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    def _create_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0  # links are long: session resumption would save one handshake and skip a verification
        context.load_cert_chain(self._own)
        context.load_verify_locations(cadata=self.ca)
        context.verify_mode = ssl.CERT_OPTIONAL
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context


def read_cluster_id(file: Path) -> str:
    """Return the id of a cluster from the file of its CA (`write_key_pair`).

    Raise `AuthorityError` if the file is missing or damaged, or is not the CA of a cluster.
    """
    return _get_cluster_id(read_key_pair(file)[1], file)


def extract_public_key(csr: bytes) -> ec.EllipticCurvePublicKey:
    """Return the public key of a certificate request (DER).

    Raise `CertificateRequestError` if the request is too long, malformed, not for P-256, or not signed by its own key.
    """
    if len(csr) > MAX_REQUEST_BYTES:
        raise CertificateRequestError(f"the certificate request has {len(csr)} bytes, the limit is {MAX_REQUEST_BYTES}")
    try:
        request = x509.load_der_x509_csr(csr)
        key = request.public_key()
        # check the key type first: the signature of a huge RSA key would cost time before authentication
        if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise CertificateRequestError("the certificate request is not for a P-256 key")
        signed = request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise CertificateRequestError(str(error) or "this is not a certificate request") from None
    if not signed:
        raise CertificateRequestError("the certificate request is not signed by its own key")
    return key


def _build_generation_text(cluster: str, generation: int) -> bytes:
    return f"macpool generation {cluster} {generation}".encode()


def _create_ca(now: float) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = f"macpool cluster {uuid.uuid4()}"
    certificate = (
        create_certificate_builder(name, key.public_key(), build_common_name(name), now, CA_VALIDITY_SECONDS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(build_key_usage(signs_certificates=True), critical=True)
        .sign(key, hashes.SHA256())
    )
    return key, certificate


def create_certificate_builder(
    name: str, key: ec.EllipticCurvePublicKey, issuer: x509.Name, now: float, life: float
) -> x509.CertificateBuilder:
    """Return a certificate builder with subject `name`, issuer, key, serial number, validity and key identifier.

    The caller adds all other extensions. `now` is in Unix seconds. The validity starts `BACKDATED_SECONDS` before `now`
    and ends `life` seconds after `now`.
    """
    moment = datetime.datetime.fromtimestamp(now, datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(build_common_name(name))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(moment - datetime.timedelta(seconds=BACKDATED_SECONDS))
        .not_valid_after(moment + datetime.timedelta(seconds=life))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def build_common_name(name: str) -> x509.Name:
    """Return an X.509 name that has only the common name `name`."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def build_key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    """Return the key usage extension of a CA, or, without `signs_certificates`, of a TLS peer's certificate."""
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def write_key_pair(path: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
    """Replace a file by a key and its certificate (PEM), with mode 0600.

    Raise `OSError` if the file cannot be written.
    """
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_private(path, private + certificate.public_bytes(Encoding.PEM))


def read_key_pair(path: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    """Read key and certificate from a file of `write_key_pair`.

    Raise `AuthorityError` if the file is missing or damaged, or if key and certificate do not match.
    """
    try:
        content = path.read_bytes()
        key = load_pem_private_key(content, None)
        certificate = x509.load_pem_x509_certificate(content)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise AuthorityError(f"{path} cannot be read ({error}): restore it from a backup") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise AuthorityError(f"the key and the certificate in {path} do not match: restore them from a backup")
    return key, certificate


def _get_cluster_id(certificate: x509.Certificate, path: Path) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    match = _SUBJECT.fullmatch(str(names[0].value)) if names else None
    if match is None or not is_valid_id(match[1]):
        raise AuthorityError(f"{path} is not a macpool authority: restore it from a backup")
    return match[1]
