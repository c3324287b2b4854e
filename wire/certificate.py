"""What one of our certificates says: whose it is, until when, and when to ask for the next one.

Reading only. Whether a certificate may be believed is decided by TLS against the cluster's CA and by the deny list.
"""

from dataclasses import dataclass

from cryptography import x509
from cryptography.x509.oid import NameOID

BACKDATED = 24 * 3600.0
"""Seconds by which a certificate begins before it is made, for machines whose clock is behind."""
LEAF_LIFE = 90 * 24 * 3600.0
"""Seconds that the certificate of a node or of the coordinator is good for."""
RENEW_AT = 2 / 3
"""Share of its life after which a certificate is renewed."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """The facts of one certificate. Times in Unix seconds; `uri` is empty unless its SAN holds exactly one URI."""

    uri: str
    name: str
    serial: str
    issued: float
    expires: float

    @property
    def renew_from(self) -> float:
        """When to ask for the next one."""
        return self.issued + RENEW_AT * (self.expires - self.issued)


def read_certificate(der: bytes) -> Certificate:
    """Read a certificate (DER); ValueError when it is none."""
    certificate = x509.load_der_x509_certificate(der)
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return Certificate(
        uri=_uri(certificate),
        name=str(names[0].value) if names else "",
        serial=f"{certificate.serial_number:x}",
        issued=certificate.not_valid_before_utc.timestamp() + BACKDATED,
        expires=certificate.not_valid_after_utc.timestamp(),
    )


def _uri(certificate: x509.Certificate) -> str:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ""
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return uris[0] if len(uris) == 1 else ""
