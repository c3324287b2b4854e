from collections.abc import Callable

from coordinator.joining.join_approvals import (
    APPROVAL_TIMEOUT_SECONDS,
    LOCK_SECONDS,
    MAX_NEW_CODES,
    MAX_NEW_CODES_PER_ADDRESS,
    MAX_WAITING,
    MAX_WAITING_PER_ADDRESS,
    REPEAT_SECONDS,
    ApprovalDecision,
    ApprovalLock,
    ApprovalQueue,
    ApprovalRequest,
    DecidedApproval,
    WaitingNode,
    WrongCode,
)
from wire.report import Hardware


def waiting(code: str, now: float = 0.0, address: str = "10.0.0.7") -> WaitingNode:
    return WaitingNode(code, "studio", "m1", Hardware(), address, now + APPROVAL_TIMEOUT_SECONDS)


def asked(
    line: ApprovalQueue,
    code: str,
    now: float = 0.0,
    address: str = "10.0.0.7",
    wake: Callable[[], object] = lambda: None,
) -> ApprovalRequest:
    ticket = line.enqueue(waiting(code, now, address), now, wake)
    assert isinstance(ticket, ApprovalRequest)
    return ticket


def test_decision_on_a_code_is_final_and_wakes_the_request() -> None:
    line, woken = ApprovalQueue(), [0]
    first, second = asked(line, "111111", wake=lambda: woken.append(1)), asked(line, "222222")
    assert line.approve(" 111111 ", 1.0) == DecidedApproval(first.waiting, ApprovalDecision.APPROVED)
    assert first.decision is ApprovalDecision.APPROVED
    assert woken == [0, 1]
    assert line.list_waiting(1.0) == [second.waiting]
    assert line.reject("111111", 1.0) == WrongCode(2)
    line.reject("222222", 1.0)
    assert second.decision is ApprovalDecision.REJECTED


def test_repeated_approval_has_the_first_result_and_counts_as_no_wrong_code() -> None:
    line, woken = ApprovalQueue(), list[int]()
    request = asked(line, "111111", wake=lambda: woken.append(1))
    asked(line, "222222")
    first = line.approve("111111", 1.0)
    assert [line.approve(" 111111", 2.0) for _ in range(5)] == [first] * 5
    assert (request.decision, woken) == (ApprovalDecision.APPROVED, [1])
    assert line.approve("111112", 2.0) == WrongCode(2)
    assert line.approve("111111", 2.0) == first
    assert line.approve("111112", 2.0) == WrongCode(1), "a repetition does not end a row of wrong codes"
    assert line.approve("111111", REPEAT_SECONDS + 1.0) == ApprovalLock(LOCK_SECONDS)
    assert line.approve("111111", REPEAT_SECONDS + 2.0) == ApprovalLock(LOCK_SECONDS - 1.0)


def test_rejection_is_not_repeated() -> None:
    line = ApprovalQueue()
    asked(line, "111111")
    line.reject("111111", 0.0)
    assert line.approve("111111", 1.0) == WrongCode(2)


def test_three_wrong_codes_lock_for_a_minute() -> None:
    line = ApprovalQueue()
    ticket = asked(line, "111111")
    assert [line.approve("0", 0.0), line.reject("0", 0.0), line.approve("0", 0.0)] == [
        WrongCode(2),
        WrongCode(1),
        ApprovalLock(LOCK_SECONDS),
    ]
    assert line.approve("111111", 1.0) == ApprovalLock(LOCK_SECONDS - 1)
    assert ticket.decision is None
    assert isinstance(line.approve("111111", LOCK_SECONDS), DecidedApproval)


def test_approval_queue_is_bounded_and_expires() -> None:
    line = ApprovalQueue()
    for number in range(MAX_WAITING):
        asked(line, str(number), address=f"10.0.1.{number}")
    assert line.enqueue(waiting("new"), 0.0) == APPROVAL_TIMEOUT_SECONDS
    assert isinstance(line.approve("3", APPROVAL_TIMEOUT_SECONDS), WrongCode)
    assert not line.list_waiting(APPROVAL_TIMEOUT_SECONDS)
    asked(line, "new", APPROVAL_TIMEOUT_SECONDS)


def test_codes_cannot_be_drawn_until_one_fits() -> None:
    line = ApprovalQueue()
    for number in range(MAX_NEW_CODES):
        line.withdraw(asked(line, str(number), address=f"10.0.{number // 200}.{number % 200}"))
    assert isinstance(line.enqueue(waiting("wanted", address="10.1.0.1"), 1.0), float)


def test_two_that_wait_never_share_a_code() -> None:
    line = ApprovalQueue()
    first = asked(line, "111111")
    assert line.enqueue(waiting("111111"), 0.0) == 1.0
    line.withdraw(ApprovalRequest(waiting("111111"), lambda: None))
    assert line.list_waiting(0.0) == [first.waiting]


def test_approval_queue_limits_requests_and_codes_of_one_address() -> None:
    line = ApprovalQueue()
    tickets = [asked(line, f"a{number}") for number in range(MAX_WAITING_PER_ADDRESS)]
    assert line.enqueue(waiting("one more"), 0.0) == APPROVAL_TIMEOUT_SECONDS
    assert len(line.list_waiting(0.0)) == MAX_WAITING_PER_ADDRESS
    asked(line, "other", address="10.0.0.8")
    for ticket in tickets:
        line.withdraw(ticket)
    for number in range(MAX_NEW_CODES_PER_ADDRESS - MAX_WAITING_PER_ADDRESS - 1):  # the refused one also counts
        line.withdraw(asked(line, f"b{number}", 1.0))
    assert line.enqueue(waiting("a ninth code", 1.0), 1.0) == APPROVAL_TIMEOUT_SECONDS - 1.0
    asked(line, "ninth", APPROVAL_TIMEOUT_SECONDS)
    asked(line, "another", 1.0, "10.0.0.9")


def test_full_approval_queue_evicts_the_oldest_of_the_largest_address() -> None:
    line, woken = ApprovalQueue(), list[str]()
    crowd = [
        asked(line, f"c{number}", address="10.0.0.1", wake=lambda number=number: woken.append(f"c{number}"))
        for number in range(MAX_WAITING_PER_ADDRESS)
    ]
    for number in range(MAX_WAITING - MAX_WAITING_PER_ADDRESS):
        asked(line, f"d{number}", address=f"10.0.1.{number // 3}")
    newcomer = asked(line, "new", address="10.9.9.9")
    assert (crowd[0].displaced, crowd[1].displaced, woken) == (True, False, ["c0"])
    assert newcomer.waiting in line.list_waiting(0.0)
    assert crowd[0].waiting not in line.list_waiting(0.0)
    assert len(line.list_waiting(0.0)) == MAX_WAITING
    assert isinstance(line.approve("c0", 1.0), WrongCode)


def test_refusal_of_a_code_returns_when_the_oldest_code_expires() -> None:
    line = ApprovalQueue()
    line.withdraw(asked(line, "other", 3.0, "10.0.0.8"))
    for number in range(MAX_NEW_CODES_PER_ADDRESS):
        line.withdraw(asked(line, f"a{number}", 5.0 + number))
    assert line.enqueue(waiting("ninth", 20.0), 20.0) == 5.0 + APPROVAL_TIMEOUT_SECONDS - 20.0
    assert line.enqueue(waiting("ninth", APPROVAL_TIMEOUT_SECONDS + 4.0), APPROVAL_TIMEOUT_SECONDS + 4.0) == 1.0
    asked(line, "ninth", APPROVAL_TIMEOUT_SECONDS + 5.0)


def test_refusal_for_all_addresses_returns_when_the_oldest_code_expires() -> None:
    line = ApprovalQueue()
    for number in range(MAX_NEW_CODES):
        line.withdraw(asked(line, str(number), float(number), f"10.0.{number // 200}.{number % 200}"))
    assert line.enqueue(waiting("wanted", 300.0, "10.0.0.9"), 300.0) == APPROVAL_TIMEOUT_SECONDS - 300.0


def test_refusal_of_a_full_queue_returns_when_its_first_request_expires() -> None:
    line = ApprovalQueue()
    for number in range(MAX_WAITING_PER_ADDRESS):
        asked(line, f"a{number}", 10.0 * number)
    assert line.enqueue(waiting("more", 40.0), 40.0) == APPROVAL_TIMEOUT_SECONDS - 40.0
    assert line.enqueue(waiting("more", APPROVAL_TIMEOUT_SECONDS - 0.5), APPROVAL_TIMEOUT_SECONDS - 0.5) == 1.0


def test_full_queue_refuses_an_address_with_nearly_as_many_requests() -> None:
    line = ApprovalQueue()
    asked(line, "mine", address="10.0.0.1")
    for number in range(MAX_WAITING - 2):
        asked(line, str(number), address=f"10.0.1.{number // 2}")
    last = asked(line, "last", address="10.0.2.1")
    assert line.enqueue(waiting("second", address="10.0.0.1"), 0.0) == APPROVAL_TIMEOUT_SECONDS
    line.withdraw(last)
    third = asked(line, "third", address="10.0.1.0")
    asked(line, "second", address="10.0.0.1")
    left = [one.code for one in line.list_waiting(0.0)]
    assert "0" not in left, "the oldest of the address that has three"
    assert (left[0], third.displaced, len(left)) == ("mine", False, MAX_WAITING)


def test_list_omits_expired_requests() -> None:
    line = ApprovalQueue()
    asked(line, "111111")
    assert line.list_waiting(APPROVAL_TIMEOUT_SECONDS) == []


def test_wrong_codes_count_in_a_row_only() -> None:
    line = ApprovalQueue()
    asked(line, "111111")
    line.approve("0", 0.0)
    line.approve("0", 0.0)
    line.approve("111111", 0.0)
    assert [line.approve("0", 50.0) for _ in range(3)] == [WrongCode(2), WrongCode(1), ApprovalLock(LOCK_SECONDS)]
    assert line.approve("0", 49.0 + LOCK_SECONDS) == ApprovalLock(1.0)
    assert line.approve("0", 50.0 + LOCK_SECONDS) == WrongCode(2)


def test_a_code_that_another_node_has_counts_as_drawn() -> None:
    line = ApprovalQueue()
    asked(line, "111111")
    for _ in range(MAX_NEW_CODES_PER_ADDRESS - 1):
        assert line.enqueue(waiting("111111", 1.0), 1.0) == 1.0
    assert line.enqueue(waiting("222222", 1.0), 1.0) == APPROVAL_TIMEOUT_SECONDS - 1.0


def test_an_ipv6_network_has_the_share_of_one_address() -> None:
    line = ApprovalQueue()
    for number in range(MAX_WAITING_PER_ADDRESS):
        asked(line, str(number), address=f"2001:db8::{number}")
    assert line.enqueue(waiting("more", address="2001:db8::99"), 0.0) == APPROVAL_TIMEOUT_SECONDS
    asked(line, "other", address="2001:db8:0:1::1")


def test_a_repeated_approval_is_that_of_the_newest_node_with_the_code() -> None:
    line = ApprovalQueue()
    asked(line, "111111")
    line.approve("111111", 0.0)
    asked(line, "111111", 1.0)
    newest = line.approve("111111", 1.0)
    assert line.approve("111111", 2.0) == newest
    assert isinstance(newest, DecidedApproval)
    assert newest.waiting.expires == 1.0 + APPROVAL_TIMEOUT_SECONDS
