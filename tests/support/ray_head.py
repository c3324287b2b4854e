"""A Ray head for tests, and a driver as the broker is one: it makes the actor of a lease on the node that lends."""

import json
import os
import re
import secrets
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from machine.ray_process import SLIM
from tests.support.processes import ROOT, environment
from wire.frames import LeaseGranted, RayHead

DRIVER = """
import json, os, sys
out = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from node.video.actor import Host

ray.init(address=sys.argv[1], namespace="video", log_to_driver=False, logging_level="ERROR")
kind = ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0, max_concurrency=4)(Host)
actors = {}
print(json.dumps({"up": True}), file=out)
for line in sys.stdin:
    order = json.loads(line)
    if order["do"] == "begin":
        place = NodeAffinitySchedulingStrategy(order["node"], soft=False)
        actor = actors[order["lease"]] = kind.options(
            name=order["lease"], lifetime="detached", resources={"video_lease_gib": 1}, scheduling_strategy=place,
        ).remote(order["folder"], order["lease"], order["generation"])
        answer = {"node": ray.get(actor.begun.remote(), timeout=60)}
    elif order["do"] == "kill":
        ray.kill(actors[order["lease"]])
        answer = {"killed": True}
    else:
        answer = {"why": ray.get(actors[order["lease"]].wait.remote(), timeout=60)}
    print(json.dumps(answer), file=out)
"""


def free_ports(count: int) -> int:
    """Give the first of so many ports in a row of which the first few are free now."""
    while True:
        first = 20_000 + secrets.randbelow(30_000)
        try:
            for port in range(first, first + min(count, 6)):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return first


@dataclass
class Head:
    """A running head, and the driver beside it."""

    address: str
    token: str
    folder: Path
    processes: list[subprocess.Popen[str]]

    def frame(self, base_port: int) -> RayHead:
        """Give what a coordinator tells a node of it."""
        return RayHead(self.address, self.token, "127.0.0.1", version=version("ray"), base_port=base_port)

    def driver(self) -> "Driver":
        """Start a driver on the head's machine."""
        token = self.folder / "token"
        extra = {**SLIM, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, self.address], cwd=ROOT, env=environment(**extra), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(self.folder / "driver.log").open("w"),
        )  # fmt: skip
        self.processes.append(process)
        made = Driver(process, self.folder / "driver.log")
        assert made.answer() == {"up": True}
        return made


@dataclass
class Driver:
    """What the broker does."""

    process: subprocess.Popen[str]
    log: Path

    def answer(self) -> dict[str, str]:
        """Wait for the answer to an order."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.log.read_text()[-3000:]
        return json.loads(line)

    def order(self, do: str, lease: str, **more: object) -> dict[str, str]:
        """Have something done."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, "lease": lease, **more}) + "\n")
        self.process.stdin.flush()
        return self.answer()

    def begin(self, node: str, granted: LeaseGranted) -> None:
        """Make the actor of a lease on a node."""
        said = self.order("begin", granted.lease, node=node, folder=granted.folder, generation=granted.generation)
        assert said["node"] == node


@contextmanager
def ray_head(folder: Path) -> Iterator[Head]:
    """Run a head on this machine, with a token."""
    token = secrets.token_hex(32)
    (folder / "token").write_text(token)
    (folder / "token").chmod(0o600)
    first = free_ports(60)
    with tempfile.TemporaryDirectory(prefix="mp-h-", dir="/tmp", ignore_cleanup_errors=True) as place:
        words = {
            "port": first, "node-manager-port": first + 1, "object-manager-port": first + 2,
            "dashboard-agent-grpc-port": first + 3, "dashboard-agent-listen-port": first + 4,
            "runtime-env-agent-port": first + 5, "min-worker-port": first + 10, "max-worker-port": first + 59,
            "num-cpus": 0, "object-store-memory": 80_000_000, "include-dashboard": "false",
            "include-log-monitor": "false", "temp-dir": place, "node-ip-address": "127.0.0.1",
        }  # fmt: skip
        extra = {**SLIM, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "node.video.raylet_child", "start", "--head", "--block",
             "--disable-usage-stats", *(f"--{key}={value}" for key, value in words.items())],
            cwd=folder, env=environment(**extra), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        head = Head(f"127.0.0.1:{first}", token, folder, [process])
        try:
            assert process.stdout is not None
            said = []
            for line in process.stdout:
                said.append(line)
                if "Ray runtime started" in line:
                    break
            else:
                raise AssertionError("".join(said)[-3000:])
            (found,) = re.findall(r"Local node IP: (\S+)", "".join(said))
            head.address = f"{found}:{first}"
            threading.Thread(target=process.stdout.read, daemon=True).start()
            yield head
        finally:
            for one in reversed(head.processes):
                if one.stdin is not None:
                    one.stdin.close()
                one.terminate()
            for one in head.processes:
                one.wait(30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
