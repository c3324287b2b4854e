"""Fields of several dialects: the options of a stream."""

import pytest

from router.dialects.shared.common_fields import SamplingFields, parse_stream_options
from router.errors import Problem


@pytest.mark.parametrize(
    ("options", "has_usage"),
    [
        (None, False),
        ({}, False),
        ({"include_usage": None}, False),
        ({"include_usage": False}, False),
        ({"include_usage": True}, True),
        ({"include_usage": True, "include_obfuscation": False}, True),
    ],
    ids=str,
)
def test_a_stream_has_its_usage_only_where_it_is_requested(options: dict[str, bool | None] | None, has_usage: bool):
    body = SamplingFields.model_validate({"stream": True, "stream_options": options})
    assert parse_stream_options(body) is has_usage


def test_padding_of_a_stream_is_refused_by_name():
    fields = {"stream": True, "stream_options": {"include_obfuscation": True}}
    found = parse_stream_options(SamplingFields.model_validate(fields))
    assert isinstance(found, Problem)
    assert (found.status, found.param) == (400, "stream_options.include_obfuscation")


def test_options_of_a_stream_have_no_effect_without_one():
    """Gateways add the options also to requests without a stream."""
    for options in ({"include_usage": True}, {"include_obfuscation": True}):
        assert parse_stream_options(SamplingFields.model_validate({"stream_options": options})) is False
