"""Certificates for what Ray says between machines, by an authority of its own: a Ray certificate opens no link.

Ray verifies the address that it dials, so every certificate names addresses; and every process of Ray is client and
server at once. A machine whose address changes gets a new certificate.
"""

import ipaddress
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID

from coordinator.authority import CA_LIFE, certificate_builder, key_usage, named, read_pair, write_pair
from machine.private import private_folder
from wire.certificate import LEAF_LIFE

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
        file = folder / "ray-authority.pem"
        if not file.exists():
            write_pair(file, *self._made())
        self._key, self._certificate = read_pair(file)

    def papers(self, addresses: Iterable[str]) -> Papers:
        """Make a certificate for a machine that is reached at these addresses."""
        wanted = sorted({*LOOPBACK, *addresses})
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
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        pem = certificate.public_bytes(Encoding.PEM)
        return Papers(self._certificate.public_bytes(Encoding.PEM), pem, private)

    def _made(self) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        key = ec.generate_private_key(ec.SECP256R1())
        name = "macpool ray authority"
        certificate = (
            certificate_builder(name, key.public_key(), named(name), self._clock(), CA_LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(key_usage(signs_certificates=True), critical=True)
            .sign(key, hashes.SHA256())
        )
        return key, certificate
