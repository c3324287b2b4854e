"""Static files of the page, which are read once and served from memory with a strict content security policy.

There is no build step and no external content: the browser runs the modules in `static` unchanged. No file contains a
secret, hence none needs a key. The page requests its data from the API.
"""

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

from coordinator.http.origin_check import Asgi, Receive, Scope, Send, send_problem
from router.errors import build_not_found, build_wrong_method

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; media-src blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""Content security policy of the page."""
CONTENT_TYPES: Final = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
}
"""Content types by file extension. Files with another extension are not served."""
ROOT: Final = "/ui/"
"""Prefix of the paths at which the files are served."""
HEADERS: Final = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
)
"""HTTP headers of the response for every file."""


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One file of the page, as it is sent to browsers."""

    body: bytes
    kind: str
    """Value of the content-type header."""
    tag: bytes
    """ETag, with quotes."""


class PageApp:
    """ASGI app that serves the page's files at `/` and below `/ui/`. Other requests go to `app`."""

    def __init__(self, app: Asgi) -> None:
        self._app = app
        self._files = {
            path: _create_file(path, body) for path, body in _read_files(files("coordinator.ui") / "static", ROOT)
        }
        self._files["/"] = self._files.pop(ROOT + "index.html")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a file of the page, or a 404 or 405 problem for another request below `/ui/`. Pass the rest to `app`."""
        path: str = scope.get("path", "")
        if scope["type"] != "http" or not (path == "/" or path.startswith(ROOT)):
            await self._app(scope, receive, send)
            return
        file = self._files.get(path)
        if file is None:
            await send_problem(scope, send, build_not_found(path))
        elif scope["method"] not in ("GET", "HEAD"):
            await send_problem(scope, send, build_wrong_method(scope["method"], "GET, HEAD"))
        else:
            await _send_file(scope, send, file)


async def _send_file(scope: Scope, send: Send, file: StaticFile) -> None:
    known = file.tag in (value for name, value in scope["headers"] if name == b"if-none-match")
    body = b"" if known or scope["method"] == "HEAD" else file.body
    about = [(b"content-type", file.kind.encode()), (b"etag", file.tag), *HEADERS]
    if not known:
        about.append((b"content-length", str(len(file.body)).encode()))
    await send({"type": "http.response.start", "status": 304 if known else 200, "headers": about})
    await send({"type": "http.response.body", "body": body})


def _read_files(folder: Traversable, path: str) -> list[tuple[str, bytes]]:
    files: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            files += _read_files(entry, f"{path}{entry.name}/")
        elif entry.name.rpartition(".")[2] in CONTENT_TYPES:
            files.append((path + entry.name, entry.read_bytes()))
    return files


def _create_file(path: str, body: bytes) -> StaticFile:
    tag = b'"%s"' % hashlib.sha256(body).hexdigest()[:24].encode()
    return StaticFile(body, CONTENT_TYPES[path.rpartition(".")[2]], tag)
