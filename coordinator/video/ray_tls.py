"""Certificates for what Ray says between machines, by an authority of its own: a Ray certificate opens no link.

Ray verifies the address that it dials, so every certificate names addresses; and every process of Ray is client and
server at once. A machine whose address changes gets a new certificate.
"""

import hashlib
import ipaddress
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID

from coordinator.authority import CA_LIFE, AuthorityError, certificate_builder, key_usage, named, read_pair, write_pair
from machine.private import private_folder
from wire.certificate import LEAF_LIFE, read_certificate

Pair = tuple[ec.EllipticCurvePrivateKey, x509.Certificate]
LOOPBACK = ("127.0.0.1", "::1")


@dataclass(frozen=True, slots=True)
class Papers:
    """What a machine's Ray needs, PEM."""

    authority: bytes
    certificate: bytes
    key: bytes


class RayAuthority:
    """Made on first use in `folder`. `clock` gives Unix seconds."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        private_folder(folder)
        self._clock = clock
        self._folder = folder / "ray"
        file = folder / "ray-authority.pem"
        if not file.exists():
            write_pair(file, *self._made())
        self._key, self._certificate = read_pair(file)

    def papers(self, addresses: Iterable[str]) -> Papers:
        """Give a certificate for a machine that is reached at these addresses: the same one until two thirds of its
        life are over, also after a restart, because a machine that gets another has to start its Ray anew."""
        wanted = sorted({*LOOPBACK, *addresses})
        file = self._folder / f"{hashlib.sha256(' '.join(wanted).encode()).hexdigest()[:16]}.pem"
        key, certificate = self._fresh(file) or self._written(file, wanted)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        pem = certificate.public_bytes(Encoding.PEM)
        return Papers(self._certificate.public_bytes(Encoding.PEM), pem, private)

    def _fresh(self, file: Path) -> Pair | None:
        """Read a certificate that is still good."""
        try:
            key, certificate = read_pair(file)
            certificate.verify_directly_issued_by(self._certificate)
        except (AuthorityError, InvalidSignature):
            return None
        known = read_certificate(certificate.public_bytes(Encoding.DER))
        return (key, certificate) if self._clock() < known.renew_from else None

    def _written(self, file: Path, wanted: list[str]) -> Pair:
        private_folder(self._folder)
        key, certificate = self._signed(wanted)
        write_pair(file, key, certificate)
        return key, certificate

    def _signed(self, wanted: list[str]) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self._certificate.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address(address)) for address in wanted]
        certificate = (
            certificate_builder("macpool ray", key.public_key(), self._certificate.subject, self._clock(), LEAF_LIFE)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(x509.SubjectAlternativeName([*names, x509.DNSName("localhost")]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return key, certificate

    def _made(self) -> Pair:
        key = ec.generate_private_key(ec.SECP256R1())
        name = "macpool ray authority"
        certificate = (
            certificate_builder(name, key.public_key(), named(name), self._clock(), CA_LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(key_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return key, certificate
