"""Time from a bare checkout to an answer of a second node.

A new user types three commands: install, `cluster up` (which starts a node of its own), and `cluster join` with the
printed line. All downloads are in uv's cache before the clock starts. The time therefore covers only our own work:
building, installing, starting, joining, loading the model, and the first token.
"""

import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from openai import DefaultHttpxClient, OpenAI

from tests.bench.row import Row, commit
from tests.support.cluster.engine_pool import HELLO
from tests.support.processes import ROOT, Process, environment

AT_ONCE = 32
"""Requests at once. A fast first node answers eight alone, because the second node would have to load the model."""


def bench_begin(folder: Path) -> list[Row]:
    """Time the three commands, after an install that fills the cache."""
    _install(folder / "warm")
    began = time.monotonic()
    command = _install(folder / "new")
    installed = time.monotonic()
    quiet = ("--set", "cluster.bonjour=false", "--set", "models.use_huggingface_cache=false")
    up = Process(
        [
            str(command),
            "up",
            "--state",
            str(folder / "a"),
            "--listen",
            "127.0.0.1:0",
            "--cluster-listen",
            "127.0.0.1:0",
            "-o",
            "json",
            *quiet,
        ],
        folder / "up.err",
    )
    try:
        facts = up.ready()
        (folder / "token").write_text(facts["join"].split()[1])
        words = ["join", facts["cluster_url"], "--token-file", str(folder / "token")]
        joining = time.monotonic()
        second = Process(
            [
                str(command),
                *words,
                "--state",
                str(folder / "b"),
                "--name",
                "second",
                "-o",
                "json",
                "--set",
                "node.machine=second",
                *quiet,
            ],
            folder / "join.err",
        )
        try:
            second.ready()
            answered = _first_token(facts)
            whole, join = answered - began, answered - joining
        finally:
            second.close()
    finally:
        up.close()
    figure = f"{whole:.1f} s (install {installed - began:.1f}), 3 commands"
    return [
        Row("bare checkout to a token of a second node", "<= 120 s, <= 3 commands", figure, whole <= 120, commit()),
        Row("join to its first token", "<= 10 s", f"{join:.1f} s", join <= 10, commit()),
    ]


def _install(place: Path) -> Path:
    uv = ROOT / ".uv" / "bin" / "uv"
    words = [str(uv) if uv.exists() else "uv"]
    subprocess.run([*words, "venv", "--quiet", str(place)], check=True)
    command = [*words, "pip", "install", "--quiet", "--python", str(place / "bin" / "python"), f"{ROOT}[node]"]
    subprocess.run(command, check=True, env=environment())
    return place / "bin" / "cluster"


def _first_token(facts: dict[str, str]) -> float:
    """Send `AT_ONCE` requests at once until the node `second` has answered. Return when its first token came. Raise
    `RuntimeError` after 30 s."""
    direct = DefaultHttpxClient(trust_env=False, timeout=30)
    client = OpenAI(base_url=facts["base_url"], api_key=facts["api_key"], http_client=direct, max_retries=5)
    deadline = time.monotonic() + 30
    with ThreadPoolExecutor(AT_ONCE) as threads:
        while time.monotonic() < deadline:
            for node, first in threads.map(lambda _: _answer(client), range(AT_ONCE)):
                if node == "second":
                    return first
    raise RuntimeError("the second node sent no answer within 30 s")


def _answer(client: OpenAI) -> tuple[str, float]:
    """Stream one answer; return its node and when its first token came."""
    raw = client.chat.completions.with_raw_response.create(
        model="macpool-tiny", messages=[{"role": "user", "content": HELLO}], stream=True
    )
    first = 0.0
    for chunk in raw.parse():
        if not first and chunk.choices and chunk.choices[0].delta.content:
            first = time.monotonic()
    return raw.headers.get("x-macpool-node", ""), first
