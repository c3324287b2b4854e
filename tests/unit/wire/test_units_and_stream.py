"""Sizes as people write them, and urgent frames before long ones."""

import pytest

from wire.codec import Splitter, decode
from wire.frames import Answer, Cancel, Generate, Message, Params
from wire.stream import Outbox
from wire.units import GIB, parse_size, show_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("96GiB", 96 * GIB), ("12 GB", 12 * 10**9), ("80%", 800), ("0", 0), ("1.5KiB", 1536), (77, 77), ("5b", 5)],
)
def test_sizes_are_read(text: str | int, size: int) -> None:
    assert parse_size(text, whole=1000) == size


@pytest.mark.parametrize("text", ["", "GiB", "12 parsecs", "-1GiB", "1e9", "nan", "101%", -5])
def test_what_is_no_size_is_refused(text: str | int) -> None:
    with pytest.raises(ValueError):
        parse_size(text, whole=1000)


def test_a_percentage_needs_a_whole() -> None:
    with pytest.raises(ValueError, match="whole"):
        parse_size("80%")


def test_sizes_are_shown_with_their_unit() -> None:
    assert [show_size(s) for s in (None, 0, 2048, 3 * 1024**2, 31 * GIB, -GIB)] == [
        "-", "0.0 MiB", "2.0 KiB", "3.0 MiB", "31.0 GiB", "-1.0 GiB",
    ]  # fmt: skip


def test_short_frames_go_at_once_and_long_ones_in_turns() -> None:
    outbox = Outbox()
    assert outbox.urgent(Cancel(1))
    assert outbox.urgent(Generate(1, 1, "r", "m", (Message("user", "x" * 100_000),), Params(), 0)) == b""
    outbox.later(Answer(5, b"y" * 10, last=number == 1) for number in range(2))
    assert outbox.waiting
    splitter, kinds = Splitter(), []
    while (piece := outbox.piece()) is not None:
        kinds += [type(decode(tag, body)).__name__ for tag, body in splitter.feed(piece)]
    assert kinds == ["Answer", "Answer", "Generate"]
    assert not outbox.waiting
