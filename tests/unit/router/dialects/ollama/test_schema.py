"""Values that the schema of Ollama's routes accepts or refuses."""

import json

import pytest

from router.dialects.ollama.api import OllamaChatRoute
from router.errors import Problem

HELLO = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"format": ""}, None),
        ({"format": "json"}, None),
        ({"format": "yaml"}, "format"),
        ({"think": "max"}, None),
        ({"think": "huge"}, "think"),
        ({"messages": [HELLO | {"images": []}]}, None),
        ({"messages": [HELLO | {"images": ["x"]}]}, "messages[0].images"),
        ({"messages": [HELLO | {"role": "developer"}]}, None),
        ({"messages": [HELLO | {"role": "robot"}]}, "messages[0].role"),
        ({"options": {"temperature": 2.1}}, "options.temperature"),
        ({"options": {"num_predict": -1, "top_k": 0}}, None),
    ],
)
def test_a_wrong_value_is_refused_by_its_path(fields: dict[str, object], param: str | None):
    body: dict[str, object] = {"model": "tiny", "messages": [HELLO]}
    found = OllamaChatRoute().parse(json.dumps(body | fields).encode(), "k")
    assert (found.param if isinstance(found, Problem) else None) == param
