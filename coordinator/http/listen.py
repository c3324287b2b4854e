"""Listening sockets, and the addresses at which clients, nodes and this machine reach them."""

import errno
import ipaddress
import socket
from dataclasses import dataclass

import structlog

from host.local_names import list_addresses

ANY_IPV4, ANY_ADDRESS = "0.0.0.0", "::"  # noqa: S104
"""Wildcards for listening: all IPv4 addresses of this machine, and all addresses."""

log = structlog.get_logger("coordinator.http.listen")


@dataclass(frozen=True, slots=True)
class ListenerAddress:
    """Address of a listening socket, and the URLs that lead to it.

    With a wildcard as `host`, `build_url` uses the current address of this machine, which changes when the machine gets
    or changes its network.
    """

    scheme: str
    """Scheme of the URLs, without `://`."""
    host: str
    """Host or wildcard at which the socket listens."""
    port: int
    """TCP port of the socket."""

    def build_url(self) -> str:
        """Return the URL, without a path, at which other machines currently reach the socket.

        For a wildcard, the host is the best current address of this machine; 127.0.0.1 without a network.
        """
        return f"{self.scheme}://{get_reachable_host(self.host)}:{self.port}"

    def build_local_url(self) -> str:
        """Return the URL, without a path, at which this machine reaches the socket."""
        return f"{self.scheme}://{get_local_host(self.host)}:{self.port}"


def open_listener(host: str, port: int, option: str = "--listen") -> socket.socket:
    """Open a listening TCP socket. Raise `OSError` if the address cannot be used.

    `option` is the command-line option of the address, for messages. The wildcard `::` also accepts IPv4 connections.
    With port 0 the system chooses a free port. The socket is opened before the server starts, because the addresses
    that the coordinator announces contain that port. Log a warning if no other machine can reach the socket, because
    this machine has only IPv6 addresses.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, host != ANY_ADDRESS)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        advice = ""
        if error.errno == errno.EADDRINUSE:
            advice = (
                f": end the program that uses it (`lsof -nP -iTCP:{port} -sTCP:LISTEN` names it), or set {option} to "
                "another port"
            )
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}{advice}") from None
    listener.listen(1024)
    listener.setblocking(False)
    if host == ANY_IPV4 and not _list_dialable(host) and (others := list_addresses()):
        remedy = f"set {option} to [::]:{port}"
        log.warning("no other machine can reach an IPv4 port of this machine", addresses=others, remedy=remedy)
    return listener


def get_reachable_host(host: str) -> str:
    """Return the host of a URL at which other machines reach the listening address `host`.

    For a wildcard that is the best address of this machine in its network, or 127.0.0.1 if it has none. IPv6 addresses
    are in brackets.
    """
    if host not in (ANY_IPV4, ANY_ADDRESS):
        return f"[{host}]" if ":" in host else host
    best = next(iter(_list_dialable(host)), "127.0.0.1")
    return f"[{best}]" if ipaddress.ip_address(best).version == 6 else best


def get_local_host(host: str) -> str:
    """Return the host of a URL at which this machine reaches a listening address; loopback for a wildcard."""
    own = {ANY_IPV4: "127.0.0.1", ANY_ADDRESS: "::1"}.get(host, host)
    return f"[{own}]" if ":" in own else own


def list_cluster_addresses(host: str, port: int) -> tuple[str, ...]:
    """Return every HOST:PORT at which nodes may reach a listening address.

    For a wildcard, these are this machine's addresses that the wildcard includes; none without a network.
    """
    if host not in (ANY_IPV4, ANY_ADDRESS):
        return (f"{get_reachable_host(host)}:{port}",)
    return tuple(f"[{a}]:{port}" if ":" in a else f"{a}:{port}" for a in _list_dialable(host))


def _list_dialable(wildcard: str) -> list[str]:
    """Return the addresses of this machine at which a socket of a wildcard is reached, best first."""
    return [address for address in list_addresses() if wildcard == ANY_ADDRESS or ":" not in address]
