"""A pool with one video node. Tests kill each of its processes in each phase of a job.

A node's memory counts as returned once its report and the coordinator list no lease, and no process of the worker is
left.
"""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.support.processes import NO_TLS, Pool, gone, until
from tests.support.video.standin import CLIP, Gate, standin
from tests.support.video.studio import tiny_wan

PHASES = ("queued", "acquiring", "loading", "denoising", "saving", "pulling")
VICTIMS = ("worker", "actor", "raylet", "gcs_server", "launcher", "driver", "agent", "engine", "coordinator")
WORKERS = ("worker", "actor")
"""Processes that exist only during a lease."""
RAY = ("raylet", "gcs_server", "launcher")
"""Processes of Ray whose end is the end of all of Ray."""
RUNNING = ("loading", "denoising", "saving")
LARGE = 15 * 2**20
"""Bytes of a clip whose download takes long enough to kill a process during it."""
SECONDS = 180.0
"""Time limit of every wait. Ray may need a second attempt to start an actor, and the machine may be busy."""


def expected(victim: str, phase: str) -> str:
    """Return how a job ends when this process is killed in this phase: `completed`, or the code of the error."""
    if phase not in RUNNING:
        return "completed"
    if victim == "worker":
        return "worker_crashed"
    return "worker_lost" if victim in ("actor", *RAY, "agent") else "completed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of one kill.

    `end`: `completed`, or the code of the error.
    `back`: Seconds until the memory was returned. They count from the kill where the kill ended the job, else from the
      moment the job was released. None where nothing was lent.
    `took`: Seconds of the whole case.
    """

    victim: str
    phase: str
    end: str
    message: str
    back: float | None
    took: float


class Chain:
    """The pool with its video node, and the kills."""

    def __init__(self, pool: Pool, gate: Gate, ports: int) -> None:
        self.pool = pool
        self.gate = gate
        self.seed = 0
        self._ports = ports
        self._settings: dict[str, str] = {}
        self._ours: list[str] = []
        self._client = httpx.Client(trust_env=False, verify=NO_TLS, timeout=30)

    # -- start and recovery ---------------------------------------------------------------------

    def up(self, **settings: str) -> None:
        """Start coordinator and node, each with its part of these settings; wait until videos can be made."""
        self._settings = {name.replace("__", "."): value for name, value in settings.items()}
        self._ours = [f"{name}={self._settings.pop(name)}" for name in list(self._settings) if name[:6] == "video."]
        self._coordinator()
        self.join()
        self.whole()

    def _coordinator(self, **how: Any) -> None:
        self.pool.up("video.max_steps=1000", *self._ours, **how)

    def join(self) -> None:
        settings = {
            "memory.cap": "90GiB",
            "memory.margin": "1GiB",
            "models.use_huggingface_cache": "false",
            "models.folders": str(tiny_wan()),
            "worker.environments": str(self.gate.environments),
            "worker.ray_ports": str(self._ports),
            "node.report_busy_seconds": "0.1",
            "node.report_idle_seconds": "0.2",
        }
        self.pool.join("a", *(f"{key}={value}" for key, value in (settings | self._settings).items()))

    def whole(self) -> None:
        """Wait until every process of the chain runs again and no memory is lent."""
        until_ray(self.pool, "a")
        until(lambda: self.pool.serves("a"), SECONDS, "the node serves")
        until(lambda: self.find("driver"), SECONDS, "the driver")
        until(lambda: not self.lent(), SECONDS, "all memory back")

    def close(self) -> None:
        self._client.close()

    # -- requests -------------------------------------------------------------------------------

    def ask(self, method: str, path: str, **more: Any) -> Any:
        run = json.loads((self.pool.state / "run.json").read_text())
        answer = self._client.request(
            method, run["url"] + path, headers={"authorization": f"Bearer {run['secret']}"}, **more
        )
        answer.raise_for_status()
        return answer.json()

    def node(self) -> dict[str, Any]:
        return self.ask("GET", "/api/v1/nodes")["nodes"][0]

    def ray(self) -> str:
        return self.node()["video"]["ray"]

    def lent(self) -> int:
        """Return the lent bytes: the larger of the node's and the coordinator's figure."""
        return max(self.node()["leases"], sum(one["size"] for one in self.ask("GET", "/api/v1/leases")["leases"]))

    def job(self, name: str) -> dict[str, Any]:
        return self.ask("GET", f"/v1/videos/{name}")

    def begin(self, phase: str) -> str:
        """Start a job that stays in this phase; return its id once it is in the phase."""
        self.seed += 1
        prompt = f"clip={LARGE}" if phase == "pulling" else f"hold={phase}"
        if phase == "queued":
            self._cordon(wanted=True)
        elif phase == "acquiring":
            self._engine(signal.SIGSTOP)
        body = {"prompt": prompt, "model": "tiny-wan", "size": "64x48", "frames": 9, "fps": 8, "seed": self.seed}
        name = self.ask("POST", "/v1/videos", json=body)["id"]
        said = {"queued": "cordoned", "acquiring": "asking a node", "pulling": "fetching"}.get(phase, phase)
        try:
            # a clip may be fetched between two polls; then its chain is killed right after the fetch
            until(lambda: self.job(name)["phase"] == "completed" or said in self.job(name)["phase"], SECONDS)
        except AssertionError:
            raise AssertionError(f"a job that should be {said} is {self.job(name)}") from None
        return name

    def let_go(self, phase: str) -> None:
        """Release a job from the phase in which it is held."""
        if phase == "queued":
            self._cordon(wanted=False)
        elif phase == "acquiring":
            self._engine(signal.SIGCONT)
        self.gate.open(self.seed)

    def _cordon(self, *, wanted: bool) -> None:
        self.ask("POST", f"/api/v1/nodes/{self.node()['id']}/{'cordon' if wanted else 'uncordon'}")

    def _engine(self, number: signal.Signals) -> None:
        for engine in self.find("engine"):
            engine.send_signal(number)

    def chats(self) -> bool:
        """Return whether the pool still answers a chat."""
        body = {"model": "scripted-1", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
        return bool(self.ask("POST", "/v1/chat/completions", json=body)["choices"])

    # -- processes ------------------------------------------------------------------------------

    def find(self, victim: str) -> list[psutil.Process]:
        """Return the processes that have this role."""
        return list(self._find(victim))

    def _find(self, victim: str) -> Iterator[psutil.Process]:
        coordinator, node = self.pool.coordinator, self.pool.nodes["a"]
        assert coordinator is not None
        match victim:
            case "agent":
                yield psutil.Process(node.pid)
            case "coordinator":
                yield psutil.Process(coordinator.pid)
            case "actor":
                for worker in self._find("worker"):
                    yield psutil.Process(worker.ppid())
            case _:
                words = {
                    "worker": "node/video/worker/worker.py",
                    "launcher": "node.video.ray.ray_child",
                    "raylet": "raylet/raylet",
                    "engine": "node.engine.process.main",
                    "driver": "node.video.ray.driver",
                    "gcs_server": "gcs_server",
                }[victim]
                for process in node.children():
                    with suppress(psutil.Error):
                        if any(words in word for word in process.cmdline()[:8]):
                            yield process

    # -- one cell ---------------------------------------------------------------------------

    def kill(self, victim: str, phase: str, number: signal.Signals = signal.SIGKILL) -> Outcome:
        """Kill this process while a job is in this phase, and return the outcome once the chain is complete again.

        `number` is the signal.
        """
        began = time.monotonic()
        name = self.begin(phase)
        worker = self.find("worker")
        found = self.find(victim)
        assert found, f"there is no {victim} while {phase}"
        below, before = found[0].children(recursive=True), self._names(victim)
        killed = time.monotonic()
        found[0].send_signal(number)
        if victim == "agent" and phase == "acquiring":
            for engine in below:
                with suppress(psutil.Error):
                    engine.resume()
        dies = phase in RUNNING and expected(victim, phase) != "completed"
        back = self._back(worker, killed, victim) if dies else None
        self._mend(victim, below)
        freed = time.monotonic()
        self.let_go(phase)
        ended = until(
            lambda: now if (now := self.job(name))["status"] in ("completed", "failed") else None,
            SECONDS,
            f"the end of the job after {victim} was killed while {phase}",
        )
        if phase in RUNNING and not dies:
            back = self._back(worker, freed, victim)
        until(lambda: self._others(before), SECONDS, f"replacements of {victim} and of the processes that end with it")
        self.whole()
        if ended["status"] == "completed":
            self._whole_clip(name)
        code = ended["error"]["code"] if ended["error"] else "completed"
        message = ended["error"]["message"] if ended["error"] else ""
        return Outcome(victim, phase, code, message, back, time.monotonic() - began)

    def _names(self, victim: str) -> dict[str, object]:
        """Return the identities that change when this victim is replaced, by role."""
        if victim in WORKERS:
            return {}
        if victim in RAY:
            return {"ray": self.ray()}
        return {victim: [one.pid for one in self.find(victim)]}

    def _others(self, before: dict[str, object]) -> bool:
        now = {name: self.ray() if name == "ray" else [one.pid for one in self.find(name)] for name in before}
        return all(now[name] and now[name] != before[name] for name in before)

    def _back(self, worker: list[psutil.Process], since: float, victim: str) -> float:
        until(lambda: not any(alive(one) for one in worker), 20, "the end of the worker")
        if victim != "agent":  # the agent's leases end with the agent; `lent` can be read again once it is back
            until(lambda: not self.lent(), 20, "the memory back")
        return time.monotonic() - since

    def _mend(self, victim: str, below: list[psutil.Process]) -> None:
        """Restart the processes that nothing else restarts."""
        if victim == "agent":
            self.pool.nodes["a"].popen.wait(30)
            gone(below, 20)
            self.join()
        elif victim == "coordinator":
            assert self.pool.coordinator is not None
            self.pool.coordinator.popen.wait(30)
            gone(below, 20)
            where = self.pool.facts["cluster_url"].removeprefix("macpool://")
            self._coordinator(cluster_listen=where)
            until(lambda: self.pool.serves("a"), what="the node back")

    def _whole_clip(self, name: str) -> None:
        run = json.loads((self.pool.state / "run.json").read_text())
        answer = self._client.get(
            f"{run['url']}/v1/videos/{name}/content", headers={"authorization": f"Bearer {run['secret']}"}
        )
        assert answer.content.startswith(CLIP), answer.status_code


def until_ray(pool: Pool, node: str, seconds: float = 120.0) -> None:
    """Allow a node to make videos and wait for its Ray.

    The AssertionError of a timeout has the log lines of both sides about Ray.
    """
    until(lambda: pool.node(node).get("video"), seconds, f"a report of {node}")
    if not pool.node(node)["video"]["allowed"]:
        pool.cli("node", "allow-video", node)
    try:
        until(lambda: pool.node(node).get("video", {}).get("ray"), seconds, f"Ray on {node}")
    except AssertionError as error:
        logs = (pool.state / "logs" / "coordinator.log", pool.folder / node / "logs" / "node.log")
        lines = [line for log in logs for line in log.read_text().splitlines() if '.ray"' in line]
        raise AssertionError("\n".join([str(error), *lines[-20:]])) from None


def alive(process: psutil.Process) -> bool:
    """Return whether a process runs. A zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def table(outcomes: list[Outcome]) -> str:
    """Return the outcomes as a Markdown table: a row for each process, a column for each phase."""
    cells = {(one.victim, one.phase): one for one in outcomes}
    seen = [victim for victim in VICTIMS if any(one.victim == victim for one in outcomes)]
    rows = [[victim, *(_cell(cells.get((victim, phase))) for phase in PHASES)] for victim in seen]
    rows.insert(0, ["killed while", *PHASES])
    widths = [max(len(row[column]) for row in rows) for column in range(len(PHASES) + 1)]
    lines = [
        "| " + " | ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


def _cell(outcome: Outcome | None) -> str:
    if outcome is None:
        return ""
    return outcome.end if outcome.back is None else f"{outcome.end} {outcome.back:.1f} s"


@contextmanager
def chain(pool: Pool, ports: int) -> Iterator[Chain]:
    """Yield the running chain of a pool."""
    made = Chain(pool, standin(Path(pool.folder)), ports)
    try:
        made.up()
        yield made
    finally:
        made.close()
