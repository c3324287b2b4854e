"""The complete cluster port against peers that misbehave.

Each loses its own connection, with a reason in the log. The stream of an honest node continues token by token. Abuse of
enrolment is in test_enrolment.py.
"""

import asyncio
import ssl
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from coordinator.cli.commands import nodes as verbs
from coordinator.cluster.links import link_admission, link_server
from coordinator.cluster.links.link_server import MAX_UNLINKED
from coordinator.http.listen import open_listener
from coordinator.joining.rate_limit import RateLimit
from coordinator.tls.cluster_ca import ClusterCa
from node.agent.identity import NodeIdentity, create_authority_context, new_request, store_address, store_identity
from node.agent.machine_id import compute_machine_id
from tests.support.cluster.cluster_port import Ended, Line, Port, a_report, hello, opened, the_no
from tests.support.cluster.loopback_cluster import a_memory, a_model
from tests.support.processes import environment
from wire.codec import MAX_FRAME_BYTES, encode, split_into_fragments
from wire.frames import (
    Delta,
    Deltas,
    Denied,
    EnrollAuthority,
    EnrollStart,
    Finished,
    Fragment,
    Frame,
    Generate,
    GenerationParams,
    Goodbye,
    Hello,
    Message,
    Ping,
    Report,
    Welcome,
)
from wire.identity import PROTOCOL, NodeId
from wire.report import EngineState, Hardware
from wire.units import MIB

TIME_OF_A_STRANGER = 5.0


@pytest.fixture
async def port(tmp_path: Path) -> AsyncGenerator[Port]:
    async with opened(tmp_path) as made:
        yield made


# -- strangers ---------------------------------------------------------------------------------


async def test_the_wildcard_of_ipv6_takes_ipv4_as_well(tmp_path: Path) -> None:
    """`cluster join` is printed with an IPv4 address of the machine."""
    try:
        listener = open_listener("::1", 0)
    except OSError:
        pytest.skip("this system has no IPv6")
    with listener, pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", listener.getsockname()[1])
    async with opened(tmp_path, host="::") as made, made.undisturbed():  # over IPv4
        _, writer = await asyncio.open_connection("::1", made.number)
        writer.close()


async def test_garbage_instead_of_tls(port: Port) -> None:
    async with port.undisturbed():
        for noise in (b"GET / HTTP/1.1\r\n\r\n", bytes(70_000), b"\x16\x03\x01" + bytes(300)):
            reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
            writer.write(noise)
            async with asyncio.timeout(30):
                with suppress(ConnectionError):
                    await reader.read()
            writer.transport.abort()
    await port.until(lambda: port.said("no TLS handshake"), 12)


async def test_silent_or_slow_connection_is_closed_after_5_seconds(port: Port) -> None:
    async with port.undisturbed():
        began = time.monotonic()
        silent, slow = await port.dial(), await port.dial()
        known = await port.dial(port.member("mute"))
        dripping = asyncio.create_task(_drip(slow))
        assert the_no(await silent.ended()).reason == "too_slow"
        assert the_no(await slow.ended()).reason == "too_slow"
        await known.ended()
        assert TIME_OF_A_STRANGER - 0.5 < time.monotonic() - began < TIME_OF_A_STRANGER + 2
        dripping.cancel()
    assert port.said("no Hello within 5 s")


async def _drip(line: Line) -> None:
    for byte in encode(EnrollStart(PROTOCOL, bytes(100))):
        line.send(bytes([byte]))
        await asyncio.sleep(0.5)


async def test_connection_without_certificate_may_only_enroll(port: Port) -> None:
    async with port.undisturbed():
        for word in (b"\xff" * 50, encode(Ping(1)), encode(Generate(1, 1, "x", "tiny", (), GenerationParams(), 0))):
            line = await port.dial()
            line.send(word)
            assert the_no(await line.ended(30)).reason in ("bad_frame", "no_certificate")


async def test_the_coordinators_own_certificate_is_no_node(port: Port) -> None:
    context = create_authority_context(port.application.authority.ca)
    context.load_cert_chain(port.folder / "state" / "authority" / "coordinator.pem")
    with suppress(ssl.SSLError, ConnectionError):
        line = await port.dial(context)
        line.send(Hello(PROTOCOL, "coordinator", "x", "i", "m", "0", Hardware()))
        assert not [frame for frame in await line.ended(8) if isinstance(frame, Welcome)]
    assert not port.application.registry.pool.members


async def test_many_peers_without_certificate_keep_no_node_out(tmp_path: Path) -> None:
    """One address may have a quarter of MAX_UNLINKED. A machine that wants to join from there must retry until they
    have timed out; a node that shows its certificate need not."""
    async with opened(tmp_path, RateLimit(6000, 1000)) as port, port.undisturbed():
        crowd = [
            line
            for line in await asyncio.gather(*(_idle(port) for _ in range(2 * MAX_UNLINKED // 3)))
            if line is not None
        ]
        await port.until(lambda: port.said("strangers are connected"))
        late = await port.link(port.member("late"))
        assert await (await port.dial()).ended(30) == []
        ends = [the_no(frames).reason for line in crowd if (frames := await line.ended(12))]
        assert ends == ["too_slow"] * (MAX_UNLINKED // 4)
        await asyncio.wait_for(_enrolling(port), 30)
        late.send(a_report(1))


async def test_limit_of_unlinked_connections_excludes_certificates(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_server, "MAX_UNLINKED", -1)
    assert await (await port.dial()).ended() == []
    line = await port.link(port.member("known"))
    line.send(a_report(1))
    await port.until(lambda: "known" in [node.name for node in port.application.registry.build_view().nodes])


async def test_connections_with_a_certificate_are_not_counted_as_unlinked(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_server, "MAX_UNLINKED", 4)
    known = port.member("known")
    for _ in range(4):
        await port.dial(known)
    await asyncio.wait_for(_enrolling(port), 30)
    assert not port.said("strangers are connected")


async def _idle(port: Port) -> Line | None:
    try:
        return await port.dial()
    except OSError:
        return None


async def _enrolling(port: Port) -> None:
    """Retry as a node without a certificate does, until the coordinator answers."""
    while True:
        line = await port.dial()
        line.send(EnrollStart(PROTOCOL))
        with suppress(Ended):
            if isinstance(await line.next(), EnrollAuthority):
                return
        await asyncio.sleep(0.2)


# -- greetings ---------------------------------------------------------------------------------


async def test_the_name_must_be_that_of_the_certificate(port: Port) -> None:
    victim, thief = port.member("victim"), port.member("thief")
    async with port.undisturbed():
        link = await port.link(victim)
        line = await port.dial(thief)
        line.send(hello(victim))
        assert the_no(await line.ended()).reason == "identity"
        assert port.state(victim) == "ready"
        link.send(a_report(1))


async def test_a_newer_coordinator_is_proved_by_its_seal_alone(port: Port, tmp_path: Path) -> None:
    who, authority = port.member("studio"), port.application.authority
    marks = port.application.superseded
    stranger = ClusterCa(tmp_path / "stranger", time.time)
    for generation, seal in (
        (2**60, b""),
        (7, b"x" * 72),
        (7, authority.seal_generation(8)),
        (7, stranger.seal_generation(7)),
    ):
        line = await port.dial(who)
        line.send(hello(who, generation=generation, seal=seal))
        welcome = await line.until(Welcome)
        assert authority.is_sealed(welcome.generation, welcome.seal)
        line.close()
    assert marks == [], "a node's message cannot end the coordinator"
    line = await port.dial(who)
    line.send(hello(who, generation=7, seal=authority.seal_generation(7)))
    denied = the_no(await line.ended())
    assert (denied.reason, denied.final) == ("superseded", False)
    assert [(mark.generation, mark.node) for mark in marks] == [(7, "studio")]


@pytest.mark.parametrize(("protocol", "older"), [(0, "node"), (99, "coordinator")])
async def test_other_protocol_versions_name_the_side_to_update(port: Port, protocol: int, older: str) -> None:
    line = await port.dial(who := port.member("other"))
    line.send(hello(who, protocol=protocol))
    denied = the_no(await line.ended())
    assert (denied.reason, denied.final) == ("protocol", True)
    assert f"update macpool on the {older}" in denied.message


async def test_removed_node_is_denied_at_its_next_hello(port: Port) -> None:
    gone = port.member("gone")
    link = await port.link(gone)
    await port.until(lambda: port.state(gone) == "ready")
    port.application.nodes.administration.remove_node(gone.node)
    assert the_no(await link.ended()).reason == "removed"
    line = await port.dial(gone)
    line.send(hello(gone))
    denied = the_no(await line.ended())
    assert (denied.reason, denied.final) == ("removed", True)


async def test_a_copied_identity_on_another_machine_is_refused(port: Port) -> None:
    who = port.member("studio")
    link = await port.link(who)
    line = await port.dial(who)
    line.send(hello(who, machine="another", instance="clone"))
    assert the_no(await line.ended()).reason == "cloned"
    link.send(a_report(1))
    await port.until(lambda: port.state(who) == "ready")


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count every older link as broken, as after three seconds without a report."""
    monkeypatch.setattr(link_admission, "ALIVE_REPORT_AGE_SECONDS", 0.0)


async def test_a_second_process_with_a_nodes_identity_does_not_expel_the_first(port: Port) -> None:
    who = port.member("studio")
    first = await port.link(who)
    await port.until(lambda: port.state(who) == "ready")
    for takeover in (False, True):
        clone = await port.dial(who)
        clone.send(hello(who, instance="a copy of the disk", takeover=takeover))
        refused = await clone.until(Denied)
        assert (refused.reason, refused.final) == ("linked_elsewhere", False)
        assert "linked now by another process, from 127.0.0.1" in refused.message
        assert refused.retry_after > 0
    first.send(a_report(2))
    await asyncio.sleep(0.05)
    assert port.state(who) == "ready"
    assert not first.reader.at_eof()


@pytest.mark.usefixtures("silent")
async def test_the_newest_link_wins_and_the_old_ones_requests_move(port: Port) -> None:
    two, one = port.member("two"), port.member("one")
    old = await port.link(one)
    await port.until(lambda: port.state(one) == "ready")
    async with port.client("infer") as client:
        asking = asyncio.create_task(client.post("/v1/chat/completions", json=_question()))
        await old.until(Generate)
        other = await port.link(two)
        await port.until(lambda: port.state(two) == "ready")
        await port.link(one, instance="after a restart", report=a_report(models=()))
        await old.ended()
        moved = await other.until(Generate)
        other.send(Deltas((Delta(moved.request, 0, (1,), ((0, "moved"),)),)))
        other.send(Finished(moved.request, ("stop",), 1, 1))
        answer = (await asking).json()
    assert answer["choices"][0]["message"]["content"] == "moved"
    assert port.said("replaced")


@pytest.mark.usefixtures("silent")
async def test_only_the_same_instance_takes_over(port: Port) -> None:
    who = port.member("studio")
    first = await port.link(who)
    await port.until(lambda: port.state(who) == "ready")
    second = await port.link(who, takeover=True)
    first.send(a_report(1))
    await asyncio.sleep(0.1)
    assert not first.reader.at_eof()
    third = await port.link(who, takeover=True, instance="a stranger to this agent")
    await second.ended()
    assert not third.reader.at_eof()


def _question() -> dict[str, object]:
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}


# -- after the greeting ------------------------------------------------------------------------


def nested(depth: int) -> bytes:
    """Return a Report whose first field is nested arrays."""
    body = b"\x91" * depth + b"\xc0"
    return (len(body) + 1).to_bytes(4, "big") + b"\x0d" + body


LONG = encode(Fragment(1, bytes(100)))
BREACHES: dict[str, tuple[list[Frame | bytes], str]] = {
    "hello twice": ([Hello(PROTOCOL, "n", "x", "i", "m", "0", Hardware())], "no node sends"),
    "a coordinator's frame": ([Ping(1)], "no node sends"),
    "unknown frame": ([b"\x00\x00\x00\x02\xee\x90"], "unknown frame"),
    "declared too long": ([(MAX_FRAME_BYTES + 1).to_bytes(4, "big") + b"\x0d"], "frame length"),
    "declared huge": ([b"\xff\xff\xff\xff\x0d"], "frame length"),
    "empty": ([bytes(5)], "frame length"),
    "fragments without end": ([encode(Fragment(7, bytes(32_000))) for _ in range(540)], "in progress"),
    "many messages in fragments": ([encode(Fragment(number, b"x")) for number in range(70)], "in progress"),
    "fragment in a fragment": (list(split_into_fragments(LONG, 3)), "does not match"),
    "arrays in arrays": ([nested(100_000)], "bad Report"),
    "array of 2^32": ([b"\x00\x00\x00\x06\x0d\xdd\xff\xff\xff\xff"], "bad Report"),
    "text of 2^32": ([b"\x00\x00\x00\x07\x0e\x91\xdb\xff\xff\xff\xff"], "bad Goodbye"),
    "ext type": ([b"\x00\x00\x00\x05\x0e\x91\xd4\x01\x00"], "bad Goodbye"),
    "wrong types": ([b"\x00\x00\x00\x03\x0e\x91\x07"], "bad Goodbye"),
}


@pytest.mark.parametrize("breach", BREACHES)
async def test_a_breach_ends_that_link_alone(port: Port, breach: str) -> None:
    words, reason = BREACHES[breach]
    who = port.member("rogue")
    async with port.undisturbed():
        line = await port.link(who)
        await port.until(lambda: port.state(who) == "ready")
        line.send(*words)
        await line.ended()
        await port.until(lambda: port.state(who) == "lost")
        assert port.said(reason)


async def test_before_hello_nothing_else_is_read(port: Port) -> None:
    who = port.member("rogue")
    cases: list[tuple[list[Frame | bytes], str]] = [
        ([a_report()], "before Hello"),
        ([bytes(5)], "frame length"),
        ([*split_into_fragments(encode(Goodbye("x" * 40_000)), 1)], "16384 bytes before a Hello"),
    ]
    async with port.undisturbed():
        for words, reason in cases:
            line = await port.dial(who)
            line.send(*words)
            await line.ended()
            await port.until(lambda reason=reason: port.said(reason))


# -- lies --------------------------------------------------------------------------------------

ESCAPE = "\x1b]0;owned\x07\x1b[31m<script>[/red]"
LIES: dict[str, Report] = {
    "negative": a_report(models=(a_model(prefill_speed=-1.0, load_seconds=-1.0, decode_speed=-1.0, weights=-1),)),
    "huge": a_report(memory=a_memory(cap=2**50, ceiling=2**50, phys=2**50), models=(a_model(weights=2**60),)),
    "escapes": a_report(
        memory=a_memory(bound_by=ESCAPE, source=ESCAPE),
        engine=EngineState(ESCAPE, "failed", ESCAPE, 4),
        models=(a_model(ESCAPE), a_model("<img src=x onerror=alert(1)>"), a_model("a\nb"), a_model("good")),
    ),
}


@pytest.mark.parametrize("lie", LIES)
async def test_lies_harm_neither_api_nor_terminal(port: Port, lie: str, capsys: pytest.CaptureFixture[str]) -> None:
    who = port.member("liar")
    async with port.undisturbed():
        hardware = Hardware(ESCAPE, 1, 1, ESCAPE, ESCAPE)
        await port.link(who, LIES[lie], version=ESCAPE, hardware=hardware)
        await port.until(lambda: port.state(who) == "ready")
        answers = {path: await port.get(path) for path in PATHS}
        async with port.client("infer") as client:
            assert (await client.get("/v1/models")).status_code == 200
    text = repr(answers)
    assert "\\x1b" not in text
    assert "onerror" not in text
    shown = _printed(answers, capsys)
    assert "liar" in shown
    assert "\x1b" not in shown
    assert "\x07" not in shown


PATHS = ("/api/v1/status", "/api/v1/nodes", "/api/v1/nodes/liar", "/api/v1/models")


def _printed(answers: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of `cluster nodes` and `cluster node show` for these answers."""
    verbs.print_status(answers["/api/v1/status"])
    verbs.print_nodes(answers["/api/v1/nodes"])
    verbs.print_node(answers["/api/v1/nodes/liar"]["node"])
    return capsys.readouterr().out


async def test_a_node_cannot_speak_for_anothers_request(port: Port) -> None:
    rogue: NodeIdentity = port.member("rogue")
    async with port.undisturbed():
        line = await port.link(rogue, a_report(models=()))
        for request in range(1, 50):
            line.send(Deltas((Delta(request, 0, (1,), ((0, "evil"),)),)), Finished(request, ("stop",), 1, 1))
        line.send(a_report(2, models=()))
        await port.until(lambda: port.state(rogue) == "ready")


@pytest.mark.slow
async def test_a_node_that_is_too_old_or_too_new_ends_with_its_own_exit_code(tmp_path: Path) -> None:
    """The coordinator here sends the answer that `test_other_protocol_versions_name_the_side_to_update` checks."""
    denied = Denied("protocol", "the node speaks protocol 99: update macpool on the coordinator", final=True)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(100)
        writer.write(encode(denied))
        await writer.drain()
        writer.close()

    authority, request = ClusterCa(tmp_path / "authority", time.time), new_request("studio")
    certificate = authority.sign_request(request.csr, NodeId("n1"), "studio")
    folder = tmp_path / "node" / "identity"
    who = store_identity(folder, request, certificate, authority.cluster, authority.ca, compute_machine_id("m1"))
    server = await asyncio.start_server(refuse, "127.0.0.1", 0, ssl=authority.get_server_context())
    async with server:
        store_address(who, f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        node = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "node.run",
            "--state",
            str(tmp_path),
            "--set",
            "node.machine=m1",
            stderr=asyncio.subprocess.PIPE,
            env=environment(),
        )
        _, words = await asyncio.wait_for(node.communicate(), 30)
    assert node.returncode == 8
    assert "update macpool on the coordinator" in words.decode()


# -- data that clients make the coordinator send --------------------------------------------------


async def test_large_prompts_at_once_cut_no_link(port: Port) -> None:
    """Each prompt is within the limit of a body. The node receives all of them over its existing link."""
    async with port.undisturbed():
        who = port.member("studio")
        line = await port.link(who)
        text = "x" * (15 * MIB // 2)
        for number in range(1, 5):
            frame = Generate(number, number, "r", "tiny", (Message("user", text),), GenerationParams(), 0)
            assert port.application.nodes.links.table.send(who.node, frame)
        joined = [(await line.until(Generate, 30)).request for _ in range(4)]
        assert sorted(joined) == [1, 2, 3, 4]
        line.close()
