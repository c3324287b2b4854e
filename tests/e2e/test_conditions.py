"""A condition is reported within half a minute: by a real Prometheus, by the API, by `cluster status`, by webhook.

The gate of a live node is neutered: its engine runs from a copy of the packages that skips the gate.
"""

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from coordinator.alerts.rules import render_rules_file
from coordinator.metrics.scrape_config import render_configuration
from tests.support.cluster.engine_pool import said
from tests.support.processes import NO_TLS, ROOT, Pool, environment, pool, until
from tests.support.prometheus import needs, prometheus, token_file

pytestmark = pytest.mark.slow

ASKED = "        self.checks[site] += 1\n"
NEUTERED = "        return Fits(0, 0)\n" + ASKED
WITHIN = 30.0


@pytest.fixture
def hook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    got: list[dict[str, Any]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/hook", got
    server.shutdown()
    thread.join()
    server.server_close()


def neutered(folder: Path) -> Path:
    """Copy the packages, with a gate that is never really checked. Bytecode is copied, and valid but for the gate."""
    for package in ("coordinator", "host", "node", "router", "simulation", "wire"):
        shutil.copytree(ROOT / package, folder / package)
    gate = folder / "node" / "engine" / "memory" / "gate.py"
    text = gate.read_text()
    assert text.count(ASKED) == 1
    gate.write_text(text.replace(ASKED, NEUTERED))
    return folder


def test_a_disarmed_gate_raises_an_alert_within_half_a_minute(tmp_path: Path, hook: tuple[str, list[dict[str, Any]]]):
    needs("prometheus")
    url, got = hook
    with pool(tmp_path) as made:
        made.up(f"alerts.webhook_url={url}")
        made.join(
            "broken", "node.report_idle_seconds=0.5", env=environment(PYTHONPATH=str(neutered(tmp_path / "copy")))
        )
        key = made.create_key("prometheus", "metrics")
        rules = tmp_path / "rules.yml"
        rules.write_text(render_rules_file())
        text = render_configuration(made.base, str(token_file(tmp_path, key))).replace("interval: 15s", "interval: 5s")
        with prometheus(tmp_path / "prometheus", text, rules) as found:
            until(lambda: found.up() == {"macpool": "1", "broken": "1"}, 40, "all is scraped")
            assert made.cli("status")["conditions"] == []
            assert found.firing() == set()
            stop = threading.Event()
            asking = threading.Thread(target=_ask_until, args=(made, stop))
            asking.start()
            try:
                until(lambda: "GateInert" in _holding(made), WITHIN, "the coordinator tells")
                until(lambda: "GateInert" in found.firing(), WITHIN, "Prometheus tells")
            finally:
                stop.set()
                asking.join(30)
        until(lambda: got, 10, "the webhook was told")
        assert (got[0]["name"], got[0]["node"], got[0]["event"]) == ("GateInert", "broken", "began")
        told = {one["key"]: one["value"] for one in made.get("/api/v1/settings")["settings"]}
        assert told["alerts.webhook_url"] == "http://127.0.0.1/…", "the path of a webhook URL may be a secret"
        text = made.run("status", "--state", str(made.state)).stdout
        assert "GateInert: broken runs forward passes without a check by its gate" in text
        made.join("open", "memory.guard=off")
        until(lambda: "GuardOff" in _holding(made), 30, "the guard that is off, too")
        (one,) = [one for one in made.get("/api/v1/conditions")["conditions"] if one["name"] == "GuardOff"]
        assert (one["node"], one["severity"]) == ("open", "critical")
        for node in ("broken", "open"):
            made.nodes[node].stop()
        until(lambda: _holding(made) == set(), 30, "who said goodbye is not missed")
        until(lambda: len(got) == 4, 10, "the webhook was told of both ends")
        assert {(one["name"], one["event"]) for one in got} == {
            (name, event) for name in ("GateInert", "GuardOff") for event in ("began", "ended")
        }


def _holding(made: Pool) -> set[str]:
    return {one["name"] for one in made.get("/api/v1/conditions")["conditions"]}


def _ask_until(made: Pool, stop: threading.Event) -> None:
    body = {"model": "scripted-1", "messages": said("hello"), "max_tokens": 5}
    headers = {"authorization": f"Bearer {made.key}"}
    with httpx.Client(trust_env=False, verify=NO_TLS, timeout=20) as client:
        while not stop.wait(0.2):
            client.post(made.base + "/v1/chat/completions", json=body, headers=headers).raise_for_status()
