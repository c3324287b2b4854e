from hypothesis import given
from hypothesis import strategies as st

from wire.bonjour_record import (
    BonjourRecord,
    build_instance_name,
    from_txt,
    get_shown_name,
    rank_addresses,
    sanitize_text,
    shorten_cluster_id,
    to_txt,
)
from wire.identity import SERVICE_TYPE

ADVERT = BonjourRecord("coord", "0123456789ab", "0.1.0", "fedcba9876543210")


def test_a_record_is_read_as_it_was_written() -> None:
    txt: dict[bytes, bytes | None] = {key.encode(): value.encode() for key, value in to_txt(ADVERT).items()}
    assert from_txt(txt) == ADVERT
    assert sum(len(key) + len(value or b"") + 2 for key, value in txt.items()) < 400
    assert from_txt({**txt, b"unknown": b"\xff", b"flag": None}) == ADVERT


def test_from_txt_ignores_invalid_records() -> None:
    good: dict[bytes, bytes | None] = {key.encode(): value.encode() for key, value in to_txt(ADVERT).items()}
    for key, value in {b"role": b"king", b"cid": b"<script>", b"fp": b"\xff", b"pv": b"-1"}.items():
        assert from_txt({**good, key: value}) is None
    assert from_txt({}) is None


@given(st.dictionaries(st.sampled_from([b"role", b"cid", b"pv", b"v", b"fp", b"x"]), st.none() | st.binary()))
def test_garbage_never_crashes(txt: dict[bytes, bytes | None]) -> None:
    from_txt({b"role": b"new", b"pv": b"1", **txt})


@given(st.text(), st.text())
def test_a_name_from_the_network_is_safe_and_short(name: str, identity: str) -> None:
    instance = build_instance_name(name, identity)
    assert len(instance.removesuffix("." + SERVICE_TYPE).encode()) <= 63
    shown = get_shown_name(name)
    assert 0 < len(shown) <= 63
    assert shown.isascii()
    assert shown.isprintable()
    assert not set(shown) & set("<>&\"'\\`\x1b")


def test_bonjour_names_are_sanitized_and_shortened() -> None:
    assert build_instance_name("Mac Studio", "0123-4567") == "Mac Studio-012345._macpool._tcp.local."
    assert get_shown_name("Mac Studio-012345._macpool._tcp.local.") == "Mac Studio-012345"
    assert sanitize_text("\x1b[31mred<b>") == "??31mred?b?"
    assert shorten_cluster_id("0F0e0d0c-1111-2222") == "0f0e0d0c1111"


def test_addresses_are_ranked_and_unreachable_ones_are_left_out() -> None:
    found = [
        ("lo0", "127.0.0.1"),
        ("en0", "fe80::1"),
        ("docker0", "172.17.0.1"),
        ("utun4", "100.64.0.1"),
        ("awdl0", "169.254.7.7"),
        ("bridge100", "192.168.64.1"),
        ("bridge0", "169.254.1.2"),
        ("en1", "8.8.8.8"),
        ("en0", "192.168.1.7"),
        ("en0", "fd00::7"),
        ("en0", "not an address"),
        ("en5", "10.0.0.7"),
    ]
    assert rank_addresses(found) == ["10.0.0.7", "192.168.1.7", "169.254.1.2", "8.8.8.8", "fd00::7"]
    assert rank_addresses(found, "192.168.1.7")[:2] == ["192.168.1.7", "10.0.0.7"]
    assert rank_addresses(found, "8.8.8.8") == rank_addresses(found)
