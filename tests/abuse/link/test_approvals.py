"""Strangers that ask for join codes and disconnect, or stay silent: no other machine is kept out."""

from pathlib import Path

import pytest

from coordinator.joining.join_approvals import (
    APPROVAL_TIMEOUT_SECONDS,
    MAX_NEW_CODES_PER_ADDRESS,
    MAX_WAITING,
    MAX_WAITING_PER_ADDRESS,
    ApprovalQueue,
    ApprovalRequest,
    DecidedApproval,
    WaitingNode,
)
from node.agent.enrollment import EnrollDenied
from tests.abuse.link.test_enrolment import join
from tests.support.cluster.enrolment import opened
from wire.report import Hardware


def _ask(
    line: ApprovalQueue, code: str, address: str, now: float = 0.0, woken: list[str] | None = None
) -> ApprovalRequest | float:
    """Ask for approval; `woken` gets the code when the request is decided or displaced."""
    codes = list[str]() if woken is None else woken
    waiting = WaitingNode(code, "studio", "m1", Hardware(), address, now + APPROVAL_TIMEOUT_SECONDS)
    return line.enqueue(waiting, now, lambda: codes.append(code))


def test_abandoned_join_requests_block_only_their_address() -> None:
    """Before this limit, 32 codes of one stranger blocked every approval for ten minutes."""
    line = ApprovalQueue()
    answers = [_ask(line, f"{number:06d}", "10.0.0.66") for number in range(100)]
    for answer in answers:
        if isinstance(answer, ApprovalRequest):
            line.withdraw(answer)
    assert sum(isinstance(answer, ApprovalRequest) for answer in answers) <= MAX_NEW_CODES_PER_ADDRESS
    for number in range(10):
        ticket = _ask(line, f"7{number:05d}", f"10.0.0.{number}", 1.0)
        assert isinstance(ticket, ApprovalRequest)
        line.withdraw(ticket)
    assert isinstance(_ask(line, "888888", "10.0.0.66", 1.0), float)
    assert isinstance(_ask(line, "888888", "10.0.0.66", APPROVAL_TIMEOUT_SECONDS), ApprovalRequest)


def test_one_address_takes_a_part_of_the_list() -> None:
    line = ApprovalQueue()
    answers = [_ask(line, f"{number:06d}", f"2001:db8::{number}") for number in range(8)]
    assert sum(isinstance(answer, ApprovalRequest) for answer in answers) == MAX_WAITING_PER_ADDRESS, (
        "one network of IPv6 is one"
    )


def test_silent_connections_are_evicted_for_another_address() -> None:
    line, woken = ApprovalQueue(), list[str]()
    silent = [
        _ask(line, f"{number:06d}", f"10.0.0.{number // MAX_WAITING_PER_ADDRESS}", woken=woken)
        for number in range(MAX_WAITING)
    ]
    mine = _ask(line, "777777", "10.0.0.200", 1.0)
    assert isinstance(mine, ApprovalRequest)
    assert woken == ["000000"]
    assert isinstance(silent[0], ApprovalRequest)
    assert silent[0].displaced
    assert len(line.list_waiting(1.0)) == MAX_WAITING
    assert isinstance(line.approve("777777", 2.0), DecidedApproval)
    assert isinstance(_ask(line, "999999", "10.0.0.0", 2.0), ApprovalRequest), "there is a free place again"


async def test_a_machine_with_a_token_never_waits_for_a_code(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        for number in range(300):
            _ask(door.approvals, f"{number:06d}", f"10.0.{number % 100}.1")
        assert len(door.approvals.list_waiting(0.0)) == MAX_WAITING
        identity = await join(door, tmp_path / "n", door.tokens.create())
        assert identity.node in door.store.members


async def test_evicted_join_request_names_the_token(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as door:
        codes: list[str] = []

        def crowd(code: str) -> None:
            codes.append(code)
            (ticket,) = door.approvals.requests.values()
            ticket.displace()

        with pytest.raises(EnrollDenied, match="use a token") as denied:
            await join(door, tmp_path / "n", None, on_code=crowd)
        assert denied.value.reason == "approvals_full"
