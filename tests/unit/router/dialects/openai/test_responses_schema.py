"""Values that the schema of `/v1/responses` accepts or refuses."""

import json

import pytest

from router.dialects.openai.responses import ResponsesRoute
from router.errors import Problem


def text(kind: str) -> list[dict[str, object]]:
    return [{"role": "user", "content": [{"type": kind, "text": "hi"}]}]


def think(kind: str) -> list[dict[str, object]]:
    return [*text("text"), {"type": "reasoning", "content": [{"type": kind, "text": "hm"}]}]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": text("input_text")}, None),
        ({"input": text("text")}, None),
        ({"input": text("output_text")}, None),
        ({"input": [{"role": "developer", "content": "hi"}]}, None),
        ({"input": [{"role": "robot", "content": "hi"}]}, "input[0].role"),
        ({"input": think("summary_text")}, None),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, None),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"text": {"verbosity": "high"}}, None),
        ({"metadata": {"a": "x" * 512}}, None),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"reasoning": {"summary": "detailed", "effort": "max"}}, None),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ],
)
def test_a_wrong_value_is_refused_by_its_path(fields: dict[str, object], param: str | None):
    body: dict[str, object] = {"model": "tiny", "input": "hi"}
    found = ResponsesRoute().parse(json.dumps(body | fields).encode(), "k")
    assert (found.param if isinstance(found, Problem) else None) == param
