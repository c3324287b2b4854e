"""Checks of the network: macOS's local network privacy, multicast for Bonjour, and proxies."""

import os
import socket
import struct
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress

from coordinator.doctor import macos_tool_output
from coordinator.doctor.finding import Finding, fail, not_here, ok, warn
from coordinator.doctor.host_probe import HostProbe
from host.local_names import find_interface

BONJOUR_PORT = 5353
BONJOUR_GROUPS = {socket.AF_INET: "224.0.0.251", socket.AF_INET6: "ff02::fb"}
"""Multicast group of Bonjour by address family."""
MULTICAST_TIMEOUT_SECONDS = 1.0
"""Maximum seconds until a query to Bonjour's group returns to this machine."""
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def check_local_network(here: HostProbe) -> Finding:
    """Check that macOS's local network privacy does not block this process, which would resemble a network fault.

    Fail if it does (`macos_tool_output.is_blocked`). Warn if no other machine answers. The check does not apply if no
    other machine is known, or to other systems.
    """
    if not here.mac:
        return not_here("only macOS blocks programs from the local network")
    gateway = macos_tool_output.parse_gateway(here.run_tool("/sbin/route", "-n", "get", "default"))
    inspection = here.read_inspection() if here.has_node else None
    others = (
        [(dial["address"], dial["errno"] if dial["errno"] is not None else -1) for dial in inspection["dialled"]]
        if inspection
        else []
    )
    if not any(macos_tool_output.is_answer(code) for _, code in others):
        near = macos_tool_output.parse_neighbours(here.run_tool("/usr/sbin/arp", "-an"), gateway)[:2]
        others += [(address, here.dial(address, 8081)) for address in near]
    reach = macos_tool_output.Reachability(here.dial(gateway, 53) if gateway else None, tuple(others))
    text = f"gateway: {_describe_result(reach.gateway)}; " + ", ".join(
        f"{name}: {_describe_result(code)}" for name, code in others
    )
    if macos_tool_output.is_blocked(reach):
        app = macos_tool_output.find_responsible_program(dict(here.environ))
        return fail(
            f"macOS blocks {app} from the local network (errno {macos_tool_output.NO_ROUTE}): {text}",
            f"allow {app} under System Settings > Privacy & Security > Local Network, run it from Terminal, or "
            "install the service, which needs no permission: `sudo cluster service install`",
        )
    if not others:
        return not_here(f"gateway: {_describe_result(reach.gateway)}; no other machine of the local network is known")
    if not any(macos_tool_output.is_answer(code) for _, code in others):
        return warn(text, "no machine answers: check the cable, Wi-Fi, and whether the access point isolates clients")
    return ok(text)


def _describe_result(code: int | None) -> str:
    if code is None:
        return "none"
    if macos_tool_output.is_answer(code):
        return "answers"
    return "no answer" if code < 0 else f"errno {code}"


def check_bonjour(here: HostProbe) -> Finding:
    """Check that a query to Bonjour's multicast group returns to this machine. Warn otherwise: Bonjour is optional."""
    question = (
        b"\x00\x00\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x08"
        + os.urandom(4).hex().encode()
        + (b"\x08_macpool\x04_tcp\x05local\x00\x00\x0c\x00\x01")
    )
    step = (
        "Bonjour is optional: join with an address, `cluster join HOST:8081 --token-file FILE`. To enable it, "
        "allow multicast (UDP 5353) in firewall and access point"
    )
    try:
        with _open_group(here.list_addresses()) as (line, destination):
            line.settimeout(0.1)
            line.sendto(question, destination)
            received = _wait_for_query(line, question)
    except OSError as error:
        if here.mac and error.errno == macos_tool_output.NO_ROUTE:
            return warn("multicast is blocked (errno 65)", f"see the check local-network; {step}")
        return warn(f"multicast does not work: {error.strerror or error}", step)
    return ok("a query to Bonjour's group returns") if received else warn("a query to Bonjour's group is lost", step)


@contextmanager
def _open_group(addresses: list[str]) -> Generator[tuple[socket.socket, tuple[str | int, ...]]]:
    """Join Bonjour's group of the address family in which this machine announces: IPv6 if no address is IPv4.

    Yield the socket and the address of the group. Raise `OSError` if the machine has no multicast.
    """
    only_v6 = bool(addresses) and all(":" in address for address in addresses)
    family = socket.AF_INET6 if only_v6 else socket.AF_INET
    group = socket.inet_pton(family, BONJOUR_GROUPS[family])
    destination = (BONJOUR_GROUPS[family], BONJOUR_PORT)
    with socket.socket(family, socket.SOCK_DGRAM) as line:
        line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            line.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        line.bind(("", BONJOUR_PORT))
        if only_v6:
            interface = find_interface(addresses[0])
            line.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, group + struct.pack("@I", interface))
            line.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_LOOP, 1)
            yield line, (*destination, 0, interface)
            return
        line.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group + bytes(4))
        line.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
        yield line, destination


def _wait_for_query(line: socket.socket, question: bytes) -> bool:
    deadline = time.monotonic() + MULTICAST_TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        with suppress(TimeoutError):
            if line.recv(9000) == question:
                return True
    return False


def check_proxy(here: HostProbe) -> Finding:
    """Check that no proxy is set, or that NO_PROXY is set. Warn otherwise, because pool requests need no proxy."""
    variables = here.find_variables(*PROXIES)
    if variables and not here.find_variables("NO_PROXY"):
        return warn(
            f"{', '.join(variables)} is set",
            "clients would send requests for the pool to the proxy: set NO_PROXY=*, or add the pool's host to NO_PROXY",
        )
    return ok(f"{', '.join(variables)} is set, with NO_PROXY" if variables else "no proxy is set")
