"""TLS for the endpoint that clients use: an authority of its own that may vouch for nothing but home, or given files.

Theory. Clients speak HTTPS only if they trust who signed the certificate, so people will put our authority among those
that their machine trusts. The cluster's CA must not be that one: it lets nodes in. And an authority that a machine
trusts can pose as any site. So this is another key, whose certificate is constrained (critical, RFC 5280 §4.2.1.10) to
names under `.local`, `localhost`, the names of `http.hosts`, and to addresses that no public site has: stolen, it is of
no use against the rest of the world.

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
from cryptography.x509.oid import ExtendedKeyUsageOID

from coordinator.authority import CA_LIFE, AuthorityError, certificate_builder, key_usage, named, read_pair, write_pair
from machine.announce import addresses
from machine.private import private_folder
from wire.certificate import LEAF_LIFE, RENEW_AT

log = structlog.get_logger("coordinator.endpoint")

HOME = (
    "127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "100.64.0.0/10",
    "::1/128", "fc00::/7", "fe80::/10",
)  # fmt: skip
"""Addresses that the authority may vouch for: loopback, private and link-local ones, and those of overlay networks."""
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
        if not file.exists() or constrained_to(read_pair(file)[1]) != self._allowed():
            write_pair(file, *self._new_ca())
            self._own.unlink(missing_ok=True)
        self._key, self._ca = read_pair(file)
        self._names: tuple[str, ...] = ()
        self._renew_from = 0.0
        self.context = server_context()
        self.renew()

    @property
    def ca_pem(self) -> str:
        """The authority's certificate, for whoever is to trust it."""
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

    def _allowed(self) -> list[x509.GeneralName]:
        networks = [x509.IPAddress(ipaddress.ip_network(network)) for network in HOME]
        return [x509.DNSName("localhost"), x509.DNSName(LOCAL), *map(_general, self._hosts), *networks]

    def _new_ca(self) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
        key = ec.generate_private_key(ec.SECP256R1())
        name = f"macpool endpoint {socket.gethostname().partition('.')[0]}"[:64]
        certificate = (
            certificate_builder(name, key.public_key(), named(name), self._clock(), CA_LIFE)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(key_usage(signs_certificates=True), critical=True)
            .add_extension(x509.NameConstraints(self._allowed(), None), critical=True)
            .sign(key, hashes.SHA256())
        )
        return key, certificate


def life_of(pem: Path) -> tuple[float, float]:
    """Give begin and end of the first certificate in a file, in Unix seconds; AuthorityError when it has none."""
    try:
        found = x509.load_pem_x509_certificate(pem.read_bytes())
    except (OSError, ValueError) as error:
        raise AuthorityError(f"{pem} cannot be read: {error}") from None
    return found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()


def constrained_to(certificate: x509.Certificate) -> list[x509.GeneralName]:
    """Give what an authority may vouch for; nothing where it is not constrained."""
    try:
        return list(certificate.extensions.get_extension_for_class(x509.NameConstraints).value.permitted_subtrees or ())
    except x509.ExtensionNotFound:
        return []


def allowed(name: str) -> bool:
    """Say whether the authority may vouch for an address or a name of this machine."""
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
