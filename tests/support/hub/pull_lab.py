"""Pulls on isolated hosts: a coordinator and a node on the first, nodes on the second and third, a hub on the fourth.

Each node has a Hugging Face cache of its own. Counts come from the kernel: bytes that a host received, its listening
ports, and the descriptors of its processes.
"""

import json
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.models import EMBEDDED
from tests.support.cluster.hosts import Host, Hosts
from tests.support.hub.hub import Hub, serve_hub
from tests.support.processes import Pool, until

NAMES = ("one", "two", "three")
HUB_HOST, HUB_PORT = 4, 8000
TINY = {path.name: path.read_bytes() for path in EMBEDDED.iterdir() if path.is_file() and path.suffix != ".md"}
"""Files of a model that answers."""
PADDING = "vocab.txt"
"""File for repositories of any size: part of the identity of a model, but not read by the engine."""
NODE_SETTINGS = ("models.profile=off", "models.trial=false", "node.report_idle_seconds=0.2")


class PullLab:
    """The pool, the hub and the caches. `hosts` are four."""

    def __init__(self, hosts: Hosts, made: Pool, stack: ExitStack) -> None:
        self.hosts = hosts
        self.pool = made
        self.hub = Hub()
        self._coordinator = stack.enter_context(hosts[1].threads(2))
        self._hub_host = stack.enter_context(hosts[HUB_HOST].threads(1))
        self._stack = stack
        self._hub_stack = stack.enter_context(ExitStack())
        made.call = lambda ask: self._coordinator.submit(ask).result()
        self.start_hub()

    # processes

    def start_hub(self) -> None:
        """Start the hub, at the same address each time."""
        address = (self.hosts[HUB_HOST].ip, HUB_PORT)
        listener = self._hub_host.submit(lambda: socket.create_server(address)).result()
        self._hub_stack.enter_context(serve_hub(self.hub, listener))

    def stop_hub(self) -> None:
        """Close the port and all connections of the hub."""
        self._hub_stack.close()

    def up(self, *settings: str) -> None:
        """Start the coordinator, with the default ports and HTTPS."""
        self.pool.up(
            f"hub.endpoint={self.hub.url}",
            *settings,
            listen="0.0.0.0:8080",
            cluster_listen="0.0.0.0:8081",
            wrap=self.hosts[1].enter(),
        )

    def join(self, *names: str, engine: str = "scripted") -> None:
        """Start nodes at once, and wait until they serve."""
        for name in names:
            self.pool.join(
                name,
                f"engine.kind={engine}",
                f"models.huggingface_cache={self.get_home(name)}/hub",
                *NODE_SETTINGS,
                wait=False,
                wrap=self.get_host(name).enter(),
            )
        until(lambda: all(self.pool.serves(name) for name in names), 60, f"{', '.join(names)} serve")

    def get_host(self, name: str) -> Host:
        """Return the host of a node."""
        return self.hosts[NAMES.index(name) + 1]

    def get_home(self, name: str) -> Path:
        """Return the folder HF_HOME of a node."""
        return self.pool.folder / f"{name}-huggingface"

    def list_children(self, name: str, module: str) -> list[psutil.Process]:
        """Return the children of a node's agent that run a module."""
        found = list[psutil.Process]()
        for child in self.pool.nodes[name].children():
            try:
                found += [child] if module in child.cmdline() else []
            except psutil.Error:
                continue
        return found

    # pulls

    def type_command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run `cluster` on the coordinator's host, as its administrator."""
        return self.pool.run(*words, "--state", str(self.pool.state))

    def request(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send a request of an administrator from the coordinator's host, and return the answer."""
        if method == "GET":
            return self.pool.get(path)
        run = json.loads((self.pool.state / "run.json").read_text())

        def ask() -> dict[str, Any]:
            with httpx.Client(trust_env=False, timeout=60, verify=self.pool.trust) as client:
                answer = client.request(
                    method, run["url"] + path, json=body, headers={"Authorization": f"Bearer {run['secret']}"}
                )
            return answer.raise_for_status().json()

        return self._coordinator.submit(ask).result()

    def chat(self, model: str, text: str) -> tuple[str, str]:
        """Send a chat from the coordinator's host. Return the answer and its node."""

        def ask() -> tuple[str, str]:
            with httpx.Client(trust_env=False, timeout=60, verify=self.pool.trust) as client:
                answer = client.post(
                    f"{self.pool.base}/v1/chat/completions",
                    json={"model": model, "messages": [{"role": "user", "content": text}]},
                    headers={"Authorization": f"Bearer {self.pool.key}"},
                ).raise_for_status()
            return answer.json()["choices"][0]["message"]["content"], answer.headers["x-macpool-node"]

        return self._coordinator.submit(ask).result()

    def list_copies(self, repo: str) -> dict[str, dict[str, Any]]:
        """Return the copies of a model by the names of their nodes, as `cluster model files` does."""
        copies = self.pool.cli("model", "files")["copies"]
        return {copy["name"]: copy for copy in copies if copy["copy_of"] == repo}

    # counts

    def get_repository(self, name: str, repo: str) -> Path:
        """Return the folder of a repository in the cache of a node."""
        return self.get_home(name) / "hub" / f"models--{repo.replace('/', '--')}"

    def list_unfinished(self, name: str) -> list[str]:
        """Return the names of partial and temporary files in the cache of a node."""
        return [path.name for path in self.get_home(name).rglob("*.macpool-*")]

    def count_received(self, name: str) -> int:
        """Return the bytes that the host of a node has received from other hosts."""
        lines = Path(f"/proc/{self.get_host(name).init}/net/dev").read_text().splitlines()
        return int(next(line for line in lines if "eth0:" in line).split(":")[1].split()[0])

    def list_ports(self, name: str) -> set[int]:
        """Return the listening TCP ports of the host of a node."""
        ports = set[int]()
        for table in ("tcp", "tcp6"):
            lines = Path(f"/proc/{self.get_host(name).init}/net/{table}").read_text().splitlines()[1:]
            ports |= {int(line.split()[1].rpartition(":")[2], 16) for line in lines if line.split()[3] == "0A"}
        return ports


def count_descriptors(pid: int) -> int:
    """Return the number of open descriptors of a process."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def kill(process: psutil.Process) -> None:
    """End a process without any notice, and wait for its end."""
    process.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 10
    with suppress(psutil.NoSuchProcess):
        while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
            time.sleep(0.01)
