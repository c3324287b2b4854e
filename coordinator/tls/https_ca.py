"""TLS for the endpoint that clients use: an authority of its own that may vouch for no public name, or given files.

Theory. Clients speak HTTPS only if they trust who signed the certificate, so people will put our authority among those
that their machine trusts. The cluster's CA must not be that one: it lets nodes in. And an authority that a machine
trusts can pose as any site. So this is another key, whose certificate is constrained (critical, RFC 5280 §4.2.1.10) to
names under `.local`, `localhost` and the names of `http.hosts`: stolen, it cannot pose as a site that has another name.
Addresses are not constrained, because BoringSSL (Bun, Claude Code, Electron) refuses every certificate that names an
address below an authority with a constraint on addresses (docs/decisions/0030).

An authority that an earlier version made, with constraints on addresses, is issued again with the same key and subject:
a client that trusts the earlier certificate accepts the endpoint as before.

The endpoint's own certificate names what this machine is called and its addresses at this moment; it is made anew when
they change or two thirds of its life are over, and new connections get it.
"""

import hashlib
import ipaddress
import socket
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
    CA_LIFE,
    AuthorityError,
    certificate_builder,
    key_usage,
    named,
    read_pair,
    write_pair,
)
from host.bonjour_announce import addresses
from host.private_files import private_folder
from wire.certificate import LEAF_LIFE, RENEW_AT

log = structlog.get_logger("coordinator.tls.https_ca")

HOME = (
    "127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "100.64.0.0/10",
    "::1/128", "fc00::/7", "fe80::/10",
)  # fmt: skip
"""Addresses that the certificate may name: loopback, private and link-local ones, and those of overlay networks."""
ISSUED_AGAIN = (
    "the authority of the endpoint was issued again with the same key, because Bun and Claude Code refused its "
    "constraints: run `cluster trust-ca` again for them; all other programs trust it as before"
)
ALWAYS = ("localhost", "127.0.0.1", "::1")
LOCAL = "local"


class Endpoint:
    """The endpoint's TLS, made on first use in `folder`. `hosts` are further names; `clock` gives Unix seconds."""

    def __init__(
        self,
        folder: Path,
        hosts: Iterable[str],
        clock: Callable[[], float],
        here: Callable[[], Iterable[str]] = lambda: (*own_names(), *addresses()),
    ) -> None:
        private_folder(folder)
        self._clock = clock
        self._here = here
        self._hosts = tuple(sorted(set(hosts)))
        self._own = folder / "endpoint.pem"
        file = folder / "endpoint-authority.pem"
        self._key, self._ca = self._authority(file)
        self._names: tuple[str, ...] = ()
        self._renew_from = 0.0
        self.context = server_context()
        self.renew()

    @property
    def ca_pem(self) -> str:
        """The authority's certificate, for the machines of clients."""
        return self._ca.public_bytes(Encoding.PEM).decode()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the authority's certificate (DER), hex."""
        return hashlib.sha256(self._ca.public_bytes(Encoding.DER)).hexdigest()

    @property
    def life(self) -> tuple[float, float]:
        """Begin and end of the certificate in use, in Unix seconds."""
        return life_of(self._own)

    @property
    def names(self) -> tuple[str, ...]:
        """The names and addresses that the certificate in use is good for."""
        return self._names

    def renew(self) -> bool:
        """Make a new certificate if this machine is called otherwise by now, or the present one is two thirds
        through."""
        names = tuple(sorted({*ALWAYS, *self._hosts, *filter(allowed, self._here())}))
        now = self._clock()
        if names == self._names and now < self._renew_from:
            return False
        self._names, self._renew_from = names, now + RENEW_AT * LEAF_LIFE
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = self._ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
        certificate = (
            certificate_builder("macpool endpoint", key.public_key(), self._ca.subject, now, LEAF_LIFE)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(key_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_general(name) for name in names]), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        write_pair(self._own, key, certificate)
        with self._own.open("a") as file:
            file.write(self.ca_pem)  # shown with it, so that `cluster trust-ca` can fetch it
        self.context.load_cert_chain(self._own)
        log.info("endpoint certificate", names=", ".join(names))
        return True

    def _authority(self, file: Path) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        """Read the authority, or make one: with a new key where it may vouch for other names than before."""
        names = [x509.DNSName("localhost"), x509.DNSName(LOCAL)]
        names += [general for general in map(_general, self._hosts) if isinstance(general, x509.DNSName)]
        if file.exists():
            key, known = read_pair(file)
            held = constrained_to(known)
            if held == names:
                return key, known
            if [general for general in held if isinstance(general, x509.DNSName)] == names:
                log.warning(ISSUED_AGAIN)
                return self._issue(file, key, _common_name(known), names)
        host = socket.gethostname().partition(".")[0]
        return self._issue(file, ec.generate_private_key(ec.SECP256R1()), f"macpool endpoint {host}"[:64], names)

    def _issue(
        self, file: Path, key: ec.EllipticCurvePrivateKey, name: str, names: list[x509.DNSName]
    ) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        """Write the authority of a key that may vouch for these names alone."""
        certificate = (
            certificate_builder(name, key.public_key(), named(name), self._clock(), CA_LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.NameConstraints(names, None), critical=True)
            .sign(key, hashes.SHA256())
        )
        write_pair(file, key, certificate)
        return key, certificate


def life_of(pem: Path) -> tuple[float, float]:
    """Give begin and end of the first certificate in a file, in Unix seconds; AuthorityError when it has none."""
    try:
        found = x509.load_pem_x509_certificate(pem.read_bytes())
    except (OSError, ValueError) as error:
        raise AuthorityError(f"{pem} cannot be read: {error}") from None
    return found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()


def constrained_to(certificate: x509.Certificate) -> list[x509.GeneralName]:
    """Return the names that an authority is constrained to; an empty list without constraints."""
    try:
        return list(certificate.extensions.get_extension_for_class(x509.NameConstraints).value.permitted_subtrees or ())
    except x509.ExtensionNotFound:
        return []


def _common_name(certificate: x509.Certificate) -> str:
    return str(certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)[0].value)


def allowed(name: str) -> bool:
    """Return whether the certificate may name this address or name of this machine."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return name == "localhost" or name.endswith("." + LOCAL)
    networks = map(ipaddress.ip_network, HOME)
    return any(address in network for network in networks if network.version == address.version)


def own_names() -> tuple[str, ...]:
    """Give the name of this machine on the local network."""
    return (f"{socket.gethostname().partition('.')[0].lower()}.{LOCAL}",)


def from_files(certificate: Path, key: Path) -> ssl.SSLContext:
    """Give the context of given PEM files; AuthorityError when they cannot be used."""
    context = server_context()
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        why = getattr(error, "strerror", None) or getattr(error, "reason", None) or str(error)
        raise AuthorityError(f"http.certificate {certificate} with http.key {key} cannot be used: {why}") from None
    return context


def server_context() -> ssl.SSLContext:
    """Begin a context for clients: TLS 1.2 and later, for many of them are old."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    return context


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def is_loopback(host: str) -> bool:
    """Say whether only this machine reaches a listening address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
