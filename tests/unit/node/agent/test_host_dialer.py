"""The address of a host that is used, on both event loops, with real sockets of loopback."""

import asyncio
import errno
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Generator
from contextlib import ExitStack
from typing import Any

import pytest

from host.event_loop import run_event_loop
from node.agent.host_dialer import ResolvedAddress, dial_addresses, dial_host

Run = Callable[[Coroutine[Any, Any, Any]], Any]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have one address of loopback")


@pytest.fixture(params=[asyncio.run, run_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param


@pytest.fixture
def port() -> Generator[int]:
    """Return a port at which 127.0.0.1 and 127.0.0.4 answer, 127.0.0.2 refuses and 127.0.0.3 is silent."""
    with ExitStack() as held:
        server = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        number: int = server.getsockname()[1]
        held.enter_context(socket.create_server(("127.0.0.4", number)))
        silent = held.enter_context(socket.create_server(("127.0.0.3", number), backlog=0))
        for _ in range(4):  # with a full backlog, the kernel ignores connections
            line = held.enter_context(socket.socket())
            line.setblocking(False)
            line.connect_ex(silent.getsockname())
        yield number


def resolved(port: int, *hosts: int) -> list[ResolvedAddress]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.0.0.{host}", port)) for host in hosts]


async def _dial(addresses: list[ResolvedAddress], seconds: float = 5.0) -> str:
    with await asyncio.wait_for(dial_addresses(addresses), seconds) as line:
        assert not line.getblocking()
        return line.getpeername()[0]


@pytest.mark.parametrize(
    ("hosts", "used"),
    [((1, 4), 1), ((2, 1), 1), ((3, 1), 1), ((3, 2, 4), 4)],
    ids=["the first", "after a refusal", "beside a silent one", "after both"],
)
def test_the_first_address_that_answers_is_used(run: Run, port: int, hosts: tuple[int, ...], used: int) -> None:
    assert run(_dial(resolved(port, *hosts))) == f"127.0.0.{used}"


def test_the_error_of_the_first_address_is_raised_if_all_fail(run: Run, port: int) -> None:
    no_family = (99, socket.SOCK_STREAM, 6, "", ("127.0.0.1", port))
    with pytest.raises(ConnectionRefusedError):
        run(_dial([*resolved(port, 2), no_family]))
    with pytest.raises(OSError, match="not supported") as raised:
        run(_dial([no_family, *resolved(port, 2)]))
    assert raised.value.errno == errno.EAFNOSUPPORT


def test_silent_addresses_take_the_time_of_the_caller_and_no_socket_is_left(run: Run, port: int) -> None:
    async def dial() -> None:
        before = len(os.listdir("/proc/self/fd"))
        with pytest.raises(TimeoutError):
            await _dial(resolved(port, 3, 3), 0.4)
        assert await _dial(resolved(port, 3, 4)) == "127.0.0.4"
        await asyncio.sleep(0)
        assert len(os.listdir("/proc/self/fd")) == before

    run(dial())


def test_a_host_name_is_resolved(run: Run, port: int) -> None:
    async def dial() -> str:
        with await dial_host("localhost", port) as line:
            return line.getpeername()[0]

    assert run(dial()) == "127.0.0.1"
    with pytest.raises(OSError, match=r"."):
        run(dial_host("no-such-host.invalid", port))
