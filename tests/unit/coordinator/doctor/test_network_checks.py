"""Checks of the local network, with answers of a Mac's tools and sockets of this machine."""

import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from coordinator.doctor import network_checks as checks
from coordinator.doctor.finding import Finding
from coordinator.doctor.host_probe import HostProbe
from host.local_names import list_addresses
from tests.support.pretended_mac import pretended

DAY = 86400.0
PEER = {"address": "192.168.1.20:8081", "errno": 0, "seconds": 0.002, "proven": True, "error": "", "expires": None}


def seen(found: Finding) -> tuple[str, str, str]:
    return found.result, found.text, found.fix


def joined(state: Path) -> None:
    (state / "node" / "identity").mkdir(parents=True)
    (state / "node" / "identity" / "identity.json").write_text("{}")


def dialling(
    state: Path, reach: dict[str, int], tools: Mapping[str, str | None], **examined: Any
) -> tuple[HostProbe, list[Any]]:
    """Return a Mac, and the addresses to which it connects."""
    here, dialled = pretended(state, tools, **examined), list[tuple[str, int]]()

    def dial(host: str, port: int) -> int:
        dialled.append((host, port))
        return reach.get(host, 61)

    return HostProbe(here.session, here.platform, here.environ, here.run, dial, here.root, here.get_power), dialled


def free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


GATEWAY, NEAR = ("192.168.1.1", 53), [(f"192.168.1.{number}", 8081) for number in (20, 21)]
ARP = {"/usr/sbin/arp -an": "".join(f"? (192.168.1.{number}) at a4:b1:c1 on en0\n" for number in (20, 21, 22))}


@pytest.mark.parametrize(
    ("reach", "tools", "dialled", "text", "result"),
    [
        ({}, ARP, [*NEAR, GATEWAY], "gateway: answers; 192.168.1.20: answers, 192.168.1.21: answers", "ok"),
        (
            {"192.168.1.20": -1},
            ARP,
            [*NEAR, GATEWAY],
            "gateway: answers; 192.168.1.20: no answer, 192.168.1.21: answers",
            "ok",
        ),
        (
            {"192.168.1.20": 1, "192.168.1.21": 51},
            ARP,
            [*NEAR, GATEWAY],
            "gateway: answers; 192.168.1.20: errno 1, 192.168.1.21: errno 51",
            "warn",
        ),
        (
            {},
            {**ARP, "/sbin/route -n get default": None},
            NEAR,
            "gateway: none; 192.168.1.20: answers, 192.168.1.21: answers",
            "ok",
        ),
    ],
)
def test_the_gateway_and_two_neighbours_are_dialled(
    tmp_path: Path, reach: dict[str, int], tools: dict[str, str | None], dialled: list[Any], text: str, result: str
):
    here, found = dialling(tmp_path, reach, tools)
    assert seen(checks.check_local_network(here))[:2] == (result, text)
    assert found == dialled


@pytest.mark.parametrize(
    ("errno", "dialled", "text"),
    [
        (0, [GATEWAY], "gateway: answers; 192.168.1.20:8081: answers"),
        (
            None,
            [*NEAR, GATEWAY],
            "gateway: answers; 192.168.1.20:8081: no answer, 192.168.1.20: answers, 192.168.1.21: answers",
        ),
    ],
)
def test_neighbours_are_dialled_only_where_no_known_coordinator_answers(
    tmp_path: Path, errno: int | None, dialled: list[Any], text: str
):
    joined(tmp_path)
    here, found = dialling(tmp_path, {}, ARP, dialled=[{**PEER, "errno": errno}])
    assert seen(checks.check_local_network(here))[:2] == ("ok", text)
    assert found == dialled


@pytest.mark.parametrize(
    ("reach", "result", "text"),
    [
        ({"192.168.1.20": 0}, "ok", "gateway: answers; 192.168.1.20: answers"),
        ({"192.168.1.20": 65}, "fail", "gateway: answers; 192.168.1.20: errno 65"),
        ({"192.168.1.20": -1}, "warn", "gateway: answers; 192.168.1.20: no answer"),
        ({"192.168.1.20": 65, "192.168.1.1": -1}, "warn", "gateway: no answer; 192.168.1.20: errno 65"),
    ],
)
def test_check_local_network_reports_which_peers_answered(
    tmp_path: Path, reach: dict[str, int], result: str, text: str
):
    found = checks.check_local_network(pretended(tmp_path, reach=reach))
    assert (found.result, found.text.endswith(text)) == (result, True), found
    assert (result == "fail") is found.text.startswith("macOS blocks Terminal from the local network (errno 65)")


def test_check_local_network_without_other_machines_is_not_applicable(tmp_path: Path):
    found = checks.check_local_network(pretended(tmp_path, {"/usr/sbin/arp -an": ""}))
    assert seen(found)[:2] == ("not here", "gateway: answers; no other machine of the local network is known")


class Altering(socket.socket):
    """Socket that sends another query than the one that the check expects."""

    def sendto(self, data: bytes, address: tuple[str, int]) -> int:  # type: ignore[override]
        return super().sendto(data + b"x", address)


def test_check_bonjour_receives_its_own_query_or_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "BONJOUR_PORT", free_port())
    heard = checks.check_bonjour(pretended(tmp_path))
    assert heard.result in ("ok", "warn")
    if heard.result == "ok":
        assert heard.text == "a query to Bonjour's group returns"
        monkeypatch.setattr(checks, "MULTICAST_TIMEOUT_SECONDS", -1.0)
        lost = checks.check_bonjour(pretended(tmp_path))
        assert (lost.result, lost.text) == ("warn", "a query to Bonjour's group is lost")
        monkeypatch.setattr(checks, "MULTICAST_TIMEOUT_SECONDS", 0.15)
        with monkeypatch.context() as patch:
            patch.setattr("socket.socket", Altering)
            assert checks.check_bonjour(pretended(tmp_path)).result == "warn", "only another query returns"
        assert "cluster join HOST:8081 --token-file FILE" in lost.fix
    monkeypatch.setitem(checks.BONJOUR_GROUPS, socket.AF_INET, "127.0.0.1")
    found = checks.check_bonjour(pretended(tmp_path))
    assert (found.result, found.text[:22]) == ("warn", "multicast does not wor")


class Blocked(socket.socket):
    """Socket of a process that local network privacy blocks. It records all datagrams and their family."""

    sent: ClassVar[list[tuple[socket.AddressFamily, bytes]]] = []

    def sendto(self, data: bytes, address: tuple[str, int]) -> int:  # type: ignore[override]
        self.sent.append((self.family, data))
        raise OSError(65, "No route to host")


def test_check_bonjour_names_a_blocked_network_only_on_a_mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checks, "BONJOUR_PORT", free_port())
    monkeypatch.setattr("socket.socket", Blocked)
    mac, other = pretended(tmp_path), pretended(tmp_path, platform="linux")
    for here, text, fix in (
        (mac, "multicast is blocked (errno 65)", "see the check local-network; Bonjour is optional: "),
        (other, "multicast does not work: No route to host", "Bonjour is optional: "),
    ):
        found = checks.check_bonjour(replace(here, list_addresses=list[str]))
        if "multicast does not work: No such device" in found.text:
            pytest.skip("this machine has no multicast")
        assert (found.result, found.text, found.fix.startswith(fix)) == ("warn", text, True)
    assert [family for family, _ in Blocked.sent] == [socket.AF_INET] * 2, "without an address, IPv4 is used"
    assert len({data for _, data in Blocked.sent}) == 2, "each query differs from those of other machines"


def test_check_bonjour_shares_the_port_with_the_systems_responder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as responder:
        responder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        responder.bind(("", 0))
        monkeypatch.setattr(checks, "BONJOUR_PORT", responder.getsockname()[1])
        assert "in use" not in checks.check_bonjour(pretended(tmp_path)).text


def test_check_bonjour_uses_ipv6_where_no_address_is_ipv4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    addresses = [address for address in list_addresses() if ":" in address]
    if not addresses:
        pytest.skip("this machine has no IPv6 address on a network")
    monkeypatch.setattr(checks, "BONJOUR_PORT", free_port())
    monkeypatch.setitem(checks.BONJOUR_GROUPS, socket.AF_INET, "127.0.0.1")
    here = pretended(tmp_path)
    assert checks.check_bonjour(replace(here, list_addresses=lambda: addresses)).result == "ok"
    assert checks.check_bonjour(replace(here, list_addresses=lambda: [*addresses, "10.0.0.2"])).result == "warn"


@pytest.mark.parametrize(
    ("environ", "result", "text"),
    [
        ({"PATH": "/bin"}, "ok", "no proxy is set"),
        ({"HTTP_PROXY": "http://p"}, "warn", "HTTP_PROXY is set"),
        ({"https_proxy": "http://p", "ALL_PROXY": "http://p"}, "warn", "HTTPS_PROXY, ALL_PROXY is set"),
        ({"HTTP_PROXY": "http://p", "no_proxy": "*"}, "ok", "HTTP_PROXY is set, with NO_PROXY"),
    ],
)
def test_a_proxy_without_exceptions_is_a_warning(tmp_path: Path, environ: dict[str, str], result: str, text: str):
    found = checks.check_proxy(pretended(tmp_path, environ=environ))
    assert (found.result, found.text) == (result, text)
    assert ("NO_PROXY" in found.fix) is (result == "warn")
