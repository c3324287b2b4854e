"""Encoding of the answers of the control routes."""

import json
import time
from pathlib import Path

import httpx

from router.errors import build_invalid
from tests.support.cluster.application import application

REQUESTS = 500


async def test_a_long_answer_takes_the_loop_a_small_multiple_of_the_time_to_parse_it(tmp_path: Path):
    """No token arrives while an answer is encoded."""
    async with application(tmp_path) as built:
        for number in range(REQUESTS):
            built.dispatcher.history.record_invalid(0.0, f"r{number}", "k", build_invalid("no"))
        key = built.admin.create_key("boss", ["admin"], None)["key"]
        transport = httpx.ASGITransport(app=built.app)
        encoded, parsed = list[float](), list[float]()
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers={"authorization": f"Bearer {key}"}
        ) as client:
            for _ in range(4):  # the first request builds the route
                began = time.thread_time()
                answer = await client.get("/api/v1/requests", params={"last": REQUESTS})
                encoded.append(time.thread_time() - began)
                began = time.thread_time()
                assert len(json.loads(answer.content)["requests"]) == REQUESTS
                parsed.append(time.thread_time() - began)
    assert min(encoded) < 12 * min(parsed), (encoded, parsed)
