"""TLS for the clients' endpoint with an authority of its own, which is constrained to local names.

Clients accept HTTPS only from an authority that they trust, and people add this authority to their trust stores. The
cluster's CA must not be there, because it admits nodes. A trusted authority can also pose as any site. Hence this
authority has a separate key, and its certificate has critical name constraints (RFC 5280 §4.2.1.10). The constraints
permit names under `.local`, `localhost` and the names of `http.allowed_hosts`. A stolen key cannot pose as a site with
another name.

Addresses are not constrained. BoringSSL (Bun, Claude Code, Electron) refuses every certificate with an address below an
authority that constrains addresses (docs/decisions/0030). An authority of an earlier version, with constraints on
addresses, is issued again with the same key and subject. A client that trusts the earlier certificate accepts the
endpoint as before.

The endpoint's certificate contains the current names and addresses of this machine. The certificate is replaced when
they change, or after two thirds of its validity. New connections use the new certificate.
"""

import hashlib
import ipaddress
import ssl
from collections.abc import Callable, Iterable
from pathlib import Path

import structlog
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from coordinator.tls.cluster_ca import (
    CA_VALIDITY_SECONDS,
    AuthorityError,
    build_common_name,
    build_key_usage,
    create_certificate_builder,
    read_key_pair,
    write_key_pair,
)
from host.local_names import read_addresses, read_local_name
from host.private_files import create_private_folder
from wire.certificate import LEAF_VALIDITY_SECONDS, RENEW_AT_SHARE

log = structlog.get_logger("coordinator.tls.https_ca")

LOCAL_NETWORKS = (
    "127.0.0.0/8",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "169.254.0.0/16",
    "100.64.0.0/10",
    "::1/128",
    "fc00::/7",
    "fe80::/10",
)
"""Networks whose addresses of this machine are in the certificate: loopback, private, link-local and overlay networks.

The addresses in `http.allowed_hosts` may be in any network.
"""
REISSUED_WARNING = (
    "the authority of the endpoint was issued again with the same key, because Bun and Claude Code refused its "
    "constraints: run `cluster trust-ca` again for them; all other programs trust it as before"
)
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")
"""Names that every certificate of the endpoint contains."""
NO_PASSPHRASE = ""
"""Passphrase for every key.

Without it, OpenSSL asks on the terminal for the passphrase of an encrypted key, which blocks the loop.
"""
LOCAL_DOMAIN = "local"
"""Domain of the names of Bonjour."""


class HttpsCa:
    """Authority of the HTTPS endpoint, created in `folder` on first use, and the endpoint's certificate.

    Each construction issues a new certificate. `hosts` are additional names and addresses in the certificate. If the
    names in `hosts` change, a new authority is created, and clients must trust it again. `clock` returns Unix seconds.
    `get_local_names` returns the current names and addresses of this machine. The constructor raises `AuthorityError`
    if the authority's file is damaged, and `OSError` if a file cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        hosts: Iterable[str],
        clock: Callable[[], float],
        get_local_names: Callable[[], Iterable[str]] = lambda: (*get_own_names(), *read_addresses()),
    ) -> None:
        create_private_folder(folder)
        self._clock = clock
        self._get_local_names = get_local_names
        self._hosts = tuple(sorted(set(hosts)))
        self._own = folder / "endpoint.pem"
        file = folder / "endpoint-authority.pem"
        self._key, self._ca = self._load_authority(file)
        self._names: tuple[str, ...] = ()
        self._issued_at = self._renew_from = 0.0
        self.context = create_server_context()
        """TLS context of the endpoint, with its current certificate."""
        self.renew()

    @property
    def ca_pem(self) -> str:
        """Certificate of the authority (PEM), for the trust stores of clients."""
        return self._ca.public_bytes(Encoding.PEM).decode()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the authority's certificate (DER) in hex."""
        return hashlib.sha256(self._ca.public_bytes(Encoding.DER)).hexdigest()

    @property
    def validity(self) -> tuple[float, float]:
        """Times of issue and expiry of the endpoint's current certificate, in Unix seconds.

        Raise `AuthorityError` if the certificate's file cannot be read.
        """
        return read_certificate_validity(self._own)

    @property
    def names(self) -> tuple[str, ...]:
        """Names and addresses in the endpoint's current certificate."""
        return self._names

    def renew(self) -> bool:
        """Issue a new certificate if the current one is due. Return whether one was issued.

        A certificate is due if this machine's names or addresses have changed, and after two thirds of its validity. It
        is also due if it is from the future, because the clock was set back. Raise `OSError` if the new certificate
        cannot be written.
        """
        names = self._list_names()
        now = self._clock()
        if names == self._names and self._issued_at <= now < self._renew_from:
            return False
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self._ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        certificate = (
            create_certificate_builder(
                "macpool endpoint", key.public_key(), self._ca.subject, now, LEAF_VALIDITY_SECONDS
            )
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(build_key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_build_general_name(name) for name in names]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        write_key_pair(self._own, key, certificate)
        with self._own.open("a") as file:
            file.write(self.ca_pem)  # sent in the handshake, so that browsers show the authority before it is trusted
        self.context.load_cert_chain(self._own)
        self._names, self._issued_at = names, now
        self._renew_from = now + RENEW_AT_SHARE * LEAF_VALIDITY_SECONDS
        log.info("endpoint certificate", names=", ".join(names))
        return True

    def _list_names(self) -> tuple[str, ...]:
        """Return the names for the certificate.

        If the addresses of this machine cannot be listed, log that. Then return the current names, or for the first
        certificate the names without these addresses.
        """
        try:
            local_names = self._get_local_names()
        except OSError as error:
            log.warning("addresses of this machine not listed", error=str(error))
            if self._names:
                return self._names
            local_names = get_own_names()
        return tuple(sorted({*LOOPBACK_NAMES, *self._hosts, *filter(is_local_name, local_names)}))

    def _load_authority(self, file: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        """Read the authority, or create one. If the permitted names changed, create one with a new key.

        An authority with the same names that also constrains addresses is issued again with its key.
        """
        names = [x509.DNSName("localhost"), x509.DNSName(LOCAL_DOMAIN)]
        names += [general for general in map(_build_general_name, self._hosts) if isinstance(general, x509.DNSName)]
        if file.exists():
            key, known = read_key_pair(file)
            constrained = get_name_constraints(known)
            if constrained == names:
                return key, known
            if [general for general in constrained if isinstance(general, x509.DNSName)] == names:
                log.warning(REISSUED_WARNING)
                return self._issue_authority(file, key, _get_common_name(known), names)
        host = read_local_name().encode("ascii", "replace").decode()
        return self._issue_authority(
            file, ec.generate_private_key(ec.SECP256R1()), f"macpool endpoint {host}"[:64], names
        )

    def _issue_authority(
        self, file: Path, key: ec.EllipticCurvePrivateKey, name: str, names: list[x509.DNSName]
    ) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        """Create a certificate authority with this key and common name, constrained to the DNS names `names`.

        Write it to `file`, and return its key and certificate. Raise `OSError` if the file cannot be written.
        """
        certificate = (
            create_certificate_builder(
                name, key.public_key(), build_common_name(name), self._clock(), CA_VALIDITY_SECONDS
            )
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(build_key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.NameConstraints(names, None), critical=True)
            .sign(key, hashes.SHA256())
        )
        write_key_pair(file, key, certificate)
        return key, certificate


def read_certificate_validity(pem: Path) -> tuple[float, float]:
    """Return the times of issue and expiry of the first certificate in a file, in Unix seconds.

    Raise `AuthorityError` if the file has no certificate or cannot be read.
    """
    try:
        certificate = x509.load_pem_x509_certificate(pem.read_bytes())
    except (OSError, ValueError) as error:
        raise AuthorityError(f"{pem} cannot be read: {error}") from None
    return certificate.not_valid_before_utc.timestamp(), certificate.not_valid_after_utc.timestamp()


def get_name_constraints(certificate: x509.Certificate) -> list[x509.GeneralName]:
    """Return the names that an authority's name constraints permit; an empty list if it has no constraints."""
    try:
        return list(certificate.extensions.get_extension_for_class(x509.NameConstraints).value.permitted_subtrees or ())
    except x509.ExtensionNotFound:
        return []


def _get_common_name(certificate: x509.Certificate) -> str:
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def is_local_name(name: str) -> bool:
    """Return whether the endpoint's certificate may contain an address or name of this machine.

    It may contain addresses in `LOCAL_NETWORKS`, `localhost`, and names in ASCII under `.local`.
    """
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or (name.isascii() and name.endswith("." + LOCAL_DOMAIN))
    networks = map(ipaddress.ip_network, LOCAL_NETWORKS)
    return any(address in network for network in networks if network.version == address.version)


def get_own_names() -> tuple[str, ...]:
    """Return the names of this machine on the local network: its Bonjour name under `.local`, in lower case.

    On a Mac, the call runs a tool and blocks for at most `host.subprocesses.TOOL_TIMEOUT_SECONDS`.
    """
    return (f"{read_local_name().lower()}.{LOCAL_DOMAIN}",)


def load_server_context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a TLS context for servers with a certificate chain and its key (PEM files).

    Raise `AuthorityError` if the files cannot be used.
    """
    context = create_server_context()
    try:
        context.load_cert_chain(certificate, key, NO_PASSPHRASE)
    except (OSError, ssl.SSLError) as error:
        why = getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
        if isinstance(error, ssl.SSLError) and b"ENCRYPTED" in key.read_bytes():
            why = "the key is encrypted; decrypt it with `openssl pkey`"
        raise AuthorityError(
            f"http.tls_cert_file {certificate} with http.tls_key_file {key} cannot be used: {why}"
        ) from None
    return context


def create_server_context() -> ssl.SSLContext:
    """Return a TLS context for the endpoint, without a certificate.

    The minimum is TLS 1.2, because many clients are old.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _build_general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a listening address. Of names, that holds only for `localhost`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
