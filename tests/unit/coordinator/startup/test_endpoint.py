"""The endpoint of a started coordinator: its addresses, the owner's key, and the settings that reach its parts."""

import asyncio
import json
import os
import re
import resource
import socket
import sqlite3
import ssl
import stat
import time
from contextlib import closing, suppress
from pathlib import Path

import httpx
import msgspec
import pytest

from coordinator.http.connection_slots import RESERVED_FILES, ConnectionSlots
from coordinator.http.listen import ListenerAddress
from coordinator.startup.endpoint import Endpoint, build_ready_facts
from coordinator.startup.options import RunOptions, check_options
from coordinator.state.settings import AlertSettings, CoordinatorSettings, HttpSettings
from coordinator.state.store_errors import StoreError
from coordinator.tls.certificate_files import CertificateFiles
from coordinator.tls.https_ca import HttpsCa
from coordinator.tls.https_config import read_https_validity
from coordinator.video.store import VideoStore
from host.settings_loader import SettingsError
from tests.support.coordinator.started_coordinator import started
from tests.unit.coordinator.video.state.test_job_table import a_job


async def test_commands_of_the_owner_reach_the_endpoint_while_it_runs(tmp_path: Path):
    run = tmp_path / "run.json"
    async with started(tmp_path, CoordinatorSettings(http=HttpSettings(tls="off")), "0.0.0.0") as made:
        facts = json.loads(run.read_text())
        assert (facts["url"], facts["pid"], facts["ca"]) == (made.url, os.getpid(), "")
        assert made.url.startswith("http://127.0.0.1:"), "a change of the network does not matter"
        assert stat.S_IMODE(run.stat().st_mode) == 0o600
        async with httpx.AsyncClient(base_url=facts["url"], trust_env=False) as client:
            headers = {"authorization": f"Bearer {facts['secret']}"}
            status = (await client.get("/api/v1/status", headers=headers)).json()
            assert (status["epoch"], status["version"], status["cluster"]["name"]) == (7, "1.0", "home")
            assert 0 <= status["uptime_seconds"] < 60
            assert (await client.post("/api/v1/keys", json={"name": "app"}, headers=headers)).status_code == 200
    assert not run.exists()


async def test_the_owner_trusts_the_endpoint_with_its_own_authority(tmp_path: Path):
    async with started(tmp_path, CoordinatorSettings(http=HttpSettings(tls="on"))) as made:
        facts = json.loads((tmp_path / "run.json").read_text())
        assert facts["url"] == made.url
        assert facts["ca"] == made.endpoint.ca_pem
        assert facts["ca"].startswith("-----BEGIN CERTIFICATE-----")
        ready = build_ready_facts(made.endpoint, "mpj1.x", "mp_first")
        tls = ssl.create_default_context(cadata=facts["ca"])
        headers = {"authorization": f"Bearer {facts['secret']}"}
        async with httpx.AsyncClient(base_url=made.url, headers=headers, verify=tls, trust_env=False) as client:
            assert (await client.get("/api/v1/ca.pem")).text == facts["ca"]
            metrics = (await client.get("/metrics")).text
        expires = {
            name: float(value)
            for name, value in re.findall(r'tls_expires_timestamp_seconds\{certificate="(\w+)"\} (\S+)', metrics)
        }
        validity = read_https_validity(made.state.authority, made.endpoint.tls)
        assert expires == {name: until for name, (_, until) in validity.items()}
        assert expires.keys() == {"authority", "coordinator", "endpoint"}
    assert (ready["tls"], ready["api_key"], ready["base_url"]) == (True, "mp_first", f"{made.url}/v1")
    assert ready["trust"].startswith(f"cluster trust-ca {made.url} --fingerprint ")
    assert ready["join"].startswith("echo mpj1.x | cluster join macpool://127.0.0.1:")


@pytest.mark.parametrize(("broken", "table"), [("cluster.db", "audit"), ("videos.db", "jobs")])
async def test_metrics_count_unwritten_changes_of_both_databases(tmp_path: Path, broken: str, table: str):
    with closing(VideoStore(tmp_path)) as store:
        store.put_job(a_job(1))
    async with started(tmp_path) as made, made.client("metrics") as client:
        databases = (made.state.store, made.cluster.video_controller.records)
        assert "\nmacpool_coordinator_unwritten_changes 0.0\n" in (await client.get("/metrics")).text
        with closing(sqlite3.connect(tmp_path / broken)) as other:
            other.execute(f"ALTER TABLE {table} RENAME TO away")
        with suppress(StoreError):  # at once, if the writer has already failed
            made.state.store.audit.add(1.0, "person", "create keys", "laptop")
        with suppress(StoreError):
            made.cluster.video_controller.records.put_job(a_job(2))
        for one in databases:
            with suppress(StoreError):
                await one.flush()
        (unwritten,) = filter(None, (one.count_unwritten() for one in databases))
        assert f"\nmacpool_coordinator_unwritten_changes {unwritten}.0\n" in (await client.get("/metrics")).text
        with closing(sqlite3.connect(tmp_path / broken)) as other:
            other.execute(f"ALTER TABLE away RENAME TO {table}")


async def test_unlimited_open_files_allow_connections_as_the_highest_limit_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    async with started(tmp_path) as made:
        port = made.endpoint.address.port
        idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for _, writer in idle:
            writer.write(b"GET /livez HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")
        answers = [await reader.readline() for reader, _ in idle]
        for _, writer in idle:
            writer.close()
    assert answers == [b"HTTP/1.1 200 OK\r\n"] * 20


async def test_connections_without_a_key_have_the_limit_of_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    limits = list[tuple[int, int]]()

    class Recorded(ConnectionSlots):
        def __init__(self, most: int, without_key: int) -> None:
            limits.append((most, without_key))
            super().__init__(most, without_key)

    monkeypatch.setattr("coordinator.startup.endpoint.ConnectionSlots", Recorded)
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1000, 2000))
    async with started(tmp_path, CoordinatorSettings(http=HttpSettings(max_connections_without_key=7))):
        assert limits == [(1000 - RESERVED_FILES, 7)]


async def test_the_page_gets_a_key_that_the_endpoint_takes_for_twelve_hours(tmp_path: Path):
    async with started(tmp_path) as made, made.client("admin") as client, made.client() as page:
        link = (await client.post("/api/v1/page/links")).json()["url"]
        entered = (await page.post("/api/v1/page/visits", json={"code": link.rpartition("=")[2]})).json()
        assert abs(entered["expires"] - time.time() - 12 * 3600) < 60
        headers = {"authorization": f"Bearer {entered['key']}"}
        assert (await page.get("/api/v1/keys", headers=headers)).status_code == 200
        assert (await page.delete("/api/v1/page/visit", headers=headers)).status_code == 200
        assert (await page.get("/api/v1/keys", headers=headers)).status_code == 401


async def test_endpoint_has_the_limits_and_addresses_of_the_settings(tmp_path: Path):
    settings = msgspec.convert(
        {
            "http": {"allowed_hosts": "pool.example", "allowed_origins": "https://page.example"},
            "router": {"max_body_bytes": 1024},
        },
        CoordinatorSettings,
    )
    async with started(tmp_path, settings) as made, made.client("infer", "admin") as client:
        statuses = [
            (await client.post("/v1/chat/completions", json={}, headers=headers)).status_code
            for headers in (
                {"host": "pool.example"},
                {"host": "evil.example"},
                {"origin": "https://page.example"},
                {"origin": "https://evil.example"},
            )
        ]
        long = await client.post("/v1/chat/completions", content=b" " * 1025)
    assert (statuses, long.status_code) == ([400, 421, 400, 403], 413)


@pytest.mark.parametrize("anonymous", [True, False])
async def test_an_endpoint_without_keys_refuses_names_of_the_local_network(tmp_path: Path, anonymous: bool):
    async with started(tmp_path, CoordinatorSettings(http=HttpSettings(anonymous=anonymous))) as made:
        async with httpx.AsyncClient(base_url=made.url, trust_env=False) as client:
            keyless = await client.get("/v1/models")
            named = await client.get("/v1/models", headers={"host": "mac.local"})
        assert (keyless.status_code, named.status_code) == ((200, 421) if anonymous else (401, 401))
        assert "api_key" not in build_ready_facts(made.endpoint, "mpj1.x", None)


def test_an_endpoint_with_given_files_has_tls_without_an_authority_to_trust(tmp_path: Path):
    HttpsCa(tmp_path, (), time.time)
    files = CertificateFiles(tmp_path / "endpoint.pem", tmp_path / "endpoint.pem")
    with socket.socket() as listener:
        addresses = ListenerAddress("https", "10.0.0.7", 8080), ListenerAddress("macpool", "10.0.0.7", 8081)
        facts = build_ready_facts(Endpoint(listener, files, *addresses, ca_pem=""), "mpj1.x", None)
    assert (facts["base_url"], facts["tls"], facts["trust"]) == ("https://10.0.0.7:8080/v1", True, None)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"alerts": AlertSettings(webhook_url="http://alerts.example/x")}, "https"),
        ({"http": HttpSettings(anonymous=True)}, "anonymous"),
        ({"http": HttpSettings(tls_cert_file="/none.pem")}, "tls_key_file"),
    ],
)
def test_settings_are_refused_before_a_file_is_created(tmp_path: Path, changes: dict[str, object], words: str):
    settings = msgspec.structs.replace(CoordinatorSettings(), **changes)
    folder = tmp_path / "state"
    options = RunOptions(folder, ("0.0.0.0", 0), ("0.0.0.0", 0), local_node=False, node_arguments=(), settings=settings)
    with pytest.raises(SettingsError, match=f"(?i){words}"):
        check_options(options)
    assert not folder.exists()
