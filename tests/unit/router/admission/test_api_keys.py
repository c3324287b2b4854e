import hmac
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.api_keys import (
    MAX_SESSION_BYTES,
    SCOPES,
    ApiKey,
    KeyRing,
    compute_digest,
    create_anonymous_key,
    extract_key,
    new_key,
    new_secret,
    parse_session,
)
from router.admission.rate_limits import KeyLimits

PEPPER = b"0123456789abcdef"


def ring(*scopes: str, expires: float | None = None, now: float = 100.0) -> tuple[KeyRing, ApiKey, str]:
    keys = KeyRing(PEPPER, clock=lambda: now)
    key, text = new_key(PEPPER, "me", scopes or ("infer",), created=1.0, expires=expires)
    keys.put(key)
    return keys, key, text


def test_a_key_opens_its_scopes_and_no_more():
    keys, key, text = ring("infer")
    assert keys.check(text) == keys.check(text.encode()) == key
    assert key.allows("infer")
    assert not key.allows("admin")
    assert not key.allows("metrics")
    _, admin, _ = ring("admin")
    assert all(admin.allows(scope) for scope in ("infer", "admin", "metrics"))


def test_a_hash_that_the_caller_keeps_proves_nothing_by_itself():
    keys, key, text = ring()
    wrong = text[:-1] + ("a" if text[-1] != "a" else "b")
    kept, other = keys.compute_salted_hash(text.encode()), keys.compute_salted_hash(wrong.encode())
    assert kept != other
    assert keys.check(wrong.encode(), other) is None
    assert keys.check(text.encode(), kept) == keys.check(text.encode(), kept) == key
    keys.drop(key.id)
    assert keys.check(text.encode(), kept) is None
    assert keys.refused == 2


def test_only_a_keyed_digest_is_kept():
    _, key, text = ring()
    assert text.startswith(f"mp_{key.id}_")
    assert len(text.split("_", 2)[2]) == 43
    assert key.digest == hmac.digest(PEPPER, text.encode(), "sha256") == compute_digest(PEPPER, text.encode())
    assert text not in repr(key)


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text[:-1],
        lambda text: text + "A",
        lambda text: "xx" + text[2:],
        lambda text: text.upper(),
        lambda text: text.replace("mp_", ""),
        lambda text: "",
        lambda text: "mp__",
        lambda text: "é" * 40,
        lambda text: text * 100,
        lambda text: "\ud800",
    ],
)
def test_a_changed_key_opens_nothing(change):
    keys, _, text = ring()
    assert keys.check(change(text)) is None


@given(st.binary(max_size=400))
def test_garbage_opens_nothing(garbage: bytes):
    keys, _, _ = ring()
    assert keys.check(garbage) is None


def test_an_expired_or_revoked_key_opens_nothing():
    keys, _, text = ring(expires=100.0)
    assert keys.check(text) is None
    keys, key, text = ring(expires=100.1)
    assert keys.check(text) == key
    assert keys.drop(key.id)
    assert not keys.drop(key.id)
    assert keys.check(text) is None
    assert keys.list() == []


def test_another_pepper_makes_every_key_worthless():
    _, key, text = ring()
    other = KeyRing(b"another pepper")
    other.put(key)
    assert other.check(text) is None


@pytest.mark.parametrize("scopes", [(), ("root",), ("infer", "root")])
def test_unknown_scopes_are_refused(scopes: tuple[str, ...]):
    with pytest.raises(ValueError, match="scopes are admin, infer, metrics"):
        new_key(PEPPER, "me", scopes, created=1.0)


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ([(b"authorization", b"Bearer abc")], b"abc"),
        ([(b"authorization", b"bearer  abc ")], b"abc"),
        ([(b"x-api-key", b"abc")], b"abc"),
        ([(b"x-api-key", b"abc"), (b"authorization", b"Bearer def")], b"def"),
        ([(b"authorization", b"Basic abc")], None),
        ([(b"authorization", b"Basic abc"), (b"x-api-key", b"def")], b"def"),
        ([(b"x-api-key", b"abc"), (b"host", b"mac")], b"abc"),
        ([], None),
    ],
)
def test_where_a_key_is_looked_for(headers: list[tuple[bytes, bytes]], found: bytes | None):
    assert extract_key(headers) == found


def test_check_counts_invalid_keys_only():
    keys, key, text = ring(expires=100.1)
    for _ in range(2):
        assert keys.check(text) == key
    assert keys.refused == 0
    for number, wrong in enumerate(("mp_abcdefgh_" + "Q" * 43, text + "A", "x" * 10_000, ""), 1):
        assert keys.check(wrong) is None
        assert keys.refused == number
    assert keys.is_valid(text.encode())
    assert not keys.is_valid(b"wrong")
    assert keys.refused == 4, "`knows` does not count"


def test_an_expired_key_is_counted_as_refused_also_when_it_was_good_before():
    now = [100.0]
    keys = KeyRing(PEPPER, clock=lambda: now[0])
    key, text = new_key(PEPPER, "me", ("infer",), created=1.0, expires=101.0)
    keys.put(key)
    assert keys.check(text) == key
    now[0] = 101.0
    assert keys.check(text) is None
    assert not keys.is_valid(text.encode())
    assert keys.refused == 1


def test_rotated_key_accepts_only_its_new_secret():
    keys, key, text = ring()
    other, other_text = new_key(PEPPER, "a later key", ("admin",), created=2.0)
    keys.put(other)
    assert [one.id for one in keys.list()] == [key.id, other.id], "the oldest first"
    assert keys.get_names() == {key.id: "me", other.id: "a later key"}
    digest, renewed = new_secret(PEPPER, key.id)
    assert keys.check(text) == key
    keys.put(replace(key, digest=digest))
    assert keys.check(text) is None
    assert keys.check(renewed) == keys.find_key(key.id)
    assert keys.drop(key.id)
    assert keys.check(renewed) is None
    assert keys.check(other_text) == other


def test_a_new_key_may_have_every_scope_and_an_id_of_eight_characters():
    key, _ = new_key(PEPPER, "me", SCOPES, created=1.0)
    assert (key.scopes, len(key.id)) == (frozenset({"infer", "admin", "metrics"}), 8)


def test_a_ring_finds_keys_by_their_ids_with_their_names_and_limits():
    keys, plain, _ = ring()
    limited, _ = new_key(PEPPER, "limited", ("infer",), created=2.0, limits=KeyLimits(concurrency=2))
    keys.put(limited)
    ids = (plain.id, limited.id, "anonymous", "aaaaaaaa")
    assert [keys.find_key(one) for one in ids] == [plain, limited, None, None]
    assert [keys.get_limits(one) for one in ids] == [None, KeyLimits(concurrency=2), None, None]
    keys.anonymous = anonymous = create_anonymous_key(3.0)
    assert [keys.find_key(one) for one in ids] == [plain, limited, anonymous, None]
    assert keys.get_names() == {plain.id: "me", limited.id: "limited", "anonymous": "anonymous"}
    keys.put(replace(anonymous, name="a key of that id"))
    assert keys.find_key("anonymous") == replace(anonymous, name="a key of that id")


def test_clients_without_a_key_are_anonymous_where_that_is_allowed_and_wrong_keys_stay_wrong():
    keys, key, text = ring()
    keys.anonymous = anonymous = create_anonymous_key(3.0)
    assert anonymous == ApiKey("anonymous", "anonymous", frozenset({"infer"}), b"", 3.0)
    shown = ("", "sk-of-another-server", "mp_", text + "A", text)
    assert [keys.check(one) for one in shown] == [anonymous, anonymous, None, None, key]
    assert keys.refused == 2


@pytest.mark.parametrize(("length", "known"), [(256, True), (257, False)])
def test_a_text_longer_than_any_key_is_not_compared(length: int, known: bool):
    keys, key, _ = ring()
    text = f"mp_{key.id}_".ljust(length, "A").encode()
    keys.put(replace(key, digest=compute_digest(PEPPER, text)))
    assert (keys.check(text) is not None, keys.is_valid(text)) == (known, known)


def test_wrong_keys_take_no_memory():
    keys, _, text = ring()
    keys.check(text)
    tracemalloc.start()
    try:
        for number in range(2000):
            keys.check(f"mp_{number}_wrong")
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 20_000


@pytest.mark.parametrize(
    ("header", "session"),
    [
        (None, ""),
        (b"", ""),
        (b" chat-7 ", "chat-7"),
        (b"caf\xe9", "caf\xe9"),
        (b"x" * MAX_SESSION_BYTES, "x" * MAX_SESSION_BYTES),
        (b"x" * (MAX_SESSION_BYTES + 1), ""),
    ],
)
def test_a_conversation_has_the_name_of_its_header_where_it_is_short_enough(header: bytes | None, session: str):
    assert parse_session(header) == session
