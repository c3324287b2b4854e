"""Fields of several dialects: the options of a stream."""

import pytest
from pydantic import ValidationError

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


@pytest.mark.parametrize(
    ("name", "valid", "invalid"),
    [
        ("temperature", (0, 2), (-0.1, 2.1)),
        ("top_p", (0, 1), (-0.1, 1.1)),
        ("top_k", (-1, 2**31 - 1), (-2, 2**31)),
        ("min_p", (0, 1), (-0.1, 1.1)),
        ("presence_penalty", (-2, 2), (-2.1, 2.1)),
        ("frequency_penalty", (-2, 2), (-2.1, 2.1)),
        ("repetition_penalty", (0.1, 10), (0, 10.1)),
        ("repeat_penalty", (0.1, 10), (0, 10.1)),
        ("n", (1, 16), (0, 17)),
        ("seed", (-(2**63 - 1), 2**63 - 1), (-(2**63), 2**63)),
        ("stop", ("x" * 512, ["x"] * 16), ("x" * 513, ["x"] * 17)),
        ("logit_bias", ({"0": -100}, {"999999999": 100}), ({"0": -101}, {"0": 101}, {"01": 1}, {"-1": 1})),
    ],
)
def test_parameters_are_accepted_up_to_their_limits(name: str, valid: tuple[object, ...], invalid: tuple[object, ...]):
    for value in valid:
        assert SamplingFields.model_validate({name: value}).model_fields_set == {name}
    for value in invalid:
        with pytest.raises(ValidationError):
            SamplingFields.model_validate({name: value})
