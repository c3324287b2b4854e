"""Reasoning fields of other servers, combined with those of OpenAI, and variables of the chat template."""

import json
from typing import Any

import pytest

from router.admission.request_limits import MAX_VARIABLES_BYTES
from router.dialects.shared.template import combine_reasoning, encode_variables, get_reasoning_variables
from router.errors import Problem

NONE = {"thinking": None, "think": None, "reasoning": None}


@pytest.mark.parametrize(
    ("effort", "switch", "options", "combined"),
    [
        (None, None, {}, (None, None, ())),
        ("low", None, {}, ("low", None, ())),
        ("none", None, {}, ("none", False, ())),
        ("none", True, {}, ("none", True, ())),
        (None, False, {"thinking": True}, (None, False, ())),
        (None, None, {"thinking": True, "think": False}, (None, True, ())),
        (None, None, {"thinking": {"type": "disabled"}}, (None, False, ())),
        (None, None, {"thinking": "yes", "think": True}, (None, True, ("thinking",))),
        (None, None, {"reasoning": {"effort": "high"}}, ("high", None, ())),
        ("low", None, {"reasoning": {"effort": "high"}}, ("low", None, ())),
        (None, None, {"reasoning": {"effort": "huge"}}, (None, None, ("reasoning.effort",))),
        (None, None, {"reasoning": {"enabled": True}}, (None, True, ())),
        (None, False, {"reasoning": {"enabled": True}}, (None, False, ())),
        (None, None, {"think": False, "reasoning": {"enabled": True}}, (None, False, ())),
        (None, None, {"reasoning": {"effort": "none", "enabled": True}}, ("none", True, ())),
        (None, None, {"reasoning": {"effort": "none"}}, ("none", False, ())),
        (None, None, {"reasoning": "much"}, (None, None, ("reasoning",))),
        (None, None, {"reasoning": {"max_tokens": 9, "exclude": None}}, (None, None, ("reasoning.max_tokens",))),
    ],
)
def test_the_fields_of_openai_precede_those_of_other_servers(
    effort: str | None, switch: bool | None, options: dict[str, Any], combined: object
):
    assert combine_reasoning(effort, switch, NONE | options) == combined


def test_the_effort_none_turns_reasoning_off():
    assert get_reasoning_variables("none") == {"reasoning_effort": "none", "enable_thinking": False}
    assert get_reasoning_variables("low") == {"reasoning_effort": "low", "enable_thinking": None}


def test_variables_of_a_request_precede_those_of_its_other_fields():
    text = encode_variables({"enable_thinking": True}, enable_thinking=False, reasoning_effort="low", language=None)
    assert isinstance(text, str)
    assert json.loads(text) == {"enable_thinking": True, "reasoning_effort": "low"}
    assert encode_variables({}, language=None) == encode_variables(None) == ""


@pytest.mark.parametrize(
    ("variables", "param"),
    [
        ({"chat_template": "x"}, "chat_template_kwargs.chat_template"),
        ({"x" * 80: 1}, f"chat_template_kwargs.{'x' * 64}"),
        ({"persona": "x" * MAX_VARIABLES_BYTES}, "chat_template_kwargs"),
    ],
)
def test_unknown_and_long_variables_are_refused_by_name(variables: dict[str, Any], param: str):
    problem = encode_variables(variables)
    assert isinstance(problem, Problem)
    assert (problem.status, problem.param) == (400, param)
