"""A proxy that records the requests of a client to a pool, and forwards the answers as they arrive.

It speaks HTTPS with the pool's own certificate, because clients differ most in the check of certificates.
"""

import asyncio
import json
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse

HOPS = {"host", "content-length", "connection", "transfer-encoding", "accept-encoding"}


@dataclass
class Recorder:
    """Requests in their order, and the answers."""

    base: str
    port: int = 0
    host: str = "127.0.0.1"
    exchanges: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def url(self) -> str:
        """Return the URL that clients use."""
        return f"https://{self.host}:{self.port}"


@contextmanager
def recording(base: str, certificate: Path) -> Iterator[Recorder]:
    """Listen on a free port in front of `base`; `certificate` is a PEM file with key, certificate and authority."""
    made = Recorder(base)
    app = FastAPI(openapi_url=None)
    trust = ssl.create_default_context(cafile=str(certificate))
    client = httpx.AsyncClient(base_url=base, trust_env=False, timeout=600, verify=trust)

    @app.api_route("/{path:path}", methods=["GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS"])
    async def pass_on(path: str, request: Request) -> StreamingResponse:
        body = await request.body()
        headers = {name: value for name, value in request.headers.items() if name not in HOPS}
        target = f"/{path}" + (f"?{request.url.query}" if request.url.query else "")
        upstream = client.build_request(request.method, target, content=body, headers=headers)
        answer = await client.send(upstream, stream=True)
        said: dict[str, Any] = {"method": request.method, "path": target, "headers": headers}
        if body:
            said["body"] = json.loads(body)
        made.exchanges.append(said | {"status": answer.status_code})

        async def pieces() -> AsyncIterator[bytes]:
            try:
                async for piece in answer.aiter_raw():
                    yield piece
            finally:
                await answer.aclose()

        kept = {name: value for name, value in answer.headers.items() if name not in HOPS}
        return StreamingResponse(pieces(), answer.status_code, kept)

    server = uvicorn.Server(
        uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off", ssl_certfile=certificate)
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        while not server.started:
            threading.Event().wait(0.01)
        made.port = server.servers[0].sockets[0].getsockname()[1]
        yield made
    finally:
        server.should_exit = True
        thread.join()
