"""Values that the schema of `/v1/messages` accepts or refuses."""

import json

import pytest

from router.dialects.anthropic.api import MessagesRoute
from router.errors import Problem

HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"name": "look", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role"),
        ({"messages": [*HELLO, {"role": "system", "content": "now"}]}, None),
        ({"tools": [TOOL | {"type": None}, TOOL | {"name": "b", "type": "custom"}]}, None),
        ({"tools": [TOOL], "tool_choice": {"type": "none"}}, None),
        ({"tools": [TOOL], "tool_choice": {"type": "some"}}, "tool_choice.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": -1}}, "thinking.budget_tokens"),
        ({"temperature": 1.0, "top_k": -1}, None),
        ({"max_tokens": -2}, "max_tokens"),
    ],
)
def test_a_wrong_value_is_refused_by_its_path(fields: dict[str, object], param: str | None):
    body: dict[str, object] = {"model": "tiny", "max_tokens": 9, "messages": HELLO}
    found = MessagesRoute().parse(json.dumps(body | fields).encode(), "k")
    assert (found.param if isinstance(found, Problem) else None) == param
