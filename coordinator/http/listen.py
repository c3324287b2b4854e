"""Listening addresses: opened, and as others and this machine itself reach them."""

import ipaddress
import socket

from host.bonjour_announce import addresses


def listen(host: str, port: int) -> socket.socket:
    """Open the HTTP socket ourselves, so that port 0 is known before anything is announced."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def reachable(host: str) -> str:
    """Give the host that others should use for a listening address; the best LAN address for a wildcard."""
    if host not in ("0.0.0.0", "::"):  # noqa: S104
        return f"[{host}]" if ":" in host else host
    best = next(iter(addresses()), "127.0.0.1")
    return f"[{best}]" if ipaddress.ip_address(best).version == 6 else best


def from_here(host: str) -> str:
    """Give the host at which this machine itself reaches a listening address."""
    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"[{own}]" if ":" in own else own


def cluster_addresses(host: str, port: int) -> tuple[str, ...]:
    """Give every HOST:PORT at which nodes may reach a listening address."""
    if host not in ("0.0.0.0", "::"):  # noqa: S104
        return (f"{reachable(host)}:{port}",)
    return tuple(f"[{a}]:{port}" if ":" in a else f"{a}:{port}" for a in addresses())
