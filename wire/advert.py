"""What a Bonjour record of ours says, how it is written and read, and which addresses are worth announcing.

A record is a hint from anybody on the LAN: it never proves identity or life. What is read from it is bounded and
printable, and whoever dials an address out of it verifies the certificate at the other end.
"""

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from wire.identity import PROTOCOL, SERVICE_TYPE

LONGEST_NAME = 63
"""Bytes of a DNS label, the limit for an instance name."""

_NOT_PLAIN = re.compile(r"[^A-Za-z0-9 ._,:()+/-]")
_HEX = re.compile(r"[0-9a-f]{0,16}")
_LEFT_OUT = re.compile(
    r"(docker|veth|br-|virbr|bridge\d\d|utun|awdl|llw|anpi|ap\d|gif|stf|tun|tap|wg|tailscale|vmnet|lo)"
)
"""Interfaces that other machines cannot reach, or not at all times: virtual ones, VPNs, Apple's peer-to-peer radio.
bridge100 and up are shared connections and virtual machines of macOS; bridge0 is its Thunderbolt bridge and stays."""


def plain(text: str, longest: int = 64) -> str:
    """Make a stranger's text safe to print, to label with and to put into a page: plain ASCII, bounded."""
    return _NOT_PLAIN.sub("?", text[:longest]).strip()


@dataclass(frozen=True, slots=True)
class Advert:
    """A record's TXT. `role`: coord or new; `cluster`: first 12 hex digits of the cluster's id, empty for a machine
    that joined none; `fingerprint`: first 16 hex digits of the CA's SHA-256, a hint for people."""

    role: str
    cluster: str = ""
    version: str = ""
    fingerprint: str = ""
    protocol: int = PROTOCOL


def cluster_hint(cluster: str) -> str:
    """Give the part of a cluster's id that is announced."""
    return re.sub(r"[^0-9a-f]", "", cluster.lower())[:12]


def instance_name(name: str, identity: str) -> str:
    """Give `<name>-<id6>._macpool._tcp.local.`: the id keeps two machines of one name apart."""
    suffix = "-" + re.sub(r"[^A-Za-z0-9]", "", identity)[:6]
    label = plain(name, LONGEST_NAME - len(suffix)).replace(".", "-") or "macpool"
    return f"{label}{suffix}.{SERVICE_TYPE}"


def to_txt(advert: Advert) -> dict[str, str]:
    """Write the TXT record; well under 400 bytes and without anything that changes with load."""
    return {
        "txtvers": "1", "role": advert.role, "cid": advert.cluster, "pv": str(advert.protocol), "v": advert.version,
        "fp": advert.fingerprint,
    }  # fmt: skip


def from_txt(txt: Mapping[bytes, bytes | None]) -> Advert | None:
    """Read a TXT record of anybody; None when it is none of ours."""
    keys = (b"role", b"cid", b"fp", b"pv", b"v")
    values = ((txt.get(key) or b"")[:64].decode("ascii", "replace") for key in keys)
    role, cluster, fingerprint, protocol, version = values
    if role not in ("coord", "new") or not re.fullmatch(r"[0-9]{1,6}", protocol):
        return None
    if not _HEX.fullmatch(cluster) or not _HEX.fullmatch(fingerprint):
        return None
    return Advert(role, cluster, plain(version, 32), fingerprint, int(protocol))


def shown_name(instance: str) -> str:
    """Give the friendly name out of an instance name, safe to print."""
    return plain(instance.removesuffix("." + SERVICE_TYPE), LONGEST_NAME) or "unnamed"


def usable_addresses(found: Iterable[tuple[str, str]]) -> list[str]:
    """Choose from `(interface, address)` those that another machine could dial, the best first.

    Private IPv4, then link-local IPv4 (a Thunderbolt cable between two Macs), other IPv4, unique-local and global
    IPv6. IPv6 link-local is left out: it would need the reader's own scope.
    """
    ranked = {address: rank for interface, address in found if (rank := _rank(interface, address)) is not None}
    return sorted(ranked, key=lambda address: (ranked[address], address))


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
