"""Both ends of Bonjour on the loopback interface."""

import asyncio
import fcntl
import itertools
import socket
import struct
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import ifaddr
import psutil
import pytest

from host.bonjour_announce import Announcement
from node.agent.discovery import DiscoveredService, find_first_proven, find_services, locate_coordinator
from node.agent.enrollment import enroll, parse_address
from node.agent.identity import store_address
from node.hub.serving.addresses import choose_hosts
from tests.support.cluster.enrolment import HARDWARE, opened
from wire.bonjour_record import BonjourRecord, shorten_cluster_id

F = TypeVar("F")
LOOPBACK = ["127.0.0.1"]


@pytest.fixture(autouse=True)
def alone(tmp_path_factory: pytest.TempPathFactory) -> Generator[None]:
    """Run one search at a time in all workers: a responder leaves out answers that it has just given to another one."""
    with (tmp_path_factory.getbasetemp().parent / "multicast.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def multicast_works() -> bool:
    """Return whether a multicast datagram comes back on the loopback interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.settimeout(1.0)
        listener.bind(("", 0))
        group = socket.inet_aton("224.0.0.251") + socket.inet_aton("127.0.0.1")
        try:
            listener.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
            listener.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
            listener.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, struct.pack("b", 1))
            listener.sendto(b"?", ("224.0.0.251", listener.getsockname()[1]))
            return listener.recv(1) == b"?"
        except OSError:
            return False


MULTICAST = multicast_works()


def needs_multicast(test: F) -> F:
    """Skip a test where multicast does not work, and mark it as slow, because registering takes seconds."""
    skip: Any = pytest.mark.skipif(not MULTICAST, reason="no multicast on the loopback interface here")
    return pytest.mark.slow(skip(test))


def announcement(cluster: str, name: str = "lab", port: int = 8081) -> Announcement:
    advert = BonjourRecord("coord", shorten_cluster_id(cluster), "0.1.0", "ab" * 8)
    return Announcement(advert, name, cluster, port, interfaces=LOOPBACK, look_every=0.05)


def test_addresses_of_ipv6_are_in_brackets() -> None:
    found = DiscoveredService("lab", "c", ("10.0.0.2", "fd00::2", "fe80::1%en0"), 8081)
    assert found.candidates == ("10.0.0.2:8081", "[fd00::2]:8081", "[fe80::1%en0]:8081")
    assert [parse_address(candidate) for candidate in found.candidates] == [(ip, 8081) for ip in found.addresses]


@needs_multicast
async def test_a_coordinator_is_found_until_its_announcement_ends() -> None:
    cluster = str(uuid4())
    announced = announcement(cluster)
    announced.start()
    await asyncio.wait_for(announced.ready.wait(), 20)
    (found,) = await find_services(10, cluster, interfaces=LOOPBACK)
    hint = shorten_cluster_id(cluster)
    assert found == DiscoveredService(f"lab-{hint[:6]}", hint, ("127.0.0.1",), 8081, 1, "0.1.0", "ab" * 8)
    assert found.candidates == ("127.0.0.1:8081",)
    await announced.close()
    assert await find_services(0.5, cluster, interfaces=LOOPBACK) == []


@needs_multicast
async def test_two_clusters_are_both_found_and_distinguished() -> None:
    first, second = str(uuid4()), str(uuid4())
    both = [announcement(first), announcement(second, "lab", 8082)]
    for announced in both:
        announced.start()
    for announced in both:
        await asyncio.wait_for(announced.ready.wait(), 20)
    seen = {found.cluster: found.port for found in await find_services(10, interfaces=LOOPBACK)}
    assert {shorten_cluster_id(first): 8081, shorten_cluster_id(second): 8082}.items() <= seen.items()
    assert [found.port for found in await find_services(10, second, interfaces=LOOPBACK)] == [8082]
    for announced in both:
        await announced.close()


@needs_multicast
async def test_two_announcements_of_one_name_are_both_found() -> None:
    cluster = str(uuid4())
    for announced in (both := [announcement(cluster), announcement(cluster, port=8082)]):
        announced.start()
        await asyncio.wait_for(announced.ready.wait(), 20)
    found = await find_services(10, cluster, interfaces=LOOPBACK)
    assert sorted(one.port for one in found) == [8081, 8082]
    assert len({one.name for one in found}) == 2
    for announced in both:
        await announced.close()


@needs_multicast
async def test_a_mac_that_has_not_joined_announces_that_it_could() -> None:
    machine = uuid4().hex
    announced = Announcement(BonjourRecord("new"), "air", machine, 9, interfaces=LOOPBACK)
    announced.start()
    await asyncio.wait_for(announced.ready.wait(), 20)
    name = f"air-{machine[:6]}"
    assert (name, "") in {
        (found.name, found.cluster) for found in await find_services(10, role="new", interfaces=LOOPBACK)
    }
    assert name not in {found.name for found in await find_services(0.3, interfaces=LOOPBACK)}
    await announced.close()


@needs_multicast
async def test_a_coordinator_that_moved_is_found_and_proves_itself(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door, opened(tmp_path / "liar") as liar:
        identity = await enroll(
            door.address,
            door.tokens.create(),
            name="a",
            machine="m",
            hardware=HARDWARE,
            folder=tmp_path / "n",
            on_code=lambda code, seconds: None,
        )
        moved = store_address(identity, liar.address)
        assert await locate_coordinator(moved, 1, interfaces=LOOPBACK) == door.address
        forgotten = replace(identity, addresses=())
        assert await locate_coordinator(forgotten, 0.3, interfaces=LOOPBACK) is None
        both = [announcement(identity.cluster, "liar", liar.port), announcement(identity.cluster, "lab", door.port)]
        for announced in both:
            announced.start()
            await asyncio.wait_for(announced.ready.wait(), 20)
        assert await locate_coordinator(forgotten, 10, interfaces=LOOPBACK) == door.address
        for announced in both:
            await announced.close()


@needs_multicast
async def test_no_socket_stays_open_when_it_closes_while_its_addresses_change() -> None:
    process, addresses = psutil.Process(), list(LOOPBACK)
    before = len(process.net_connections("udp"))
    announced = Announcement(BonjourRecord("new"), "air", uuid4().hex, 9, interfaces=addresses, look_every=0.01)
    announced.start()
    await asyncio.wait_for(announced.ready.wait(), 20)
    assert len(process.net_connections("udp")) > before
    addresses.clear()
    async with asyncio.timeout(5):
        while announced.ready.is_set():  # noqa: ASYNC110 - it has no event for the begin of a withdrawal
            await asyncio.sleep(0.001)
    await announced.close()
    assert len(process.net_connections("udp")) == before


async def test_no_address_means_no_record_and_no_error() -> None:
    announced = Announcement(BonjourRecord("coord"), "lab", str(uuid4()), 1, interfaces=[], look_every=0.01)
    announced.start()
    assert await find_services(0.1, interfaces=[]) == []
    await announced.close()


async def test_an_address_of_another_machine_is_logged_once_and_closes(capsys: pytest.CaptureFixture[str]) -> None:
    announced = Announcement(
        BonjourRecord("coord"), "lab", str(uuid4()), 1, interfaces=["192.0.2.250"], look_every=0.001
    )
    announced.start()
    await asyncio.sleep(0.1)
    assert await find_services(0.1, interfaces=["192.0.2.250"]) == []
    await announced.close()
    assert capsys.readouterr().out.count("bonjour unavailable") == 2


async def test_an_announcement_continues_after_the_system_could_not_list_its_addresses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, third = itertools.count(1), asyncio.Event()

    def list_adapters() -> list[ifaddr.Adapter]:
        if next(calls) < 3:
            raise OSError("no buffer space")
        third.set()
        return []

    monkeypatch.setattr(ifaddr, "get_adapters", list_adapters)
    announced = Announcement(BonjourRecord("coord"), "lab", str(uuid4()), 1, look_every=0.001)
    announced.start()
    await asyncio.wait_for(third.wait(), 5)
    await announced.close()
    assert capsys.readouterr().out.count("no buffer space") == 1


@needs_multicast
async def test_an_announcement_lasts_while_its_addresses_stay_or_cannot_be_listed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls, later = itertools.count(), asyncio.Event()

    def read() -> list[str]:
        number = next(calls)
        if number == 4:
            later.set()
        if number % 2 == 0:
            raise OSError("no buffer space")
        return LOOPBACK

    monkeypatch.setattr("host.bonjour_announce.read_addresses", read)
    announced = Announcement(BonjourRecord("coord"), "lab", str(uuid4()), 1, look_every=0.001)
    announced.start()
    await asyncio.wait_for(later.wait(), 20)
    assert announced.ready.is_set()
    await announced.close()
    logged = capsys.readouterr().out
    assert (logged.count("bonjour announced"), logged.count("bonjour unavailable")) == (1, 2), "before and after it"


async def test_a_search_is_empty_if_the_system_cannot_list_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def list_adapters() -> list[ifaddr.Adapter]:
        raise OSError("too many open files")

    monkeypatch.setattr(ifaddr, "get_adapters", list_adapters)
    assert await find_services(10) == []
    assert choose_hosts("127.0.0.1") == ("127.0.0.1",)


async def test_addresses_are_tried_side_by_side() -> None:
    hangs, tried = asyncio.Event(), list[str]()

    async def proven(address: str) -> bool:
        tried.append(address)
        if address == "hangs":
            await hangs.wait()
        return address == "right"

    assert await find_first_proven(["hangs", "wrong", "right", "late"], proven, stagger=0.001) == "right"
    assert tried == ["hangs", "wrong", "right"]
    tried.clear()
    assert await find_first_proven(["wrong", "wrong"], proven, stagger=5) is None
    assert tried == ["wrong"]
    assert await find_first_proven([], proven) is None
