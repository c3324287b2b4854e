"""Sizes in the notation of users."""

import pytest

from wire.units import GIB, parse_size, show_count, show_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("96GiB", 96 * GIB),
        ("12 GB", 12 * 10**9),
        ("0.29GB", 290_000_000),
        ("80%", 800),
        ("0", 0),
        ("1.5KiB", 1536),
        (77, 77),
        ("5b", 5),
    ],
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_size(text, total=1000) == size


@pytest.mark.parametrize("text", ["", "GiB", "12 parsecs", "-1GiB", "1e9", "nan", "101%", -5])
def test_parse_size_refuses_invalid_text(text: str | int) -> None:
    with pytest.raises(ValueError):
        parse_size(text, total=1000)


def test_a_size_may_have_more_digits_than_a_float() -> None:
    assert 9 * 10**399 <= parse_size("9" * 400 + ".5") < 10**401


def test_a_percentage_needs_a_whole() -> None:
    with pytest.raises(ValueError, match="needs a known total"):
        parse_size("80%")


def test_show_size_has_a_unit() -> None:
    assert [show_size(s) for s in (None, 0, 2048, 3 * 1024**2, 31 * GIB, -GIB)] == [
        "-",
        "0.0 MiB",
        "2.0 KiB",
        "3.0 MiB",
        "31.0 GiB",
        "-1.0 GiB",
    ]


def test_show_count_has_the_right_number() -> None:
    assert [show_count(count, "open request") for count in (0, 1, 2)] == [
        "0 open requests",
        "1 open request",
        "2 open requests",
    ]
