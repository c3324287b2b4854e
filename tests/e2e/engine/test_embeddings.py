"""A real pool with a chat model, an embedding model and a reranker: routes, kinds and accounting from end to end."""

import base64
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import openai
import pytest

from tests.models import EMBEDDED
from tests.support.cluster.engine_pool import MLX, api, counts, greets, link
from tests.support.engine.embedders import make_embedder, make_reranker
from tests.support.processes import NO_TLS, Pool, pool, until

TEXTS = ["hello", "a longer text about rivers", "x" * 800]


@pytest.fixture(scope="module")
def made() -> Iterator[Pool]:
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as one:
        place = link(Path(folder) / "models", chat=EMBEDDED)
        make_embedder(place / "vectors")
        make_reranker(place / "scores")
        one.up()
        one.join("studio", *MLX, f"models.folders={place}")
        until(lambda: len(one.get("/v1/models")["data"]) == 3, what="all models")
        yield one


def test_vectors_of_a_pool(made: Pool):
    client = api(made)
    answer = client.embeddings.create(model="vectors", input=TEXTS)
    rows = np.array([row.embedding for row in answer.data], np.float32)
    raw = client.embeddings.create(model="vectors", input=TEXTS, encoding_format="base64")
    same = [np.frombuffer(base64.b64decode(str(row.embedding)), np.float32) for row in raw.data]
    assert np.stack(same) == pytest.approx(rows, abs=1e-6)
    assert np.linalg.norm(rows, axis=1) == pytest.approx(1.0, abs=1e-6)
    assert counts(made, "studio")["refusals"] == 0
    assert answer.usage.prompt_tokens > len(TEXTS)
    assert greets(client, "chat")


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank"])
def test_scores_of_a_pool(made: Pool, path: str):
    headers = {"Authorization": f"Bearer {made.key}"}
    body = {"model": "scores", "query": "which river?", "documents": TEXTS, "top_n": 2, "max_tokens_per_doc": 99}
    answer = httpx.post(made.base + path, json=body, headers=headers, trust_env=False, verify=NO_TLS, timeout=60).json()
    first, second = answer["results"]
    assert 1 > first["relevance_score"] >= second["relevance_score"] > 0
    assert counts(made, "studio")["refusals"] == 0


def test_kinds_are_known_and_respected(made: Pool):
    client = api(made)
    kinds = {row["name"]: row["kind"] for row in made.get("/api/v1/models")["models"]}
    assert kinds == {"chat": "chat", "vectors": "embed", "scores": "rerank"}
    with pytest.raises(openai.BadRequestError, match="/v1/embeddings"):
        client.chat.completions.create(model="vectors", messages=[{"role": "user", "content": "hello"}])
    with pytest.raises(openai.BadRequestError, match="/v1/chat/completions"):
        client.embeddings.create(model="chat", input="hello")
    with pytest.raises(openai.BadRequestError, match="cannot be shortened"):
        client.embeddings.create(model="vectors", input="hello", dimensions=16)
