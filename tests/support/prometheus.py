"""A real Prometheus over a real pool: Debian's program, on a free port, with its data in a temporary folder."""

import json
import os
import shutil
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import environment, until

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def needs(program: str) -> None:
    """Skip where a program of Debian's package is missing."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed: Debian's package prometheus has it")


@dataclass(frozen=True, slots=True)
class Prometheus:
    """A running Prometheus."""

    url: str
    log: Path

    def api(self, path: str, **query: str | float) -> Any:
        """Query the HTTP API of Prometheus and return the data. Raise AssertionError with the message of a refusal."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        try:
            with OPENER.open(url, timeout=10) as answer:
                return json.loads(answer.read())["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{url}: {error.read().decode()}") from None

    def value(self, query: str) -> list[dict[str, Any]]:
        """Evaluate a query now."""
        return self.api("query", query=query)["result"]

    def up(self) -> dict[str, str]:
        """Return `up` of every target, by its node; the coordinator's by its job."""
        return {one["metric"].get("node", one["metric"]["job"]): one["value"][1] for one in self.value("up")}

    def firing(self) -> set[str]:
        """Return the names of the firing alerts."""
        return {one["labels"]["alertname"] for one in self.api("alerts")["alerts"] if one["state"] == "firing"}


def free_port() -> int:
    """Return a port that is free now, because the program accepts no open socket."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def prometheus(folder: Path, configuration: str, *beside: Path) -> Iterator[Prometheus]:
    """Run Prometheus for the time of the block, with copies of other files next to its configuration."""
    needs("prometheus")
    folder.mkdir()
    file, port, log = folder / "prometheus.yml", free_port(), folder / "prometheus.log"
    file.write_text(configuration)
    for other in beside:
        shutil.copy(other, folder)
    command = [
        "prometheus",
        f"--config.file={file}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--storage.tsdb.retention.time=1h",
        "--log.level=warn",
    ]
    with log.open("wb") as errors:
        running = subprocess.Popen(
            command, stdout=errors, stderr=errors, stdin=subprocess.DEVNULL, env=environment(), cwd=folder
        )
    made = Prometheus(f"http://127.0.0.1:{port}", log)
    try:
        until(lambda: _ready(made, running), what="Prometheus ready")
        yield made
    finally:
        running.terminate()
        try:
            running.wait(20)
        except subprocess.TimeoutExpired:
            running.kill()
            running.wait()


def _ready(made: Prometheus, running: subprocess.Popen[bytes]) -> bool:
    assert running.poll() is None, made.log.read_text()
    try:
        with OPENER.open(f"{made.url}/-/ready", timeout=2) as answer:
            return answer.status == 200
    except OSError:
        return False


def token_file(folder: Path, token: str) -> Path:
    """Write a token where Prometheus reads it."""
    file = folder / "scrape.token"
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
        out.write(token)
    return file
