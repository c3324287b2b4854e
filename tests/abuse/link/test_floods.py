"""A member that floods: its link ends with a reason, sent to the member and shown by the API. Other peers are
unaffected."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from coordinator.cluster.links import link_connection
from coordinator.cluster.links.link_budgets import (
    FRAMES_BURST,
    LINKS_BURST,
    LOGGED_BURST,
    RENEWALS_BURST,
    REPORT_BYTES_BURST,
    REPORTS_BURST,
    LinkBudget,
)
from node.agent.identity import new_request
from tests.support.cluster.cluster_port import Ended, Line, Port, a_report, hello, opened, the_no
from tests.support.cluster.loopback_cluster import a_model
from tests.support.loop_watch import max_held_seconds, watch_loop
from wire.codec import encode, split_into_fragments
from wire.frames import Deltas, Denied, Finished, Frame, Goodbye, LeaseGranted, RenewCertificate, Welcome


@pytest.fixture
async def port(tmp_path: Path) -> AsyncGenerator[Port]:
    async with opened(tmp_path) as made:
        yield made


LARGE = b"".join(
    split_into_fragments(encode(a_report(1, models=tuple(a_model(f"m{n}", cause="x" * 300) for n in range(512)))), 1)
)
FLOODS: dict[str, tuple[Frame | bytes, float]] = {
    "reports": (encode(a_report(1)), REPORTS_BURST),
    "large reports": (LARGE, REPORT_BYTES_BURST / len(LARGE)),
    "renewals": (RenewCertificate(new_request("x").csr), RENEWALS_BURST),
    "answers of requests that are not there": (Finished(1, ("stop",), 1, 1), FRAMES_BURST),
    "leases that are not there": (LeaseGranted("l", 1), LOGGED_BURST),
    "empty steps": (Deltas(()), FRAMES_BURST),
}


@pytest.mark.parametrize("flood", FLOODS)
async def test_a_flood_ends_the_link_of_its_node_alone(port: Port, flood: str) -> None:
    """Before these limits, reports, renewals and links of one member held the loop for up to 19 s and left 300 links
    open."""
    frame, most = FLOODS[flood]
    who = port.member("rogue")
    word = frame if isinstance(frame, bytes) else encode(frame)
    async with port.undisturbed():
        line = await port.link(who)
        await port.until(lambda: port.state(who) == "ready")
        with watch_loop() as held:
            ending = asyncio.create_task(line.ended(20))
            batch = max(1, 16_384 // len(word))
            for _ in range(int(most * 3) // batch + 1):
                if ending.done():
                    break
                line.send(word * batch)
                await asyncio.sleep(0)
            denied = the_no(await ending)
        await port.until(lambda: port.state(who) == "lost")
        row = (await port.get("/api/v1/nodes/rogue"))["node"]
    assert (denied.reason, denied.final) == ("too_many", False)
    assert "too many" in denied.message
    assert denied.retry_after > 0
    assert "too many" in row["reason"]
    assert held.seconds < max_held_seconds()


async def test_a_node_has_two_links_at_most(port: Port) -> None:
    who = port.member("rogue")
    async with port.undisturbed():
        lines = [await port.link(who, takeover=True) for _ in range(10)]
        await asyncio.gather(*(line.ended() for line in lines[:-2]))
        links = port.application.nodes.links.table
        assert links.retired == 1
        assert not any(line.reader.at_eof() for line in lines[-2:])


async def test_successive_links_are_rate_limited(port: Port) -> None:
    who = port.member("rogue")
    denied: list[Denied] = []
    async with port.undisturbed():
        for _ in range(int(LINKS_BURST) + 10):
            line = await port.dial(who)
            line.send(hello(who))
            denied += await _greeted(line)
            line.close()
    assert denied
    assert {one.reason for one in denied} == {"too_many"}


async def _greeted(line: Line) -> list[Denied]:
    try:
        while not isinstance(frame := await line.next(), Welcome):
            if isinstance(frame, Denied):
                return [frame]
    except Ended:
        return []
    return []


async def test_frames_sent_before_a_goodbye_are_processed(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that waits for the next turn of the loop still has frames when its peer closes the connection."""
    monkeypatch.setattr(link_connection, "MAX_LINK_TURN_SECONDS", 1e-9)
    who = port.member("leaver")
    line = await port.link(who)
    await port.until(lambda: port.state(who) == "ready")
    large = a_report(2, models=tuple(a_model(f"m{number}") for number in range(500)))
    line.send(*(large for _ in range(12)), Goodbye("shutdown"))
    line.writer.close()
    await port.until(lambda: any(entry["event"] == "node signed off" for entry in port.logs))


def test_a_budget_fills_again() -> None:
    budget = LinkBudget("frames", 10.0, 5.0)
    assert [budget.charge(100.0) for _ in range(5)] == [""] * 5
    assert budget.charge(100.0) == "too many frames: 10 a second, 5 at once"
    assert budget.charge(100.05)
    assert budget.charge(100.15) == ""
    assert [budget.charge(1000.0) for _ in range(6)].count("") == 5
