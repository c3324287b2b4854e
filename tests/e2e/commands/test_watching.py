"""Observation by a user: logs, events, the live page, Prometheus' files; and the secrets that none of them may
contain."""

import json
import os
import re
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster.engine_pool import MLX
from tests.support.processes import CLI, NO_TLS, Pool, environment, pool, until
from tests.support.prometheus import needs

pytestmark = pytest.mark.slow

PROMPT = "zebra-canary-7391 my secret diagnosis"
SYSTEM = "walrus-canary-4410"
WRONG_KEY = "mp_abcdefgh_" + "Q" * 43
ODD_KEY = "opensesame-canary-5521"


# Secrets that nothing prints


def bodies(text: str, model: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield path and body of a question in every dialect of chats, complete and as a stream, and of refused ones."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    few = {"model": model, "max_tokens": 8}
    for stream in (False, True):
        yield "/v1/chat/completions", {**few, "messages": messages, "stream": stream}
        yield "/v1/completions", {**few, "prompt": text, "stream": stream}
        yield "/v1/messages", {**few, "messages": messages[1:], "system": SYSTEM, "stream": stream}
        yield (
            "/v1/responses",
            {"model": model, "input": text, "instructions": SYSTEM, "max_output_tokens": 16, "stream": stream},
        )
        yield "/api/chat", {"model": model, "messages": messages, "stream": stream, "options": {"num_predict": 8}}
        yield "/api/generate", {"model": model, "prompt": text, "stream": stream, "options": {"num_predict": 8}}
    yield "/v1/messages/count_tokens", {"model": model, "messages": messages[1:]}
    yield "/v1/chat/completions", {**few, "messages": messages, "guided_regex": f"({text}"}
    yield "/v1/chat/completions", {**few, "messages": [{"role": text, "content": text}]}
    yield "/v1/chat/completions", {**few, "messages": messages, "temperature": text}
    yield "/v1/chat/completions", {**few, "messages": messages, "max_tokens": 0}
    yield "/v1/chat/completions", {**few, "messages": messages * 20}
    yield "/v1/chat/completions", {"model": "no-such-model", "messages": messages}


def everything_said(made: Pool) -> str:
    """Return all output of the pool: logs, screens, metrics, requests, events, and the output of commands."""
    files = [
        file
        for file in made.folder.rglob("*")
        if file.is_file() and (file.parent.name == "logs" or file.suffix == ".err")
    ]
    assert len(files) >= 7, files
    texts = [file.read_bytes().decode(errors="replace") for file in files]
    with httpx.Client(
        base_url=made.base, headers={"authorization": f"Bearer {made.secret}"}, trust_env=False, verify=NO_TLS
    ) as api:
        paths = [
            "/metrics",
            "/prometheus/sd",
            "/api/v1/requests?last=1000",
            "/api/v1/events?last=500",
            "/api/v1/logs",
            "/api/v1/nodes",
            "/api/v1/status",
            "/api/v1/conditions",
            "/api/v1/keys",
            "/api/v1/audit",
            "/api/v1/decisions",
        ]
        paths += [f"/prometheus/nodes/{node['id']}" for node in made.nodes_now() if node["state"] == "ready"]
        texts += [api.get(path).text for path in paths]
    texts += [made.run(verb, "--state", str(made.state)).stdout for verb in ("status", "top", "events", "logs")]
    return "\n".join(texts)


def test_no_output_contains_a_prompt_key_or_token(tmp_path: Path):
    with pool(tmp_path) as made:
        made.up("router.queue_timeout_seconds=2")
        made.join("one", "engine.scripted.crash=explode", "engine.scripted.refuse=forbidden")
        made.join("mlx", *MLX)
        token, refused = made.token(), list[str]()
        with httpx.Client(base_url=made.base, trust_env=False, verify=NO_TLS, timeout=60) as client:
            for model in ("scripted-1", "macpool-tiny"):
                for path, body in bodies(PROMPT, model):
                    answer = client.post(path, json=body, headers={"x-api-key": made.key})
                    refused += [answer.text] if answer.is_error else []
            for word in ("forbidden", "explode"):
                body = {"model": "scripted-1", "messages": [{"role": "user", "content": f"{PROMPT} {word}"}]}
                answer = client.post(
                    "/v1/chat/completions", json=body, headers={"x-api-key": made.key, "x-request-id": f"trace-{word}"}
                )
                refused.append(answer.text)
                assert answer.status_code >= 500
            for key in (WRONG_KEY, ODD_KEY, made.key + "x", token):
                for path in ("/v1/models", "/api/v1/status", "/metrics", f"/v1/models?api_key={key}"):
                    assert client.get(path, headers={"authorization": f"Bearer {key}"}).status_code == 401
            client.post(
                "/v1/chat/completions",
                content=f'{{"model": "x", "messages": "{PROMPT}'.encode(),
                headers={"x-api-key": made.key},
            )
        assert len(refused) > 6
        until(lambda: made.serves("one"), what="the engine is back")
        told = everything_said(made)
        for secret in (
            PROMPT,
            "zebra-canary",
            SYSTEM,
            made.key,
            made.secret,
            WRONG_KEY,
            ODD_KEY,
            token,
            made.facts["join"].split()[1],
        ):
            where = told.find(secret)
            assert where < 0, f"{secret[:12]} is told: …{told[max(0, where - 300) : where + 60]}…"
        assert not any(SYSTEM in one for one in refused)
        # the failure can still be traced from the client's own id to the engine's process
        lines = [json.loads(line) for line in (made.state / "logs" / "coordinator.log").read_text().splitlines()]
        (broken,) = [line for line in lines if line.get("request_id") == "trace-explode"]
        assert (broken["event"], broken["node"], broken["code"]) == ("request broken", "one", "engine_crashed")
        node = [json.loads(line) for line in (made.folder / "one" / "logs" / "node.log").read_text().splitlines()]
        assert any(broken["request"] in line.get("requests", ()) for line in node)
        assert any(line["event"] == "guards resolved" and line["tls"] == "off" for line in lines)
        assert any(line["event"] == "guard resolved" and line["guard"] == "on" for line in node)


# the verbs


@contextmanager
def following(made: Pool, *verb: str) -> Iterator[Callable[[str], object]]:
    """Run a verb that does not end; yield a function that waits for a text in its output."""
    output = made.folder / "output.txt"
    with output.open("wb") as out:
        running = subprocess.Popen(
            [*CLI, *verb, "--state", str(made.state)], stdout=out, stderr=out, env=environment(), cwd=made.folder
        )
    try:
        yield lambda text: until(lambda: text in output.read_text(), 20, f"{text!r} in {' '.join(verb)}")
    finally:
        running.send_signal(signal.SIGINT)
        running.wait(10)
        assert "Traceback" not in output.read_text()


def test_logs_and_events_are_followed(tmp_path: Path):
    with pool(tmp_path) as made:
        made.up()
        made.join("one")
        assert '"event": "ready"' in made.run("logs", "-o", "json", "--state", str(made.state)).stdout
        assert '"event": "linked"' in made.run("logs", "one", "-o", "json", "--state", str(made.state)).stdout
        shown = made.run("logs", "--state", str(made.state)).stdout
        assert re.search(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  info     ready  ", shown, re.MULTILINE)
        events = made.run("events", "-o", "json", "--last", "500", "--state", str(made.state)).stdout.splitlines()
        assert len(set(events)) == len(events), "each event once"
        with following(made, "events", "-f", "--last", "5") as sees:
            sees("node state")
            made.join("two")
            sees("node enrolled")
            sees("name=two")
        with following(made, "logs", "-f") as sees:
            made.nodes["two"].stop()
            sees("node signed off")
        with following(made, "logs", "one", "-f") as sees:
            with (tmp_path / "one" / "logs" / "node.log").open("ab") as file:
                file.write(b'{"event": "a line of later"}\n')
            sees("a line of later")
        told = made.run("events", "-o", "json", "--last", "3", "--state", str(made.state)).stdout.splitlines()
        assert len([json.loads(line) for line in told]) == 3
        assert made.run("logs", "nobody", "--state", str(made.state)).returncode == 5


def test_missed_events_and_the_picture_of_every_node(tmp_path: Path):
    """Events after a break of the connection, and `cluster top` with a condition."""
    with pool(tmp_path) as made:
        made.up()
        headers = {"authorization": f"Bearer {made.secret}"}
        with httpx.Client(base_url=made.base, headers=headers, trust_env=False, verify=NO_TLS, timeout=20) as client:
            first = client.get("/api/v1/events?last=1").text
            number = int(first.split("id: ")[1].split("\n")[0])
            made.join("one", "memory.guard=off")
            missed = client.get("/api/v1/events?last=1", headers={"last-event-id": str(number)}).text
            assert next(line for line in missed.splitlines() if line.startswith("id: ")) == f"id: {number + 1}"
            assert '"node enrolled"' in missed
            assert client.get("/api/v1/events", headers={"last-event-id": "9" * 400}).status_code == 200
        made.join("two")
        until(lambda: made.get("/api/v1/conditions")["conditions"], 20, "a condition")
        shown = made.run("top", "--once", "--state", str(made.state)).stdout
        assert "GuardOff" in shown
        assert "one" in shown
        assert "1 of 1" in shown
        assert "█" in shown
        assert len(made.cli("top")["nodes"]) == 2


def test_what_prometheus_needs_is_written_for_its_owner_alone(tmp_path: Path):
    needs("promtool")
    with pool(tmp_path) as made:
        made.up("http.tls=on")
        answer = made.cli("metrics-config", "--folder", str(tmp_path / "p"))
        folder, token = Path(answer["folder"]), Path(answer["token_file"])
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        done = subprocess.run(["promtool", "check", "config", answer["config"]], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        written = Path(answer["config"]).read_text()
        assert "rule_files: ['rules.yml']" in written, "the folder can be mounted elsewhere"
        assert written.count("credentials_file: 'macpool.token'") == 3
        assert written.count("ca_file: 'macpool-ca.pem'") == 3
        assert str(folder) not in written
        assert f"- targets: ['{made.base.partition('://')[2]}']" in written
        assert f"runbook_url: '{made.base}/#/runbook/NodeDown'" in (folder / "rules.yml").read_text()
        made.cli("metrics-config", "--folder", str(tmp_path / "p"), "--host", "host.docker.internal")
        port = made.base.rpartition(":")[2]
        assert f"'https://host.docker.internal:{port}/prometheus/sd'" in Path(answer["config"]).read_text()
        assert token.read_text() not in Path(answer["config"]).read_text() + json.dumps(answer)
        first = token.read_text()
        made.cli("metrics-config", "--folder", str(tmp_path / "p"))
        assert token.read_text() == first
        made.cli("metrics-config", "--folder", str(tmp_path / "p"), "--renew")
        assert token.read_text() != first
        (scopes,) = {tuple(key["scopes"]) for key in made.cli("key", "list")["keys"] if key["name"] == "prometheus"}
        assert scopes == ("metrics",)
        printed = made.run("metrics-config", "--state", str(made.state)).stdout
        assert "job_name: macpool-nodes" in printed
        with suppress(FileNotFoundError):
            assert os.stat(made.state / "prometheus" / "macpool.token").st_mode & 0o077 == 0
