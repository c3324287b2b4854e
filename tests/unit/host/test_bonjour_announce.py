"""Announcements with a stand-in for zeroconf: their records, and changes of addresses and errors."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from structlog.testing import capture_logs
from zeroconf import IPVersion

from host import bonjour_announce
from host.bonjour_announce import Announcement
from wire.bonjour_record import BonjourRecord, build_instance_name, to_txt
from wire.identity import SERVICE_TYPE

RECORD = BonjourRecord("coord", "c1", "0.1.0", "ab" * 8)
CLUSTER = "0123456789abcdef"


class Network:
    """Addresses of this machine and the calls of zeroconf, of which `failures` raise an error first."""

    def __init__(self) -> None:
        self.addresses: list[str] | None = ["10.0.0.7"]
        self.failures = 0
        self.calls: list[tuple[Any, ...]] = []
        self.records: list[Any] = []

    def read_addresses(self) -> list[str]:
        if self.addresses is None:
            raise OSError("no buffer space")
        return list(self.addresses)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110  an announcement has no event for its withdrawals
                await asyncio.sleep(0)

    def count(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    made = Network()

    class Zeroconf:
        def __init__(self, interfaces: list[str], ip_version: IPVersion) -> None:
            made.calls.append(("open", interfaces, ip_version))

        async def async_register_service(self, record: Any, *, allow_name_change: bool) -> Any:
            made.calls.append(("register", allow_name_change))
            made.records.append(record)
            if made.failures:
                made.failures -= 1
                raise RuntimeError("the loop of zeroconf is closed")
            return asyncio.sleep(0)

        async def async_unregister_all_services(self) -> None:
            made.calls.append(("unregister",))

        async def async_close(self) -> None:
            made.calls.append(("close",))

    monkeypatch.setattr(bonjour_announce, "AsyncZeroconf", Zeroconf)
    monkeypatch.setattr(bonjour_announce, "read_addresses", made.read_addresses)
    return made


def announce(seconds: float = 0.0) -> Announcement:
    announced = Announcement(RECORD, "lab", CLUSTER, 8099, look_every=seconds)
    announced.start()
    return announced


async def test_a_record_has_the_port_the_fields_and_every_address(network: Network):
    network.addresses = ["10.0.0.7", "fd00::7"]
    announced = announce()
    await asyncio.wait_for(announced.ready.wait(), 10)
    (record,) = network.records
    instance = build_instance_name("lab", CLUSTER)
    assert (record.type, record.name, record.port, record.server) == (
        SERVICE_TYPE,
        instance,
        8099,
        f"macpool-{instance.removesuffix('.' + SERVICE_TYPE).rpartition('-')[2]}.local.",
    )
    assert record.parsed_addresses() == ["10.0.0.7", "fd00::7"]
    assert record.properties == {key.encode(): value.encode() for key, value in to_txt(RECORD).items()}
    assert network.calls == [("open", ["10.0.0.7"], IPVersion.V4Only), ("register", True)]
    await announced.close()
    assert network.calls[2:] == [("unregister",), ("close",)]
    assert not announced.ready.is_set()


async def test_a_machine_without_ipv4_is_announced_over_ipv6(network: Network):
    network.addresses = ["fd00::7"]
    announced = announce()
    await asyncio.wait_for(announced.ready.wait(), 10)
    assert network.calls[0] == ("open", ["fd00::7"], IPVersion.V6Only)
    await announced.close()


async def test_only_other_addresses_are_announced_again_after_the_old_ones_are_withdrawn(network: Network):
    announced = announce()
    await asyncio.wait_for(announced.ready.wait(), 10)
    for _ in range(5):
        await asyncio.sleep(0)
    assert network.count("open") == 1
    network.addresses = None
    for _ in range(5):
        await asyncio.sleep(0)
    assert (network.count("open"), announced.ready.is_set()) == (1, True), "unknown addresses are those of before"
    network.addresses = ["10.0.0.8", "10.0.0.7"]
    await network.until(lambda: network.count("register") == 2)
    network.addresses.reverse()
    await network.until(lambda: network.count("register") == 3)
    assert [record.parsed_addresses() for record in network.records[1:]] == [
        ["10.0.0.8", "10.0.0.7"],
        ["10.0.0.7", "10.0.0.8"],
    ], "the best address is the first one"
    assert [call[0] for call in network.calls[:6]] == ["open", "register", "unregister", "close", "open", "register"]
    network.addresses = []
    await network.until(lambda: network.count("close") == 3)
    assert not announced.ready.is_set()
    await announced.close()
    calls = len(network.calls)
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(network.calls) == calls, "nothing follows the end"


async def test_a_failed_announcement_is_closed_tried_again_and_logged_once(network: Network):
    network.failures = 3
    with capture_logs() as logs:
        announced = announce()
        await asyncio.wait_for(announced.ready.wait(), 10)
        assert (network.count("open"), network.count("close")) == (4, 3)
        network.failures, network.addresses = 1, ["10.0.0.8"]
        await network.until(lambda: network.count("register") == 6)
        await announced.close()
    texts = [entry["error"] for entry in logs if entry["event"] == "bonjour unavailable"]
    assert texts == ["the loop of zeroconf is closed"] * 2, "once for all errors before a success"
