"""Choose the addresses of this machine at which a mirror listens."""

import ipaddress
from collections.abc import Iterable

import ifaddr
import structlog

log = structlog.get_logger("node.hub.serving.addresses")


def choose_hosts(linked: str, own: Iterable[str] | None = None) -> tuple[str, ...]:
    """Return the IP addresses at which a mirror listens; none if `linked` is empty.

    `linked` is the address of this machine on its link to the coordinator. That address is enough, because other nodes
    are assumed to reach the network of the coordinator. A loopback address means that the coordinator runs on this
    machine. All addresses that other machines can reach are then added. `own` are the addresses of all interfaces;
    None reads them from the system. Raise `ValueError` if an address is invalid.
    """
    if not linked:
        return ()
    if not ipaddress.ip_address(linked.partition("%")[0]).is_loopback:
        return (linked,)
    addresses = _list_own_addresses() if own is None else own
    return tuple(dict.fromkeys((linked, *(address for address in addresses if _is_reachable(address)))))


def _list_own_addresses() -> list[str]:
    """Return the addresses of all interfaces; an empty list if the system cannot list them: the relay serves then."""
    try:
        adapters = list(ifaddr.get_adapters())
    except OSError as error:
        log.warning("addresses of this machine not listed", error=str(error))
        return []
    return [str(ip.ip if isinstance(ip.ip, str) else ip.ip[0]) for adapter in adapters for ip in adapter.ips]


def _is_reachable(address: str) -> bool:
    """Return whether other machines of the network can reach an address without a zone."""
    parsed = ipaddress.ip_address(address)
    return not (parsed.is_loopback or parsed.is_link_local or parsed.is_multicast or parsed.is_unspecified)
