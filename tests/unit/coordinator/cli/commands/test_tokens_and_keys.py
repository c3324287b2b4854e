"""Durations of tokens and keys."""

import click
import pytest

from coordinator.cli.commands.tokens_and_keys import Duration


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90.0), ("1.5h", 5400.0), ("30d", 2_592_000.0)])
def test_a_duration_is_converted_to_seconds(text: str, seconds: float) -> None:
    assert Duration().convert(text, None, None) == seconds


@pytest.mark.parametrize("text", ["nans", "infd", "-1h", "0s", "5", "h", "", "1w"])
def test_a_text_that_is_no_finite_duration_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a duration"):
        Duration().convert(text, None, None)
