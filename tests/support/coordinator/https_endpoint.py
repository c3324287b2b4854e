"""HTTPS endpoint with its own authority, in a thread: it answers with the authority and checks one API key."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from coordinator.client.connection import parse_base_url
from coordinator.tls.https_ca import HttpsCa


class QuietServer(ThreadingHTTPServer):
    """Server that prints no traceback for a client that disconnected."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        return


class HttpsEndpoint:
    """A running endpoint. `statuses` has the status of each path; other paths are not found."""

    def __init__(self, folder: Path, key: str, tls: bool) -> None:
        authority = HttpsCa(folder / "https", (), time.time)
        self.pem, self.fingerprint = authority.ca_pem, authority.fingerprint
        self.statuses = {"/api/v1/ca.pem": 200, "/v1/models": 200}
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status = endpoint.statuses.get(self.path, 404)
                if self.path == "/v1/models" and self.headers["authorization"] != f"Bearer {key}":
                    status = 401
                body = endpoint.pem.encode() if self.path.endswith(".pem") else b"{}"
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = QuietServer(("127.0.0.1", 0), Handler)
        if tls:
            self._server.socket = authority.context.wrap_socket(
                self._server.socket, server_side=True, do_handshake_on_connect=False
            )
        scheme = "https" if tls else "http"
        self.url = parse_base_url(f"{scheme}://127.0.0.1:{self._server.server_port}")
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        """End the server and its thread."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@contextmanager
def https_endpoint(folder: Path, key: str = "mp_a_b", *, tls: bool = True) -> Iterator[HttpsEndpoint]:
    """Serve on a free loopback port while the context is open."""
    made = HttpsEndpoint(folder, key, tls)
    try:
        yield made
    finally:
        made.close()
