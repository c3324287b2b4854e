"""Entry of the Mac check about local network privacy, with a LAN whose machines answer, refuse or are blocked."""

import errno
from collections.abc import Callable

import pytest

from deploy import mac_network
from deploy.outcome import Outcome, ToolError

ROUTE = "   route to: default\n    gateway: 192.168.1.1\n  interface: en0\n"
ARP = """? (192.168.1.1) at a4:0:0:0:0:1 on en0 ifscope [ethernet]
? (192.168.1.255) at ff:ff:ff:ff:ff:ff on en0 ifscope [ethernet]
? (224.0.0.251) at 1:0:5e:0:0:fb on en0 ifscope permanent [ethernet]
? (192.168.1.7) at (incomplete) on en0 ifscope [ethernet]
? (192.168.1.9) at a4:0:0:0:0:9 on en0 ifscope [ethernet]
"""
Check = Callable[..., tuple[Outcome, list[tuple[str, int]]]]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Check:
    """Return a function that runs the entry with an errno of each machine, and returns the tried addresses as well."""

    def run(errnos: dict[str, int], peer: str = "", route: str | None = ROUTE, arp: str | None = ARP):
        tried = list[tuple[str, int]]()

        def run_tool(*command: str) -> str:
            output = route if command[0] == "/sbin/route" else arp
            if output is None:
                raise ToolError(f"{command[0]}: not found")
            return output

        class Line:
            def close(self) -> None:
                pass

        def connect(address: tuple[str, int], timeout: float) -> Line:
            tried.append(address)
            if code := errnos.get(address[0], 0):
                raise TimeoutError if code == errno.ETIMEDOUT else OSError(code, "no")
            return Line()

        monkeypatch.setattr(mac_network, "run_tool", run_tool)
        monkeypatch.setattr(mac_network.socket, "create_connection", connect)
        monkeypatch.setenv(mac_network.PEER, peer)
        return mac_network.check_local_network(), tried

    return run


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (0, "pass"),
        (errno.ECONNREFUSED, "pass"),
        (mac_network.BLOCKED_ERRNO, "fail"),
        (errno.ETIMEDOUT, "skip"),
        (errno.ENETDOWN, "skip"),
    ],
)
def test_another_machine_that_answers_or_refuses_is_not_blocked(check: Check, code: int, status: str):
    outcome, tried = check({"192.168.1.9": code})
    assert tried == [("192.168.1.1", 53), ("192.168.1.9", 8081)], "neither the gateway nor a group is the other machine"
    assert outcome.status == status, outcome.text
    assert ("local network privacy" in outcome.text) is (status == "fail")


def test_a_named_machine_takes_the_place_of_a_neighbour(check: Check):
    outcome, tried = check({"10.0.0.5": errno.ECONNREFUSED}, peer="10.0.0.5:22")
    assert (outcome.status, tried) == ("pass", [("192.168.1.1", 53), ("10.0.0.5", 22)])


def test_without_a_route_or_another_machine_nothing_is_known(check: Check):
    assert check({}, route=None)[0].status == "skip"
    for arp in (None, ARP[: ARP.index("? (192.168.1.9)")]):
        outcome, tried = check({}, arp=arp)
        assert (outcome.status, tried) == ("skip", [("192.168.1.1", 53)])
        assert f"set {mac_network.PEER}=HOST:PORT" in outcome.text
