"""Answers with embeddings, value by value."""

import base64
import json
import struct

import msgspec

from router.dialects.embeddings.response import encode_embeddings, encode_ollama_embed, encode_ollama_embedding
from router.dialects.openai.chat import ChatRoute
from router.dispatch.request import CompleteAnswer
from tests.support.answers import FINISHED, asked

NUMBERS = ((0.5, -2.0), (1.25, 0.0))
VECTORS = tuple(struct.pack("<2f", *numbers) for numbers in NUMBERS)
ANSWER = CompleteAnswer({}, {}, {}, "vectors-1", VECTORS)
ENDED = msgspec.structs.replace(FINISHED, completion_tokens=0)
SPEC = asked(ChatRoute(), messages=[{"role": "user", "content": "x"}])[1]
"""Only the name of the model is read."""


def test_an_answer_of_openai_has_every_vector_in_its_place_as_numbers_or_bytes():
    found = json.loads(encode_embeddings(SPEC, ANSWER, ENDED, as_base64=False))
    assert found == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [0.5, -2.0]},
            {"object": "embedding", "index": 1, "embedding": [1.25, 0.0]},
        ],
        "model": "tiny",
        "usage": {"prompt_tokens": 20, "total_tokens": 20},
    }
    rows = json.loads(encode_embeddings(SPEC, ANSWER, ENDED, as_base64=True))["data"]
    assert [base64.b64decode(row["embedding"]) for row in rows] == list(VECTORS)


def test_an_answer_of_ollama_has_its_duration_in_nanoseconds():
    assert json.loads(encode_ollama_embed(SPEC, ANSWER, ENDED)) == {
        "model": "tiny",
        "embeddings": [[0.5, -2.0], [1.25, 0.0]],
        "total_duration": 1_750_000_000,
        "load_duration": 0,
        "prompt_eval_count": 20,
    }
    assert json.loads(encode_ollama_embedding(SPEC, ANSWER, ENDED)) == {"embedding": [0.5, -2.0]}
