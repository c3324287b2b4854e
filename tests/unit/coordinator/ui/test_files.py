"""The page's files as they are served, and the origin of the vendored ones."""

import hashlib
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from coordinator.api.qr import build_qr_matrix
from coordinator.ui import static_files
from tests.support.cluster.application import application

STATIC = Path(static_files.__file__).parent / "static"
SERVED = sorted(path.relative_to(STATIC) for path in STATIC.rglob("*") if path.suffix[1:] in static_files.CONTENT_TYPES)


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with application(tmp_path) as made:
        transport = httpx.ASGITransport(made.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as asked:
            yield asked


async def test_every_file_is_served_with_the_strictest_policy(client: httpx.AsyncClient):
    assert len(SERVED) > 10
    for path in SERVED:
        target = "/" if path.name == "index.html" else f"/ui/{path}"
        answer = await client.get(target)
        assert answer.status_code == 200, target
        assert answer.content == (STATIC / path).read_bytes()
        assert answer.headers["content-security-policy"] == static_files.POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["cache-control"] == "no-cache", "a new version of Macpool replaces the page"
    policy = {rule.partition(" ")[0]: rule.partition(" ")[2] for rule in static_files.POLICY.split("; ")}
    assert "unsafe" not in static_files.POLICY
    assert {name for name, sources in policy.items() if sources == "'none'"} == {
        "default-src",
        "base-uri",
        "form-action",
        "frame-ancestors",
    }


async def test_static_files_with_a_known_etag_are_not_modified(client: httpx.AsyncClient):
    first = await client.get("/ui/app.js")
    again = await client.get("/ui/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    head = await client.head("/ui/app.js")
    assert (head.status_code, head.content) == (200, b"")


NOTHING = (
    "/ui/",
    "/ui/index.html",
    "/ui/../page.py",
    "/ui/%2e%2e/page.py",
    "/ui/vendor/SOURCES.txt",
    "/ui//app.js",
    "/ui/views",
    "/ui/app.js/",
)


@pytest.mark.parametrize("path", NOTHING)
async def test_there_is_nothing_else(client: httpx.AsyncClient, path: str):
    assert (await client.get(path)).status_code == 404


async def test_static_files_refuse_other_methods_than_get_and_head(client: httpx.AsyncClient):
    answer = await client.post("/ui/app.js", content=b"x")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, HEAD")


def test_vendored_files_are_those_of_their_packages():
    lines = (STATIC / "vendor" / "SOURCES.txt").read_text().splitlines()
    told = {name: digest for digest, name, _ in (line.split("  ", 2) for line in lines)}
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (STATIC / "vendor").glob("*.js")}
    assert told == found


def test_static_files_load_nothing_from_other_hosts():
    for path in SERVED:
        if "vendor" not in path.parts:
            text = (STATIC / path).read_text().replace('xmlns="http://www.w3.org/2000/svg"', "")
            assert not re.search(r"https?://|//[a-z]+\.[a-z]", text), path
            assert "innerHTML" not in text, path


def test_build_qr_matrix_of_a_join_command_has_finder_patterns():
    rows = build_qr_matrix("cluster join macpool://192.168.1.20:8081 --token mpj1." + "x" * 120)
    assert len(rows) == len(rows[0]) >= 21
    assert set("".join(rows)) == {"0", "1"}
    assert [row[:7] for row in rows[:7]] == [
        "1111111",
        "1000001",
        "1011101",
        "1011101",
        "1011101",
        "1000001",
        "1111111",
    ]
