"""Status of the pool and links to it, while the coordinator's machine changes its network."""

from pathlib import Path

import httpx
import pytest

from tests.support.cluster.application import application

ROUTES = (("GET", "/api/v1/status"), ("POST", "/api/v1/tokens"), ("POST", "/api/v1/page/links"))


async def test_status_join_line_and_sign_in_link_have_the_current_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    addresses = list[str]()
    monkeypatch.setattr("coordinator.http.listen.list_addresses", lambda: addresses)
    async with application(tmp_path, host="0.0.0.0") as made:
        key = made.admin.create_key("boss", ["admin"], None)["key"]
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(made.app), base_url="http://pool", headers={"Authorization": f"Bearer {key}"}
        ) as client:
            for host in ("127.0.0.1", "10.0.0.7", "192.168.1.5"):
                addresses[:] = [] if host == "127.0.0.1" else [host]
                status, token, link = [
                    (await client.request(method, path, json={} if "tokens" in path else None)).json()
                    for method, path in ROUTES
                ]
                assert status["base_url"] == f"http://{host}:8080/v1"
                assert status["cluster_url"] == f"macpool://{host}:8081"
                assert f" cluster join macpool://{host}:8081 " in token["join"]
                assert link["url"].startswith(f"http://{host}:8080/#in=")
