from coordinator.approvals import (
    LIFE,
    LOCKED_FOR,
    MOST_NEW,
    MOST_WAITING,
    Approvals,
    Decided,
    Decision,
    Locked,
    Ticket,
    Waiting,
    WrongCode,
)  # fmt: skip
from wire.report import Hardware


def waiting(code: str, now: float = 0.0, address: str = "10.0.0.7") -> Waiting:
    return Waiting(code, "studio", "m1", Hardware(), address, now + LIFE)


def asked(line: Approvals, code: str, now: float = 0.0, address: str = "10.0.0.7") -> Ticket:
    ticket = line.ask(waiting(code, now, address), now)
    assert isinstance(ticket, Ticket)
    return ticket


def test_a_code_is_decided_once_and_wakes_who_waits() -> None:
    line, woken = Approvals(), [0]
    first, second = asked(line, "111111"), asked(line, "222222")
    first.wake = lambda: woken.append(1)
    assert line.approve(" 111111 ", 1.0) == Decided(first.waiting, Decision.APPROVED)
    assert first.decision is Decision.APPROVED
    assert woken == [0, 1]
    assert line.list(1.0) == [second.waiting]
    assert line.approve("111111", 1.0) == WrongCode(2)
    line.reject("222222", 1.0)
    assert second.decision is Decision.REJECTED


def test_three_wrong_codes_lock_for_a_minute() -> None:
    line = Approvals()
    ticket = asked(line, "111111")
    assert [line.approve("0", 0.0), line.reject("0", 0.0), line.approve("0", 0.0)] == [
        WrongCode(2), WrongCode(1), Locked(LOCKED_FOR),
    ]  # fmt: skip
    assert line.approve("111111", 1.0) == Locked(LOCKED_FOR - 1)
    assert ticket.decision is None
    assert isinstance(line.approve("111111", LOCKED_FOR), Decided)


def test_the_line_is_bounded_and_expires() -> None:
    line = Approvals()
    for number in range(MOST_WAITING):
        asked(line, str(number), address=f"10.0.1.{number}")
    assert line.ask(waiting("new"), 0.0) == LIFE
    assert isinstance(line.approve("3", LIFE), WrongCode)
    assert not line.list(LIFE)
    asked(line, "new", LIFE)


def test_nobody_can_draw_codes_until_one_fits() -> None:
    line = Approvals()
    for number in range(MOST_NEW):
        line.withdraw(asked(line, str(number), address=f"10.0.{number // 200}.{number % 200}"))
    assert isinstance(line.ask(waiting("wanted", address="10.1.0.1"), 1.0), float)


def test_two_that_wait_never_share_a_code() -> None:
    line = Approvals()
    first = asked(line, "111111")
    assert line.ask(waiting("111111"), 0.0) == 1.0
    line.withdraw(Ticket(waiting("111111")))
    assert line.list(0.0) == [first.waiting]
