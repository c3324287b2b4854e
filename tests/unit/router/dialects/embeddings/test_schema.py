"""Values that the schema of `/v1/embeddings` accepts or refuses."""

import json

import pytest

from router.dialects.embeddings.api import EmbeddingsRoute
from router.errors import Problem


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": ["a"] * 2048}, None),
        ({"input": ["a"] * 2049}, "input"),
        ({"encoding_format": "base64"}, None),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"dimensions": 1}, None),
        ({"dimensions": 0}, "dimensions"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_wrong_value_is_refused_by_its_path(fields: dict[str, object], param: str | None):
    body: dict[str, object] = {"model": "tiny", "input": "hi"}
    found = EmbeddingsRoute().parse(json.dumps(body | fields).encode(), "k")
    assert (found.param if isinstance(found, Problem) else None) == param
