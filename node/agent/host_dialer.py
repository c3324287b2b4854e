"""Connection to a host at the first of its addresses that answers (RFC 8305).

asyncio has this as an option of `create_connection`, uvloop has not.
"""

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

ADDRESS_DELAY_SECONDS = 0.25
"""Seconds after which the next address is tried in parallel with those before it."""

ResolvedAddress = tuple[int, int, int, str, Any]
"""Family, type, protocol, canonical name and address, as `socket.getaddrinfo` returns them."""


async def dial_host(host: str, port: int) -> socket.socket:
    """Connect to a host by TCP, and return the non-blocking socket. The caller limits the time.

    The addresses of the host are tried in the order of the resolver (`dial_addresses`). Raise `OSError` if the host has
    no address or all fail. Raise `UnicodeError` for an invalid host name, `OverflowError` for an impossible port.
    """
    return await dial_addresses(await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM))


async def dial_addresses(addresses: Sequence[ResolvedAddress]) -> socket.socket:
    """Connect to at least one address, and return the non-blocking socket of the first that answers.

    An address is tried `ADDRESS_DELAY_SECONDS` after the one before it, or at once after a failure. Raise the `OSError`
    of the first address if all fail.
    """
    waiting = list(enumerate(addresses))
    running: dict[asyncio.Task[socket.socket], int] = {}
    errors: dict[int, OSError] = {}
    try:
        while waiting or running:
            if waiting:
                number, (family, kind, protocol, _, address) = waiting.pop(0)
                running[asyncio.ensure_future(_dial(family, kind, protocol, address))] = number
            delay = ADDRESS_DELAY_SECONDS if waiting else None
            done, _ = await asyncio.wait(running, timeout=delay, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                if not isinstance(error := task.exception(), OSError):
                    del running[task]
                    return task.result()
                errors[running.pop(task)] = error
    finally:
        for task in running:
            task.cancel()
            task.add_done_callback(_close_unused)
    raise errors[0]


async def _dial(family: int, kind: int, protocol: int, address: Any) -> socket.socket:
    line = socket.socket(family, kind, protocol)
    try:
        line.setblocking(False)
        await asyncio.get_running_loop().sock_connect(line, address)
    except BaseException:
        line.close()
        raise
    return line


def _close_unused(task: asyncio.Task[socket.socket]) -> None:
    """Close the socket of an address that answered at the same time as another one."""
    if not task.cancelled() and task.exception() is None:
        task.result().close()
