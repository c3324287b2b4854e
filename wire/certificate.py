"""Parse certificates of the cluster (X.509): subject, validity and time of renewal.

This module does not verify certificates. TLS verifies them against the cluster's CA and the deny list.
`explain_wrong_clock` explains an error of that verification.
"""

from dataclasses import dataclass
from datetime import datetime

from cryptography import x509
from cryptography.x509.oid import NameOID

BACKDATED_SECONDS = 24 * 3600.0
"""Seconds by which the validity of a certificate begins before its creation, for machines with a slow clock."""
LEAF_VALIDITY_SECONDS = 90 * 24 * 3600.0
"""Validity of the coordinator's certificates, in seconds; for nodes the default of `cluster.certificate_days`."""
OUTSIDE_VALIDITY = (9, 10)
"""OpenSSL's verification errors for a certificate that is not yet valid, and for an expired certificate."""
RENEW_AT_SHARE = 2 / 3
"""Share of the validity of a certificate, 0 to 1, after which the certificate is renewed."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """Fields of a certificate. Times are Unix seconds."""

    uri: str
    """URI of the SAN; empty unless the SAN has exactly one URI."""
    name: str
    """Common name of the subject; empty without one."""
    serial: str
    """Serial number in hexadecimal digits."""
    issued: float
    """Unix time in seconds of the creation: the first moment of the validity plus `BACKDATED_SECONDS`."""
    expires: float
    """Unix time in seconds at which the validity ends."""

    @property
    def renew_from(self) -> float:
        """Unix time from which the certificate is renewed."""
        return self.issued + RENEW_AT_SHARE * (self.expires - self.issued)


def read_certificate(der: bytes) -> Certificate:
    """Parse a certificate in DER, without verification. Raise ValueError for other bytes."""
    certificate = x509.load_der_x509_certificate(der)
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return Certificate(
        uri=_read_uri(certificate),
        name=str(names[0].value) if names else "",
        serial=f"{certificate.serial_number:x}",
        issued=certificate.not_valid_before_utc.timestamp() + BACKDATED_SECONDS,
        expires=certificate.not_valid_after_utc.timestamp(),
    )


def _read_uri(certificate: x509.Certificate) -> str:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ""
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return uris[0] if len(uris) == 1 else ""


def explain_wrong_clock(error: Exception, now: float) -> str:
    """Return a hint to correct the clock if `error` reports a certificate outside its validity; empty for other errors.

    The certificates of a cluster are renewed long before they expire. A wrong clock, here or on the machine that
    presented the certificate, is therefore the probable cause. `error` is any error of a connection. `now` is the time
    of this machine in Unix seconds, which the hint quotes.
    """
    if getattr(error, "verify_code", 0) not in OUTSIDE_VALIDITY:
        return ""
    clock = f"{datetime.fromtimestamp(now):%Y-%m-%d %H:%M}"
    return f" (at {clock} by the clock of this machine: correct it, or the coordinator's)"
