import pytest

from coordinator.ui.browser_sessions import (
    KEY_SECONDS,
    MAX_CODES,
    MAX_KEYS,
    PAGE_KEY_NAME,
    BrowserSessions,
)
from router.admission.api_keys import KeyRing


class Door:
    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.ring = KeyRing(b"pepper", lambda: self.now)
        self.visitors = BrowserSessions(self.ring, b"pepper", lambda: self.now)

    def enter(self) -> str:
        entered = self.visitors.redeem_code(self.visitors.create_code())
        assert entered is not None
        return entered[0]


@pytest.fixture
def door() -> Door:
    return Door()


def test_redeem_code_returns_an_admin_key_for_12_hours(door: Door):
    code = door.visitors.create_code()
    assert len(code) == 32
    entered = door.visitors.redeem_code(code)
    assert entered is not None
    text, until = entered
    key = door.ring.check(text)
    assert key is not None
    assert (key.name, key.allows("admin"), until) == (PAGE_KEY_NAME, True, door.now + 12 * 3600)
    door.now = until
    assert door.ring.check(text) is None


def test_a_code_is_good_once_and_for_two_minutes(door: Door):
    code, late = door.visitors.create_code(), door.visitors.create_code()
    assert door.visitors.redeem_code(code) is not None
    assert door.visitors.redeem_code(code) is None
    door.now += 120.0
    assert door.visitors.redeem_code(late) is None
    assert door.visitors.redeem_code("") is None
    assert door.visitors.redeem_code("\ud800") is None


def test_a_visit_ends_at_once(door: Door):
    text = door.enter()
    key = door.ring.check(text)
    assert key is not None
    assert door.visitors.end_session(key.id)
    assert door.ring.check(text) is None
    assert not door.visitors.end_session(key.id)
    assert not door.visitors.end_session("somebody")


def test_codes_and_visits_are_bounded(door: Door):
    first, *others = [door.visitors.create_code() for _ in range(MAX_CODES + 1)]
    assert door.visitors.redeem_code(first) is None
    assert all(door.visitors.redeem_code(code) is not None for code in others)
    visits = [door.enter() for _ in range(MAX_KEYS + 1)]
    assert door.ring.check(visits[0]) is None
    assert all(door.ring.check(text) is not None for text in visits[1:])


def test_old_visits_leave_nothing(door: Door):
    door.enter()
    door.now += KEY_SECONDS
    door.visitors.create_code()
    assert door.ring.list() == []
