"""Pin of uvicorn, whose HTTP protocol class ours extends: its version, and the attributes that ours uses.

Also the limits of the manual, and the answer above the limit of connections.
"""

import ast
import inspect
import tomllib
from importlib.metadata import version
from pathlib import Path

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from coordinator.api.body import BODY_TIMEOUT_SECONDS
from coordinator.api.route import MAX_BODY_BYTES, MAX_PUBLIC_BODY_BYTES
from coordinator.http.connection_slots import MAX_CONNECTIONS, MAX_NEW_CONNECTIONS, RESERVED_FILES
from coordinator.http.http_protocol import (
    HEAD_TIMEOUT_SECONDS,
    MAX_HEAD_BYTES,
    TOO_MANY_CONNECTIONS,
    build_problem_response,
)
from coordinator.http.server import HANDSHAKE_TIMEOUT_SECONDS

ROOT = Path(__file__).parents[4]
SOURCES = [ROOT / "coordinator" / "http" / name for name in ("http_protocol.py", "chat_fast_path.py")]
CLASSES = ("DeadlineProtocol", "FastPathProtocol")


def inherited_names() -> set[str]:
    """Return the attributes of `self` and `super()` in our protocol classes that these classes do not set."""
    used, own = set[str](), set[str]()
    classes = [
        part
        for source in SOURCES
        for part in ast.walk(ast.parse(source.read_text()))
        if isinstance(part, ast.ClassDef) and part.name in CLASSES
    ]
    for part in (inner for each in classes for inner in ast.walk(each)):
        if isinstance(part, ast.Attribute):
            of_super = isinstance(part.value, ast.Call) and ast.unparse(part.value) == "super()"
            of_self = isinstance(part.value, ast.Name) and part.value.id == "self"
            if of_super:
                used.add(part.attr)
            elif of_self:
                (own if isinstance(part.ctx, ast.Store) else used).add(part.attr)
        elif isinstance(part, ast.FunctionDef):
            own.add(part.name)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            own.add(part.target.id)
    return used - own


def test_uvicorn_is_pinned_to_the_tested_version():
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert [each for each in dependencies if each.startswith("uvicorn")] == [f"uvicorn=={version('uvicorn')}"]


def test_all_inherited_attributes_exist_in_uvicorn():
    names, source = inherited_names(), inspect.getsource(HttpToolsProtocol)
    assert {"flow", "pipeline", "cycle"} <= names
    assert [
        name for name in sorted(names) if not hasattr(HttpToolsProtocol, name) and f"self.{name}" not in source
    ] == []


def test_the_limits_are_those_of_the_manual():
    manual = " ".join((ROOT / "docs" / "security.md").read_text().split())
    for words in (
        f"with {HANDSHAKE_TIMEOUT_SECONDS:.0f} s for a handshake",
        f"**Request heads**: {HEAD_TIMEOUT_SECONDS:.0f} s in total, and {MAX_HEAD_BYTES // 1024} KiB.",
        f"{MAX_BODY_BYTES // 1024} KiB and {BODY_TIMEOUT_SECONDS:.0f} s on other routes",
        f"{MAX_PUBLIC_BODY_BYTES // 1024} KiB where no key is needed",
        f"at most {MAX_CONNECTIONS:,}, and at least {RESERVED_FILES} fewer than the system's limit of open files",
        f"without a valid key has at most {MAX_NEW_CONNECTIONS} (`http.max_connections_without_key`)",
    ):
        assert words in manual


def test_a_client_above_the_limit_of_connections_may_try_again_in_5_seconds():
    head, _, body = build_problem_response(TOO_MANY_CONNECTIONS).partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    assert status == "HTTP/1.1 503 Service Unavailable"
    assert {"retry-after: 5", "connection: close", f"content-length: {len(body)}"} <= set(lines)
