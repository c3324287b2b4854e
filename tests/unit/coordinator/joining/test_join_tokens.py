from pathlib import Path

import pytest

from coordinator.joining.join_tokens import EXPIRED_KEPT_SECONDS, MESSAGES, JoinTokens, Redemption, build_join_command
from coordinator.state.database import Database
from tests.support.cluster.enrolment import Wall
from wire.join_token import JoinToken, compute_request_mac, derive_token_key, parse_token

CSR = b"request"


@pytest.fixture
def wall() -> Wall:
    return Wall(1000.0)


@pytest.fixture
def tokens(tmp_path: Path, wall: Wall):
    store = Database(tmp_path)
    yield JoinTokens(store, b"ca", wall)
    store.close()


def redeem(tokens: JoinTokens, token: JoinToken, csr: bytes = CSR) -> Redemption:
    return tokens.redeem(token.id, compute_request_mac(derive_token_key(token.secret), CSR), csr)


def test_a_token_is_used_once(tokens: JoinTokens) -> None:
    token = parse_token(str(tokens.create()))
    assert redeem(tokens, token) is Redemption.ACCEPTED
    assert redeem(tokens, token) is Redemption.USED


def test_a_token_for_three_is_used_three_times(tokens: JoinTokens) -> None:
    token = tokens.create(uses=3)
    assert [redeem(tokens, token) for _ in range(4)] == [Redemption.ACCEPTED] * 3 + [Redemption.USED]


def test_checking_uses_nothing_up(tokens: JoinTokens) -> None:
    token = tokens.create()
    mac = compute_request_mac(derive_token_key(token.secret), CSR)
    assert {tokens.check(token.id, mac, CSR) for _ in range(3)} == {Redemption.ACCEPTED}


def test_each_no_has_its_reason(tokens: JoinTokens, wall: Wall) -> None:
    expired, revoked, wrong = tokens.create(ttl=10), tokens.create(), tokens.create()
    assert tokens.revoke(revoked.id)
    assert not tokens.revoke("nothing")
    wall.now += 10
    assert redeem(tokens, expired) is Redemption.EXPIRED
    assert redeem(tokens, revoked) is Redemption.UNKNOWN
    assert redeem(tokens, wrong, b"another request") is Redemption.WRONG
    assert redeem(tokens, JoinToken(b"", "nothing", b"")) is Redemption.UNKNOWN
    assert redeem(tokens, wrong) is Redemption.ACCEPTED


def test_wrong_secret_reveals_nothing_about_the_token(tokens: JoinTokens, wall: Wall) -> None:
    token = tokens.create(ttl=10)
    wall.now += 100
    assert redeem(tokens, token, b"another request") is Redemption.WRONG
    spent, revoked = tokens.create(), tokens.create()
    redeem(tokens, spent)
    tokens.revoke(revoked.id)
    for one in (spent, revoked):
        assert redeem(tokens, one, b"another request") is Redemption.WRONG


def test_the_list_holds_no_secret(tokens: JoinTokens) -> None:
    token = tokens.create(uses=2, name="lab")
    (listed,) = tokens.list()
    assert (listed.id, listed.name, listed.uses_left, listed.revoked) == (token.id, "lab", 2, False)
    assert str(derive_token_key(token.secret)) not in str(listed)


def test_old_tokens_are_dropped(tokens: JoinTokens, wall: Wall) -> None:
    tokens.create(ttl=1)
    wall.now += EXPIRED_KEPT_SECONDS + 2
    fresh = tokens.create()
    assert [token.id for token in tokens.list()] == [fresh.id]


@pytest.mark.parametrize(("ttl", "uses"), [(0, 1), (-1, 1), (1, 0)])
def test_a_token_needs_time_and_uses(tokens: JoinTokens, ttl: float, uses: int) -> None:
    with pytest.raises(ValueError, match="positive"):
        tokens.create(ttl, uses)


def test_a_token_keeps_its_uses_its_end_and_its_revocation_over_a_restart(tmp_path: Path, wall: Wall) -> None:
    store = Database(tmp_path / "again")
    before = JoinTokens(store, b"ca", wall)
    twice, spent, revoked = before.create(uses=2), before.create(), before.create()
    assert redeem(before, twice) is redeem(before, spent) is Redemption.ACCEPTED
    before.revoke(revoked.id)
    store.close()
    store = Database(tmp_path / "again")
    after = JoinTokens(store, b"ca", wall)
    assert {row.id: (row.uses_left, row.revoked) for row in after.list()} == {
        twice.id: (1, False),
        spent.id: (0, False),
        revoked.id: (1, True),
    }
    assert redeem(after, spent) is Redemption.USED
    assert redeem(after, revoked) is Redemption.UNKNOWN
    assert redeem(after, twice) is Redemption.ACCEPTED
    assert redeem(after, twice) is Redemption.USED
    wall.now += 3600.0
    assert redeem(after, twice) is Redemption.USED, "used before it expired"
    store.close()


def test_join_token_expires_after_one_hour_by_default(tokens: JoinTokens, wall: Wall) -> None:
    usual, short = tokens.create(), tokens.create(ttl=60)
    listed = {row.id: row for row in tokens.list()}
    assert (listed[usual.id].created, listed[usual.id].expires) == (1000.0, 4600.0)
    assert listed[short.id].expires == 1060.0
    wall.now = 4599.9
    assert redeem(tokens, usual) is Redemption.ACCEPTED
    assert redeem(tokens, short) is Redemption.EXPIRED


def test_a_token_that_expires_now_is_expired_and_its_use_is_left(tokens: JoinTokens, wall: Wall) -> None:
    token = tokens.create(ttl=10)
    wall.now += 9.999
    assert tokens.check(token.id, compute_request_mac(derive_token_key(token.secret), CSR), CSR) is Redemption.ACCEPTED
    wall.now = 1010.0
    assert redeem(tokens, token) is Redemption.EXPIRED
    assert tokens.list()[0].uses_left == 1


def test_only_a_token_made_for_it_replaces_a_member_and_not_after_a_restart(tmp_path: Path, wall: Wall) -> None:
    store = Database(tmp_path / "again")
    tokens = JoinTokens(store, b"ca", wall)
    usual, replaces = tokens.create(), tokens.create(replaces=True)
    assert [tokens.may_replace(one.id) for one in (usual, replaces)] == [False, True]
    assert not JoinTokens(store, b"ca", wall).may_replace(replaces.id)
    store.close()


def test_an_expired_token_is_listed_for_a_week_and_the_newest_comes_first(tokens: JoinTokens, wall: Wall) -> None:
    old = tokens.create(ttl=1)
    wall.now += EXPIRED_KEPT_SECONDS
    newer = tokens.create()
    assert [row.id for row in tokens.list()] == [newer.id, old.id]
    assert redeem(tokens, old) is Redemption.EXPIRED


@pytest.mark.parametrize("answer", [one for one in Redemption if one is not Redemption.ACCEPTED])
def test_token_refusals_name_the_next_step(answer: Redemption) -> None:
    step = "copy the whole token again" if answer is Redemption.WRONG else "`cluster token create`"
    assert step in MESSAGES[answer]


def test_join_command_keeps_the_token_out_of_the_process_list() -> None:
    assert build_join_command("host:8081", "mpj_x") == "echo mpj_x | cluster join host:8081 --token-file -"
