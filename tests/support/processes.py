"""Pools of real processes: `cluster up` and `cluster join` as a user starts them, with a clean environment.

Every process is ended by its own handle. `Process.close` also proves that none of its children is left.
"""

import json
import os
import queue
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).parents[2]
READY_SECONDS = 40.0
JUNK = ("MACPOOL_", "OPENAI_", "ANTHROPIC_", "MLX_DISABLE_COMPILE")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")
ENGINE_MODULE = "node.engine.process.main"
CLI = (sys.executable, "-P", "-m", "coordinator.cli")
SHORT_FOLDER = tempfile.TemporaryDirectory(prefix="mp", ignore_cleanup_errors=True)
"""Temporary folder of the started processes, deleted at the end of this process. Its path is short: Ray's sockets are
below it."""
NO_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Context of HTTP clients that use no TLS. Every client without it reads all authorities, in 25 ms of CPU time."""


def environment(**extra: str) -> dict[str, str]:
    """Return a process environment without the variables of a developer's shell or a hostile test run."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(JUNK) and name.lower() not in PROXIES
    }
    fixed = {"PYTHONPATH": str(ROOT), "NO_COLOR": "1", "HF_HOME": "/nonexistent/huggingface"}
    return {**kept, **fixed, "TMPDIR": SHORT_FOLDER.name, **extra}


def get_ray_ports(module: int) -> int:
    """Return the first of 500 ports for the Rays of a module of tests, 0 to 4, on this worker of xdist.

    Modules run at the same time on different workers, and no two may share a port.
    """
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    return 20_000 + 2_500 * worker + 500 * module


def until(condition: Callable[[], Any], seconds: float = 30.0, what: str = "the condition") -> Any:
    """Poll a condition of other processes until it holds; raise AssertionError after `seconds`.

    The interval grows from 0.02 s to 0.1 s, a twentieth of the time that has passed, because most conditions are
    requests to the API.
    """
    began = time.monotonic()
    while True:
        found = condition()
        if found:
            return found
        passed = time.monotonic() - began
        if passed >= seconds:
            raise AssertionError(f"{what}: not within {seconds:.0f} s")
        time.sleep(min(0.1, max(0.02, passed / 20)))


class Process:
    """One started command: its ready line, its output, its children."""

    def __init__(
        self, command: Sequence[str], log: Path, *, wrap: Sequence[str] = (), env: dict[str, str] | None = None
    ):
        self.log = log
        self._wrapped = bool(wrap)
        self._lines: queue.Queue[str | None] = queue.Queue()
        self.output: list[str] = []
        with log.open("ab") as errors:
            self.popen = subprocess.Popen(
                [*wrap, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env or environment(),
                cwd=log.parent,
            )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            self.output.append(line)
            self._lines.put(line)
        self._lines.put(None)

    def ready(self, seconds: float = READY_SECONDS) -> dict[str, Any]:
        """Wait for the JSON ready line; raise AssertionError with the log if none comes."""
        try:
            line = self._lines.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"not ready within {seconds} s:\n{self.log.read_text()[-3000:]}") from None
        if line is None:
            raise AssertionError(f"ended with {self.popen.wait()}:\n{self.log.read_text()[-3000:]}")
        return json.loads(line)

    @property
    def pid(self) -> int:
        """Return the process id. On an isolated host this is the only child of the command that entered the host,
        because that command forwards no signals."""
        below = psutil.Process(self.popen.pid).children() if self._wrapped and self.popen.poll() is None else []
        return below[0].pid if below else self.popen.pid

    def children(self) -> list[psutil.Process]:
        """Return all descendants of the process."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    @property
    def engine(self) -> psutil.Process:
        """Return the engine process of this node. An engine has children of its own for a short time, such as the
        sandbox of grammars."""
        direct = psutil.Process(self.pid).children()
        (engine,) = (child for child in direct if ENGINE_MODULE in child.cmdline())
        return engine

    def signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.popen.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL to this process alone."""
        self.signal(signal.SIGKILL)
        self.popen.wait(30)

    def stop(self, seconds: float = 30.0) -> int:
        """Send SIGTERM and return the exit code; raise AssertionError when one of its children is left."""
        below = self.children()
        self.signal(signal.SIGTERM)
        code = self.popen.wait(seconds)
        gone(below)
        return code

    def close(self) -> None:
        """End the process in any state."""
        below = self.children()
        self.signal(signal.SIGTERM)
        try:
            self.popen.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()
        for child in below:
            if child.is_running():
                child.kill()


def gone(processes: list[psutil.Process], seconds: float = 10.0) -> None:
    """Wait until all of these processes have ended. After `seconds`, kill the rest and raise AssertionError."""
    _, alive = psutil.wait_procs(processes, seconds)
    left = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    if left:
        commands = [" ".join(p.cmdline()) for p in left]
        for process in left:
            process.kill()
        raise AssertionError(f"left running: {commands}")


def _names_kind(settings: Sequence[str]) -> bool:
    return any(setting.startswith("engine.kind=") for setting in settings)


@cache
def _opener(authority: str) -> urllib.request.OpenerDirector:
    """Return an opener of URLs without proxies. It is cached, because reading all authorities takes longer than a
    request."""
    trusting = ssl.create_default_context(cadata=authority or None)
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trusting))


class Pool:
    """A coordinator and nodes below one temporary folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = {}
        self.key = ""
        self.coordinator: Process | None = None
        self.nodes: dict[str, Process] = {}
        self.home = "coordinator"
        """The coordinator's folder; a different one after the coordinator has moved."""
        self.wrap: Sequence[str] = ()
        """Words before every command that talks to the coordinator: they enter its host."""
        self.call: Callable[[Callable[[], dict[str, Any]]], dict[str, Any]] = lambda ask: ask()
        """Runs a request to the API on a host that can reach the coordinator."""
        self._stack = ExitStack()

    @property
    def state(self) -> Path:
        """Return the coordinator's state folder."""
        return self.folder / self.home

    def up(
        self,
        *settings: str,
        listen: str = "127.0.0.1:0",
        cluster_listen: str = "127.0.0.1:0",
        local_node: bool = False,
        bonjour: bool = False,
        flags: Sequence[str] = (),
        wrap: Sequence[str] = (),
    ) -> dict[str, Any]:
        """Start the coordinator with further flags; return its ready line."""
        command = [
            *CLI,
            "up",
            "--state",
            str(self.state),
            "--listen",
            listen,
            "--cluster-listen",
            cluster_listen,
            "-o",
            "json",
            "--set",
            f"cluster.bonjour={str(bonjour).lower()}",
            *flags,
        ]
        command += [] if local_node else ["--no-local-node"]
        kind = ("engine.kind=scripted",) if local_node and not _names_kind(settings) else ()
        command += [item for setting in (*kind, *settings) for item in ("--set", setting)]
        self.wrap = wrap
        self.coordinator = Process(command, self.folder / f"{self.home}.err", wrap=wrap)
        self._stack.callback(self.coordinator.close)
        self.facts = self.coordinator.ready()
        self.key = self.facts.get("api_key", self.key)
        return self.facts

    def join(
        self,
        name: str,
        *settings: str,
        wait: bool = True,
        url: bool = True,
        token: bool = True,
        wrap: Sequence[str] = (),
        env: dict[str, str] | None = None,
    ) -> Process:
        """Start a node, with the scripted engine unless a kind is named.

        A node without an identity joins: by Bonjour without `url`, by code without `token`.
        """
        joined = (self.folder / name / "node" / "identity").exists()
        command = [*CLI, "join", "--state", str(self.folder / name), "--name", name, "-o", "json"]
        if not joined:
            command += [self.facts["cluster_url"]] if url else []
            command += ["--token-file", self.token_file(name)] if token else []
        kind = () if _names_kind(settings) else ("engine.kind=scripted",)
        for setting in (f"node.machine={name}", *kind, *settings):
            command += ["--set", setting]
        process = Process(command, self.folder / f"{name}.err", wrap=wrap, env=env)
        self._stack.callback(process.close)
        self.nodes[name] = process
        if wait:
            process.ready()
            until(lambda: self.serves(name), what=f"{name} ready")
        return process

    def token_file(self, name: str, token: str = "") -> str:
        """Write a join token, by default a new one, into a file; return its path."""
        file = self.folder / f"{name}.token"
        file.write_text(token or self.token())
        return str(file)

    def token(self) -> str:
        """Make a join token by the API, which takes less time than the command."""
        return self.post("/api/v1/tokens")["token"]

    def create_key(self, name: str, scope: str = "infer") -> str:
        """Return a new API key, made by the API."""
        return self.post("/api/v1/keys", {"name": name, "scopes": [scope]})["key"]

    def cli(self, *arguments: str, code: int = 0) -> dict[str, Any]:
        """Run a verb with -o json against this pool; return its answer, or its output if it failed as expected."""
        done = self.run(*arguments, "--state", str(self.state), "-o", "json")
        if done.returncode != code:
            raise AssertionError(f"{arguments}: exit {done.returncode}\n{done.stdout}\n{done.stderr}")
        return json.loads(done.stdout) if code == 0 else {"stderr": done.stderr, "stdout": done.stdout}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run `cluster` with these arguments on the coordinator's host."""
        command = [*self.wrap, *CLI, *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=self.folder, timeout=180)

    def node(self, name: str) -> dict[str, Any]:
        """Return the API's entry of a node, or an entry with only the state `unknown` if there is no such node.

        Of two nodes with one name, prefer the node that has not left.
        """
        named = sorted(
            (node for node in self.nodes_now() if node["name"] == name), key=lambda one: one["state"] == "left"
        )
        return named[0] if named else {"state": "unknown"}

    def serves(self, name: str) -> bool:
        """Return whether a node and its engine are ready."""
        node = self.node(name)
        return node["state"] == "ready" and node["engine"]["state"] == "ready"

    def nodes_now(self) -> list[dict[str, Any]]:
        """Return the API's entries of all nodes."""
        return self.get("/api/v1/nodes")["nodes"]

    @property
    def base(self) -> str:
        """Return the base URL without /v1."""
        return self.facts["base_url"].removesuffix("/v1")

    @property
    def secret(self) -> str:
        """Return the local admin key."""
        return json.loads((self.state / "run.json").read_text())["secret"]

    @property
    def trust(self) -> ssl.SSLContext:
        """Return an SSL context that trusts the endpoint's own authority, or the system's if there is none."""
        return ssl.create_default_context(cadata=json.loads((self.state / "run.json").read_text())["ca"] or None)

    def get(self, path: str) -> dict[str, Any]:
        """Send a GET with the admin key."""
        return self._request("GET", path)

    def post(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a POST with the admin key. A command would take a hundred times the CPU time."""
        return self._request("POST", path, body or {})

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        run = json.loads((self.state / "run.json").read_text())
        headers = {"Authorization": f"Bearer {run['secret']}", "Content-Type": "application/json"}
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(run["url"] + path, content, headers, method=method)

        opener = _opener(run["ca"])

        def ask() -> dict[str, Any]:
            with opener.open(request, timeout=10) as response:
                return json.loads(response.read())

        return self.call(ask)

    def close(self) -> None:
        """End all processes."""
        self._stack.close()


@contextmanager
def pool(folder: Path) -> Iterator[Pool]:
    """Yield a pool and end its processes afterwards."""
    made = Pool(folder)
    try:
        yield made
    finally:
        made.close()
