from pathlib import Path

import pytest

from coordinator.store import Store
from coordinator.tokens import KEPT_AFTER, Redemption, Tokens
from tests.support.enrolment import Wall
from wire.identity import JoinToken, parse_token, request_mac, token_key

CSR = b"request"


@pytest.fixture
def wall() -> Wall:
    return Wall(1000.0)


@pytest.fixture
def tokens(tmp_path: Path, wall: Wall):
    store = Store(tmp_path)
    yield Tokens(store, b"ca", wall)
    store.close()


def redeem(tokens: Tokens, token: JoinToken, csr: bytes = CSR) -> Redemption:
    return tokens.redeem(token.id, request_mac(token_key(token.secret), CSR), csr)


def test_a_token_is_used_once(tokens: Tokens) -> None:
    token = parse_token(str(tokens.create()))
    assert redeem(tokens, token) is Redemption.ACCEPTED
    assert redeem(tokens, token) is Redemption.USED


def test_a_token_for_three_is_used_three_times(tokens: Tokens) -> None:
    token = tokens.create(uses=3)
    assert [redeem(tokens, token) for _ in range(4)] == [Redemption.ACCEPTED] * 3 + [Redemption.USED]


def test_checking_uses_nothing_up(tokens: Tokens) -> None:
    token = tokens.create()
    mac = request_mac(token_key(token.secret), CSR)
    assert {tokens.check(token.id, mac, CSR) for _ in range(3)} == {Redemption.ACCEPTED}


def test_each_no_has_its_reason(tokens: Tokens, wall: Wall) -> None:
    expired, revoked, wrong = tokens.create(ttl=10), tokens.create(), tokens.create()
    assert tokens.revoke(revoked.id)
    assert not tokens.revoke("nothing")
    wall.now += 10
    assert redeem(tokens, expired) is Redemption.EXPIRED
    assert redeem(tokens, revoked) is Redemption.UNKNOWN
    assert redeem(tokens, wrong, b"another request") is Redemption.WRONG
    assert redeem(tokens, JoinToken(b"", "nothing", b"")) is Redemption.UNKNOWN
    assert redeem(tokens, wrong) is Redemption.ACCEPTED


def test_who_cannot_prove_the_secret_learns_nothing_of_the_token(tokens: Tokens, wall: Wall) -> None:
    token = tokens.create(ttl=10)
    wall.now += 100
    assert redeem(tokens, token, b"another request") is Redemption.WRONG


def test_the_list_holds_no_secret(tokens: Tokens) -> None:
    token = tokens.create(uses=2, name="lab")
    (listed,) = tokens.list()
    assert (listed.id, listed.name, listed.uses_left, listed.revoked) == (token.id, "lab", 2, False)
    assert str(token_key(token.secret)) not in str(listed)


def test_old_tokens_are_dropped(tokens: Tokens, wall: Wall) -> None:
    tokens.create(ttl=1)
    wall.now += KEPT_AFTER + 2
    fresh = tokens.create()
    assert [token.id for token in tokens.list()] == [fresh.id]


@pytest.mark.parametrize(("ttl", "uses"), [(0, 1), (-1, 1), (1, 0)])
def test_a_token_needs_time_and_uses(tokens: Tokens, ttl: float, uses: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        tokens.create(ttl, uses)
