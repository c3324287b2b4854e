"""Tokens, URIs, proofs and the short code."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire.identity import (
    NodeId,
    PeerIdentity,
    build_coordinator_uri,
    build_node_uri,
    compute_request_mac,
    compute_short_code,
    derive_token_key,
    is_valid_name,
    is_valid_request_id,
    new_token,
    parse_token,
    parse_uri,
)


def test_a_token_survives_its_text_and_pins_the_authority() -> None:
    token = new_token(b"authority")
    text = str(token)
    assert parse_token(f" {text}\n") == token
    assert text.startswith("mpj1.")
    assert len(text) == 93
    assert parse_token(text).pin == new_token(b"authority").pin != new_token(b"other").pin


@pytest.mark.parametrize(
    "text", ["", "mpj1", "mpj1.a.b.c", "mpj2." + "a" * 52 + ".aaaaaaaa." + "a" * 26, "sk-123", "\0"]
)
def test_parse_token_error_does_not_repeat_the_text(text: str) -> None:
    with pytest.raises(ValueError, match="cluster token create") as caught:
        parse_token(text)
    assert not text or text not in str(caught.value) or text == "mpj1"


def test_uris_name_the_role() -> None:
    node = NodeId("n-1")
    assert parse_uri(build_node_uri("c", node)) == PeerIdentity("c", node)
    assert parse_uri(build_coordinator_uri("c")) == PeerIdentity("c", None)
    for wrong in (
        "https://c/node/n",
        "cluster://c/node/",
        "cluster://c/",
        "cluster://c/node/a/b",
        "cluster://c/coordinator/x",
    ):
        assert parse_uri(wrong) is None


def test_the_mac_depends_on_secret_and_request() -> None:
    key = derive_token_key(b"s" * 16)
    assert compute_request_mac(key, b"csr") != compute_request_mac(key, b"other")
    assert compute_request_mac(key, b"csr") != compute_request_mac(derive_token_key(b"t" * 16), b"csr")


@given(st.lists(st.binary(max_size=40), min_size=4, max_size=4), st.integers(0, 3))
def test_the_code_changes_with_every_part_and_has_six_digits(parts: list[bytes], index: int) -> None:
    code = compute_short_code(*parts)
    assert len(code) == 6
    assert code.isdecimal()
    codes = {
        compute_short_code(*[part + os.urandom(8) if i == index else part for i, part in enumerate(parts)])
        for _ in range(5)
    }
    assert len(codes | {code}) >= 4


def test_short_code_is_the_same_on_both_screens_whatever_their_version() -> None:
    assert compute_short_code(b"authority", b"request", b"one", b"two") == "844513"


def test_names_are_safe_to_print() -> None:
    assert is_valid_name("Studio A.local")
    for wrong in ("", " a", "a\n", "<b>", "ü", "a" * 64, "a\x1b[0m", "-a"):
        assert not is_valid_name(wrong)
    assert is_valid_request_id("req-1._x")
    assert not is_valid_request_id("a b")
    assert not is_valid_request_id("a" * 65)
