"""Build and parse Bonjour records, and choose the addresses to announce.

A record is an unauthenticated hint: it proves neither the identity nor the liveness of its sender. Parsed values are
bounded and printable. A client that dials an address from a record verifies the certificate of the peer.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from wire.identity import PROTOCOL, SERVICE_TYPE

MAX_NAME_BYTES = 63
"""Maximum bytes of a DNS label, and therefore of the instance name of a record."""

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9 ._,:()+/-]")
_HEX = re.compile(r"[0-9a-f]{0,16}")
_LEFT_OUT = re.compile(
    r"(docker|veth|br-|virbr|bridge\d\d|utun|awdl|llw|anpi|ap\d|gif|stf|tun|tap|wg|tailscale|vmnet|lo)"
)
"""Interfaces without a stable address for other machines: virtual interfaces, VPNs, Apple's peer-to-peer radio.

On macOS, bridge100 and above serve shared connections and virtual machines. bridge0, the Thunderbolt bridge, is
announced.
"""


def sanitize_text(text: str, longest: int = 64) -> str:
    """Return untrusted text as at most `longest` ASCII characters that are safe in terminals, labels and pages.

    Any other character becomes `?`. Spaces at both ends are removed.
    """
    return _NOT_PLAIN.sub("?", text[:longest]).strip()


@dataclass(frozen=True, slots=True)
class BonjourRecord:
    """TXT fields of a Bonjour record."""

    role: str
    """`coord` for a coordinator, `new` for a machine that has not joined."""
    cluster: str = ""
    """First 12 hex digits of the cluster id; empty for a machine that has not joined."""
    version: str = ""
    """Version of Macpool; empty if it is not announced."""
    fingerprint: str = ""
    """First 16 hex digits of the SHA-256 of the CA, for display; empty for a machine that has not joined."""
    protocol: int = PROTOCOL
    """Newest protocol version of the sender."""


def shorten_cluster_id(cluster: str) -> str:
    """Return the first 12 hex digits of a cluster id, the part that is announced."""
    return re.sub(r"[^0-9a-f]", "", cluster.lower())[:12]


def build_instance_name(name: str, identity: str) -> str:
    """Return the service name of a record: `<name>-<id6>._macpool._tcp.local.`.

    `name` is a display name, `identity` the id of the cluster or the machine. `id6` are the first six letters and
    digits of `identity`, which distinguish machines of equal name. The name is sanitized (`sanitize_text`), has hyphens
    in place of dots, and is shortened so that `<name>-<id6>` fits in a DNS label.
    """
    suffix = "-" + re.sub(r"[^A-Za-z0-9]", "", identity)[:6]
    label = sanitize_text(name, MAX_NAME_BYTES - len(suffix)).replace(".", "-") or "macpool"
    return f"{label}{suffix}.{SERVICE_TYPE}"


def to_txt(advert: BonjourRecord) -> dict[str, str]:
    """Return the TXT fields of a Bonjour record by their keys.

    The fields take less than 400 bytes and do not change with load.
    """
    return {
        "txtvers": "1",
        "role": advert.role,
        "cid": advert.cluster,
        "pv": str(advert.protocol),
        "v": advert.version,
        "fp": advert.fingerprint,
    }


def from_txt(txt: Mapping[bytes, bytes | None]) -> BonjourRecord | None:
    """Parse the TXT fields of an untrusted record. Return None for a record of another program or with invalid values.

    A value is cut to 64 bytes, and `version` is sanitized (`sanitize_text`).
    """
    keys = (b"role", b"cid", b"fp", b"pv", b"v")
    values = ((txt.get(key) or b"")[:64].decode("ascii", "replace") for key in keys)
    role, cluster, fingerprint, protocol, version = values
    if role not in ("coord", "new") or not re.fullmatch(r"[0-9]{1,6}", protocol):
        return None
    if not _HEX.fullmatch(cluster) or not _HEX.fullmatch(fingerprint):
        return None
    return BonjourRecord(role, cluster, sanitize_text(version, 32), fingerprint, int(protocol))


def get_shown_name(instance: str) -> str:
    """Return the printable name of a Bonjour instance, without its service type; `unnamed` if that name is empty.

    The name has at most `MAX_NAME_BYTES` characters.
    """
    return sanitize_text(instance.removesuffix("." + SERVICE_TYPE), MAX_NAME_BYTES) or "unnamed"


def rank_addresses(pairs: Iterable[tuple[str, str]], default: str = "") -> list[str]:
    """Return the addresses that another machine can dial, best first, from pairs of interface and address.

    The order is private IPv4, link-local IPv4 (a Thunderbolt cable between two Macs), other IPv4, unique-local IPv6,
    global IPv6. Among equals, the address `default` of the default route is first, because most machines are on that
    network. Link-local IPv6 is omitted, because it needs a scope that only the dialling machine knows. Loopback,
    multicast, unspecified and invalid addresses, and all addresses of virtual interfaces and VPNs, are omitted as well.
    """
    ranked = {address: rank for interface, address in pairs if (rank := _rank(interface, address)) is not None}
    return sorted(ranked, key=lambda address: (ranked[address], address != default, address))


def _rank(interface: str, address: str) -> int | None:
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return None
    if _LEFT_OUT.match(interface) or known.is_loopback or known.is_multicast or known.is_unspecified:
        return None
    if isinstance(known, ipaddress.IPv6Address):
        return None if known.is_link_local else 3 if known.is_private else 4
    return 1 if known.is_link_local else 0 if known.is_private else 2
