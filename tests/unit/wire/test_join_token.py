"""Join tokens and their proofs."""

import pytest

from wire.join_token import compute_request_mac, derive_token_key, new_token, parse_token


def test_a_join_token_survives_its_text_and_pins_the_ca() -> None:
    token = new_token(b"authority")
    text = str(token)
    assert parse_token(f" {text}\n") == token
    assert text.startswith("mpj1.")
    assert len(text) == 93
    assert parse_token(text).pin == new_token(b"authority").pin != new_token(b"other").pin


@pytest.mark.parametrize(
    "text", ["", "mpj1", "mpj1.a.b.c", "mpj2." + "a" * 52 + ".aaaaaaaa." + "a" * 26, "sk-123", "\0"]
)
def test_parse_token_refuses_other_texts_without_repeating_them(text: str) -> None:
    with pytest.raises(ValueError, match="cluster token create") as caught:
        parse_token(text)
    assert not text or text not in str(caught.value) or text == "mpj1"


def test_compute_request_mac_depends_on_secret_and_request() -> None:
    key = derive_token_key(b"s" * 16)
    assert compute_request_mac(key, b"csr") != compute_request_mac(key, b"other")
    assert compute_request_mac(key, b"csr") != compute_request_mac(derive_token_key(b"t" * 16), b"csr")
