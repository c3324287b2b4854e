"""Entries of the Mac check about sockets, child processes and the local network."""

import asyncio
import contextlib
import errno
import os
import re
import socket
import subprocess
import sys
import time

from deploy.outcome import ROOT, Outcome, ToolError, create_outcome, create_skip, run_tool
from host.bonjour_announce import Announcement
from host.local_names import list_addresses
from node.agent import discovery
from node.engine.process.main import encode_settings
from node.settings import NodeSettings
from wire.bonjour_record import BonjourRecord, build_instance_name
from wire.codec import Splitter, decode, encode
from wire.frames import Ping, Pong
from wire.identity import SERVICE_TYPE
from wire.link.endpoint import MAX_BUFFERED_BYTES, TCP_NOTSENT_LOWAT

PEER = "MACPOOL_CHECK_PEER"
"""Environment variable with HOST:PORT of another machine on the LAN. Without it, the check chooses one."""
BLOCKED_ERRNO = 65
"""EHOSTUNREACH on macOS: the error of a connection that local network privacy blocks."""
CONNECT_TIMEOUT_SECONDS = 3.0
"""Timeout of a connection, in seconds."""
ANSWER_TIMEOUT_SECONDS = 10.0
"""Maximum wait for an answer, in seconds."""
NONCE = 7
"""Number in the ping and in its answer."""


def check_notsent_lowat() -> Outcome:
    """Check that TCP_NOTSENT_LOWAT, which every link sets, can be set on a connection and is read back unchanged."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as line:
        try:
            line.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, MAX_BUFFERED_BYTES)
            kept = line.getsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT)
        except OSError as error:
            return create_outcome(good=False, text=f"option {TCP_NOTSENT_LOWAT:#x}: {error}")
    named = getattr(socket, "TCP_NOTSENT_LOWAT", TCP_NOTSENT_LOWAT)
    says = f"option {TCP_NOTSENT_LOWAT:#x} (Python: {named:#x}), set {MAX_BUFFERED_BYTES}, read {kept}"
    return create_outcome(kept == MAX_BUFFERED_BYTES and named == TCP_NOTSENT_LOWAT, says)


def check_child_eof() -> Outcome:
    """Check that an engine process answers a ping, and ends within 1 s after its socket is closed.

    The process inherits the socket, as an engine does from the agent. Raise `WireError` if the process sends an invalid
    frame.
    """
    ours, theirs = socket.socketpair()
    with contextlib.closing(ours):
        child = subprocess.Popen(
            [sys.executable, "-m", "node.engine.process.main", "--socket", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=ROOT,
        )
        theirs.close()
        try:
            ours.settimeout(ANSWER_TIMEOUT_SECONDS)
            ours.sendall(encode_settings(NodeSettings()) + encode(Ping(NONCE)))
            answered = _receive_pong(ours)
            ours.close()
            began = time.monotonic()
            child.wait(ANSWER_TIMEOUT_SECONDS)
        except (OSError, subprocess.TimeoutExpired) as error:
            return create_outcome(good=False, text=f"the engine did not answer or did not end: {error}")
        finally:
            child.kill()
            child.wait()
    took = time.monotonic() - began
    return create_outcome(
        answered and took < 1.0, f"answered: {answered}, gone {took * 1000:.0f} ms after the end of its socket"
    )


def _receive_pong(line: socket.socket) -> bool:
    """Read until the answer to the ping. Return False if the socket ends first."""
    splitter = Splitter()
    while piece := line.recv(65536):
        for tag, body in splitter.feed(piece):
            frame = decode(tag, body)
            if isinstance(frame, Pong):
                return frame.nonce == NONCE
    return False


def check_local_network() -> Outcome:
    """Check that local network privacy does not block a connection to another machine of the LAN.

    The gateway is never blocked, and is tried for comparison. The entry is skipped if no other machine answers. Raise
    ValueError if the variable `PEER` does not end with a port number.
    """
    try:
        gateway = re.search(r"gateway:\s+(\S+)", run_tool("/sbin/route", "-n", "get", "default"))
    except ToolError as error:
        return create_skip(f"no default route: {error}")
    first = _connect(gateway[1], 53) if gateway else None
    peer = os.environ.get(PEER) or _find_neighbour(gateway[1] if gateway else "")
    if peer is None:
        return create_skip(f"gateway: {_describe_result(first)}; no other machine is known: set {PEER}=HOST:PORT")
    host, _, port = peer.rpartition(":")
    second = _connect(host, int(port))
    says = f"gateway: {_describe_result(first)}; another machine: {_describe_result(second)}"
    if second == BLOCKED_ERRNO:
        says += (
            "; errno 65 is local network privacy: run it from Terminal or over SSH, or allow the program under System "
            "Settings > Privacy & Security > Local Network"
        )
    elif second not in (0, errno.ECONNREFUSED):
        return create_skip(f"{says}; name a machine that answers: {PEER}=HOST:PORT")
    return create_outcome(second != BLOCKED_ERRNO, says)


def _find_neighbour(gateway: str) -> str | None:
    """Return HOST:PORT of a machine in the ARP table other than the gateway; None if there is none.

    The machine need not listen on the port, because a refusal is an answer.
    """
    with contextlib.suppress(ToolError):
        for address in re.findall(r"\((\d+\.\d+\.\d+\.\d+)\) at [0-9a-f]+:", run_tool("/usr/sbin/arp", "-an")):
            if address != gateway and not address.endswith(".255") and int(address.partition(".")[0]) < 224:
                return f"{address}:8081"
    return None


def _connect(host: str, port: int) -> int:
    """Connect, and return the errno, or 0 for success."""
    try:
        socket.create_connection((host, port), CONNECT_TIMEOUT_SECONDS).close()
    except TimeoutError:
        return errno.ETIMEDOUT
    except OSError as error:
        return error.errno or errno.EIO
    return 0


def _describe_result(code: int | None) -> str:
    if code is None:
        return "none"
    return "answered" if code in (0, errno.ECONNREFUSED) else f"errno {code} ({os.strerror(code)})"


def check_bonjour() -> Outcome:
    """Check that Macpool's search and `dns-sd -B` find an announced Bonjour record, and that `dns-sd` sees its end.

    The entry is skipped on a machine without a LAN address. Raise OSError if `dns-sd` cannot be started.
    """
    return asyncio.run(_run_bonjour())


async def _run_bonjour() -> Outcome:
    if not list_addresses():
        return create_skip("this Mac has no address that another machine could reach")
    name, identity = "mac-check", os.urandom(4).hex()
    record = build_instance_name(name, identity)
    browser = await asyncio.create_subprocess_exec(
        "/usr/bin/dns-sd", "-B", SERVICE_TYPE.removesuffix(".local."), "local.", stdout=asyncio.subprocess.PIPE
    )
    announcement = Announcement(BonjourRecord("new", version="check"), name, identity, 9)
    announcement.start()
    try:
        label = record.removesuffix("." + SERVICE_TYPE)
        added = await _wait_for_event(browser, "Add", label)
        found = any(one.name == label for one in await discovery.find_services(ANSWER_TIMEOUT_SECONDS, role="new"))
        await announcement.close()
        removed = await _wait_for_event(browser, "Rmv", label)
    finally:
        await announcement.close()
        with contextlib.suppress(ProcessLookupError):
            browser.kill()
        await browser.wait()
    return create_outcome(
        added and found and removed, f"found by dns-sd: {added}, found by macpool: {found}, goodbye seen: {removed}"
    )


async def _wait_for_event(browser: asyncio.subprocess.Process, event: str, label: str) -> bool:
    """Read lines until one reports this event of the record. Return False after `ANSWER_TIMEOUT_SECONDS`."""
    assert browser.stdout is not None  # noqa: S101  it was asked for
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ANSWER_TIMEOUT_SECONDS):
            while line := (await browser.stdout.readline()).decode(errors="replace"):
                if event in line and label in line:
                    return True
    return False
