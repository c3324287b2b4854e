"""TLS of the clients' endpoint with given certificate files, which other programs may replace."""

import hashlib
import ssl
from pathlib import Path

import structlog

from coordinator.tls.cluster_ca import AuthorityError
from coordinator.tls.https_ca import (
    NO_PASSPHRASE,
    create_server_context,
    load_server_context,
    read_certificate_validity,
)

log = structlog.get_logger("coordinator.tls.certificate_files")


class CertificateFiles:
    """Certificate chain and key (PEM files) of the settings, and the TLS context that serves them.

    The constructor raises `AuthorityError` if the files cannot be used.
    """

    def __init__(self, certificate: Path, key: Path) -> None:
        self._certificate = certificate
        self._key = key
        self._digest: bytes | None = None
        self.context = create_server_context()
        """TLS context of the endpoint, with the certificate that was last loaded."""
        self.validity = (0.0, 0.0)
        """Times of issue and expiry of the served certificate, in Unix seconds."""
        self.renew()

    def renew(self) -> None:
        """Load the files if they have changed. New connections then use the new certificate.

        Raise `AuthorityError` if the files cannot be used. The former certificate is then still served.
        """
        digest = self._compute_digest()
        if digest == self._digest:
            return
        load_server_context(self._certificate, self._key)  # a certificate without its key must not reach the endpoint
        validity = read_certificate_validity(self._certificate)
        try:
            self.context.load_cert_chain(self._certificate, self._key, NO_PASSPHRASE)
        except (OSError, ssl.SSLError) as error:
            raise AuthorityError(f"{self._certificate} cannot be loaded: {error}") from None
        if self._digest is not None:
            log.info("certificate of the endpoint loaded", file=str(self._certificate))
        self.validity, self._digest = validity, digest

    def _compute_digest(self) -> bytes:
        try:
            files = self._certificate.read_bytes(), self._key.read_bytes()
        except OSError:  # the error of the load names the file
            return b""
        return hashlib.sha256(b"\0".join(files)).digest()
