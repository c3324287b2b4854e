"""Arguments of `cluster video`."""

import click
import pytest

from coordinator.cli.commands.video.videos import parse_sizes


def test_sizes_are_a_list_of_width_and_height():
    assert parse_sizes("384x224, 832x480,") == ["384x224", "832x480"]


@pytest.mark.parametrize("text", ["", "384", "384x224,832", "384x", "x224", "384x224x3", "a", "-1x2"])
def test_a_size_without_width_or_height_is_refused(text: str):
    with pytest.raises(click.UsageError, match="is not a list of sizes"):
        parse_sizes(text)
