"""The peers of the benchmarks, each in a process or environment of its own.

In front of mock nodes: nginx (Debian's) and sglang-router (its wheel). For the engine: mlx-lm in the engine's version,
as its server and as its batches.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests import models
from tests.support.processes import ROOT, environment, until

NGINX, SGLANG, MLX = "nginx", "sglang-router", "mlx_lm.server"
SGLANG_WHEEL = f"{SGLANG}==0.3.2"
APART = 50
"""Minimum microseconds of a mock node between the events of a step for two requests; 80 including the wake-up.

The threads of mlx_lm.server write their events some 100 µs apart (`python -m tests.bench apart`). A node that writes
all events at one instant would favour a peer that wakes up once for a whole step.
"""
NGINX_CONFIG = """
daemon off; master_process on; worker_processes 1; pid {folder}/nginx-{port}.pid; error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  upstream nodes {{ least_conn; server 127.0.0.1:{one}; server 127.0.0.1:{two}; keepalive 128; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://nodes; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""
TLS_PROXY_CONFIG = """
daemon off; master_process on; worker_processes 1; pid {folder}/nginx-tls.pid; error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  ssl_certificate {folder}/node.pem; ssl_certificate_key {folder}/node.key; ssl_protocols TLSv1.3;
  ssl_client_certificate {folder}/ca.pem; ssl_verify_client on; keepalive_requests 100000;
  {servers}
}}
"""
TLS_SERVER = """
  upstream node{port} {{ server 127.0.0.1:{node}; keepalive 128; }}
  server {{
    listen 127.0.0.1:{port} ssl;
    location / {{
      proxy_pass http://node{port}; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
"""
CERTIFICATES = """
openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=bench -keyout ca.key -out ca.pem
openssl req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=127.0.0.1 -keyout node.key -out node.csr
printf 'subjectAltName=IP:127.0.0.1\nbasicConstraints=CA:FALSE\nextendedKeyUsage=serverAuth,clientAuth' > node.ext
openssl x509 -req -in node.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile node.ext -out node.pem
"""
"""Commands that make an authority, and a certificate for both ends of the connections to nodes."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A router: its name, its base URL, its process, a key for it, and the agents on its nodes, if any."""

    name: str
    base: str
    process: psutil.Process
    key: str = "x"
    agents: tuple[psutil.Process, ...] = ()

    def cpu(self) -> float:
        """Return the CPU seconds of the router's process tree until now, without agents."""
        return cpu_of([self.process, *self.process.children(recursive=True)])

    def agents_cpu(self) -> float:
        """Return the CPU seconds of the agents until now, without their engines, which do the work of nodes."""
        return cpu_of(self.agents)


def cpu_of(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU seconds of some processes until now."""
    total = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def free_port() -> int:
    """Return a port that is free now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@contextmanager
def mock_nodes(step_ms: float, apart_us: float = APART, *, keeps: bool = False) -> Iterator[tuple[int, int]]:
    """Run two mock nodes; yield their ports.

    Without steps they answer at once, and stream nothing. With `keeps` they keep connections between two requests,
    which mlx_lm.server does not.
    """
    with ExitStack() as stack:
        ports: list[int] = []
        for _ in range(2):
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.bench.router.mock_node", str(step_ms), str(apart_us), str(int(keeps))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=environment(),
            )
            stack.callback(_end, process)
            assert process.stdout is not None
            ports.append(int(process.stdout.readline()))
        yield ports[0], ports[1]


@contextmanager
def nginx(folder: Path, ports: tuple[int, int]) -> Iterator[Peer]:
    """Run nginx in front of two nodes; raise RuntimeError if it is not installed."""
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    if not os.path.exists(program):
        raise RuntimeError("nginx is not installed (Debian: apt-get install nginx-light)")
    port = free_port()
    config = folder / f"nginx-{port}.conf"
    config.write_text(NGINX_CONFIG.format(folder=folder, one=ports[0], two=ports[1], port=port))
    process = subprocess.Popen([program, "-c", str(config), "-p", str(folder)], env=environment())
    try:
        base = f"http://127.0.0.1:{port}"
        until(lambda: _answers(base + "/v1/models"), 10, NGINX)
        yield Peer(NGINX, base, psutil.Process(process.pid))
    finally:
        _end(process)


@contextmanager
def tls_proxies(folder: Path, ports: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Run nginx on both nodes, as Macpool runs its agent: mutual TLS to the router, a local socket to the server.

    Yield the ports with TLS. `folder` then has the certificates `ca.pem` and `node.pem` with `node.key`.
    """
    subprocess.run(["sh", "-ec", CERTIFICATES], cwd=folder, check=True, capture_output=True)
    ours = free_port(), free_port()
    servers = "".join(TLS_SERVER.format(port=port, node=node) for port, node in zip(ours, ports, strict=True))
    config = folder / "nginx-tls.conf"
    config.write_text(TLS_PROXY_CONFIG.format(folder=folder, servers=servers))
    program = shutil.which("nginx") or "/usr/sbin/nginx"
    process = subprocess.Popen([program, "-c", str(config), "-p", str(folder)], env=environment())
    try:
        yield ours
    finally:
        _end(process)


@contextmanager
def sglang(folder: Path, ports: tuple[int, int], *, tls: bool = False) -> Iterator[Peer]:
    """Run sglang-router in front of two nodes, installed on first use into .bench/.

    With `tls` it reaches them with mutual TLS, by the certificates of `tls_proxies` in `folder`.
    """
    python, scheme = _sglang_python(), "https" if tls else "http"
    certificates = ["--ca-cert-paths", f"{folder}/ca.pem", "--client-cert-path", f"{folder}/node.pem"]
    certificates += ["--client-key-path", f"{folder}/node.key"]
    port = free_port()
    with (folder / f"sglang-{port}.log").open("wb") as log:
        process = subprocess.Popen(
            [
                str(python),
                "-m",
                "sglang_router.launch_router",
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--worker-urls",
                *[f"{scheme}://127.0.0.1:{p}" for p in ports],
                *(certificates if tls else ()),
                "--prometheus-port",
                str(free_port()),
                "--log-level",
                "warn",
            ],
            stdout=log,
            stderr=log,
            env=environment(),
            start_new_session=True,
        )
    try:
        base = f"http://127.0.0.1:{port}"
        until(lambda: _answers(base + "/health"), 60, SGLANG)
        until(lambda: _answers(base + "/readiness"), 60, "sglang-router's workers")
        yield Peer(SGLANG, base, psutil.Process(process.pid))
    finally:
        _end(process)


@contextmanager
def mlx_server(folder: Path, model: Path) -> Iterator[Peer]:
    """Run mlx_lm.server with one model and a home folder of its own, on the same BLAS as the engine."""
    port = free_port()
    home = folder / "mlx-home"
    home.mkdir()
    with (folder / "mlx_lm.log").open("wb") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "mlx_lm",
                "server",
                "--model",
                str(model),
                "--host",
                "127.0.0.1",
                "--port",
                str(port),
                "--log-level",
                "WARNING",
            ],
            stdout=log,
            stderr=log,
            env=environment(**models.fast_blas(), HOME=str(home), HF_HUB_OFFLINE="1"),
        )
    try:
        base = f"http://127.0.0.1:{port}"
        until(lambda: _answers(base + "/health"), 60, MLX)
        yield Peer(MLX, base, psutil.Process(process.pid))
    finally:
        _end(process)


class Library:
    """The batches of mlx-lm, in a process that is reached over a pipe."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def generate(self, prompts: list[str], tokens: int) -> list[list[float]]:
        """Return the monotonic times of each prompt's tokens; raise RuntimeError when the process has ended."""
        self.say(json.dumps({"prompts": prompts, "tokens": tokens}))
        return json.loads(self.hear())

    def say(self, line: str) -> None:
        """Send a line."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> str:
        """Wait for a line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"mlx-lm ended with {self._process.wait()}")
        return line


@contextmanager
def library(model: Path) -> Iterator[Library]:
    """Run the batches of mlx-lm with a loaded model, on the same BLAS as the engine."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.engine.library", str(model)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(**models.fast_blas()),
    )
    try:
        made = Library(process)
        made.hear()
        yield made
    finally:
        _end(process)


def _sglang_python() -> Path:
    python = ROOT / ".bench" / "bin" / "python"
    if not python.exists():
        uv = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
        subprocess.run([uv, "venv", "--quiet", str(ROOT / ".bench"), "--python", sys.executable], check=True)
        subprocess.run([uv, "pip", "install", "--quiet", "--python", str(python), SGLANG_WHEEL], check=True)
    return python


def _answers(url: str) -> bool:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=1) as response:
            return response.status == 200
    except OSError:
        return False


def _end(process: "subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    below = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(5)
    for child in below:
        with suppress(psutil.NoSuchProcess):
            child.kill()
