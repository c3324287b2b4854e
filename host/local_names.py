"""Read the name and the addresses of this machine on the local network.

The host name of a Mac is not the name under which other machines find it, because the DHCP server can choose the host
name. Bonjour answers for the LocalHostName, which the user sets under System Settings > General > Sharing. Unverified
on macOS: the entry `local-name` of the checklist.
"""

import socket
import sys

import ifaddr
import structlog

from host.subprocesses import RunTool, run_tool
from wire.bonjour_record import rank_addresses

LOCAL_HOST_NAME = ("/usr/sbin/scutil", "--get", "LocalHostName")
"""Command that prints the LocalHostName of a Mac."""
ELSEWHERE = ("192.0.2.1", 9)
"""Address of no machine (RFC 5737), for which the system chooses the default route."""

log = structlog.get_logger()


def read_local_name(platform: str = sys.platform, run: RunTool = run_tool) -> str:
    """Return the name of this machine in Bonjour, without `.local`.

    On a Mac, the name is the LocalHostName, and the call blocks for at most `host.subprocesses.TOOL_TIMEOUT_SECONDS`.
    On other systems, or if the LocalHostName cannot be read, the name is the first label of the host name. `platform`
    and `run` replace the platform and the tool runner in tests.
    """
    name = run(LOCAL_HOST_NAME).strip() if platform == "darwin" else ""
    return name or socket.gethostname().partition(".")[0]


def list_addresses() -> list[str]:
    """Return the result of `read_addresses`; an empty list, with a log line, if the system cannot list addresses."""
    try:
        return read_addresses()
    except OSError as error:
        log.warning("addresses of this machine not listed", error=str(error))
        return []


def read_addresses() -> list[str]:
    """Return the IP addresses of this machine that another machine can dial, best first (`rank_addresses`).

    Raise `OSError` if the system cannot list addresses, for example without a free file descriptor.
    """
    pairs = [(adapter.name, ip) for adapter in ifaddr.get_adapters() for ip in adapter.ips]
    return rank_addresses(
        ((name, ip.ip if isinstance(ip.ip, str) else ip.ip[0]) for name, ip in pairs), _find_default_address()
    )


def _find_default_address() -> str:
    """Return the IPv4 address from which this machine sends to other networks; empty without a route. Send nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        try:
            line.connect(ELSEWHERE)
        except OSError:
            return ""
        return line.getsockname()[0]


def find_interface(address: str) -> int:
    """Return the system's number of the network interface with this IPv6 address; 0 if no interface has it.

    Raise `OSError` if the system cannot list its addresses.
    """
    adapters = ifaddr.get_adapters()
    return next(
        (adapter.index or 0 for adapter in adapters for ip in adapter.ips if ip.is_IPv6 and ip.ip[0] == address), 0
    )
