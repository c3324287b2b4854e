"""Server in place of a coordinator: it sends one answer to every request of a command."""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from coordinator.cli import cluster
from router.errors import Problem


class Server:
    """Server that sends the same answer to every request, once `may` is set, and records the requests."""

    def __init__(self, folder: Path) -> None:
        self.answer: dict[str, Any] | Problem = {}
        self.asked: list[tuple[str, Any]] = []
        self.methods: list[str] = []
        self.on_request: Callable[[], object] = lambda: None
        """Called in a thread of the server when a request has arrived."""
        self.may = threading.Event()
        self.may.set()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_PUT(self) -> None:
                self.do_POST()

            def do_DELETE(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                length = int(self.headers.get("content-length", 0))
                server.methods.append(self.command)
                server.asked.append((self.path, json.loads(self.rfile.read(length) or "null")))
                server.on_request()
                server.may.wait(20)
                problem = server.answer if isinstance(server.answer, Problem) else None
                body = problem.encode_body("r") if problem else json.dumps(server.answer).encode()
                self.send_response(problem.status if problem else 200)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                with suppress(OSError):  # the command has ended
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                return

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.key = folder / "key"
        self.key.write_text("mp_a_b")
        self.options = ["--url", f"http://127.0.0.1:{self.http.server_port}", "--key-file", str(self.key)]
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()  # shutdown polls

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(cluster, [*words, *self.options])
