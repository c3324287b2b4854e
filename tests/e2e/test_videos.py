"""Videos over a pool of real processes: the SDK, the coordinator, Ray, nodes, the real engine on a tiny package."""

import hashlib
import json
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.support.processes import Pool, environment, until
from tests.support.studio import flat

pytestmark = [
    pytest.mark.slow, pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]  # fmt: skip
SMALL: dict[str, Any] = {"model": "tiny-wan", "prompt": "a red fox", "size": "64x48"}
QUICK = {"frames": 9, "fps": 8, "steps": 4, "seed": 1}
LONG = {**QUICK, "steps": 400}
LEASE = 36 * 2**30


def settings(ports: int) -> list[str]:
    made = flat(worker__ray_ports=ports, node__report_busy=0.2)
    return [f"{key}={json.dumps(value) if not isinstance(value, str) else value}" for key, value in made.items()]


@pytest.fixture
def videos(cluster_pool: Pool) -> Iterator[Pool]:
    yield cluster_pool


def up(pool: Pool, *names: str, **more: Any) -> openai.OpenAI:
    """Start a coordinator and nodes; give a client once Ray is up on all of them."""
    extra = [f"video.{key}={value}" for key, value in more.items()]
    pool.up("video.ray_port=0", "video.max_steps=1000", *extra)
    for number, name in enumerate(names or ("a",)):
        pool.join(name, *settings(21000 + 100 * number))
    for name in names or ("a",):
        until(lambda: video(pool, name)["ray"], 120, f"Ray on {name}")  # noqa: B023  asked at once
    direct = httpx.Client(trust_env=False, timeout=60)
    return openai.OpenAI(base_url=pool.facts["base_url"], api_key=pool.key, max_retries=0, http_client=direct)


def video(pool: Pool, name: str) -> dict[str, Any]:
    return pool.node(name)["video"]


def test_a_job_from_the_library_to_a_file(videos: Pool):
    client = up(videos)
    made = client.videos.create_and_poll(**SMALL, extra_body=QUICK, poll_interval_ms=200)
    assert made.status == "completed", made
    data = client.videos.download_content(made.id).read()
    assert data[4:8] == b"ftyp"
