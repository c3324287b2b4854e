"""The endpoint of a started coordinator: its addresses, the owner's key, and the settings that reach its parts."""

import json
import os
import stat
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import msgspec
import pytest

from coordinator.backup.generation_fence import GenerationFence
from coordinator.http.listen import open_listener
from coordinator.observe.event_log import EventLog
from coordinator.startup.cluster import ClusterSide, start_cluster
from coordinator.startup.endpoint import Endpoint, build_ready_facts, create_endpoint, create_local_key, serve_http
from coordinator.startup.options import RunOptions, check_options
from coordinator.startup.state import CoordinatorState, Credentials, load_credentials
from coordinator.state.database import Database
from coordinator.state.settings import AlertSettings, CoordinatorSettings, HttpSettings
from coordinator.tls.cluster_ca import ClusterCa
from host.settings_loader import SettingsError


@dataclass(frozen=True)
class Started:
    """Parts of a coordinator that serves its endpoint and its cluster port."""

    folder: Path
    access: Credentials
    cluster: ClusterSide
    endpoint: Endpoint

    @property
    def url(self) -> str:
        return self.endpoint.address.build_local_url()


@asynccontextmanager
async def started(folder: Path, http: HttpSettings | None = None, host: str = "127.0.0.1") -> AsyncIterator[Started]:
    settings = CoordinatorSettings(http=http or HttpSettings())
    options = RunOptions(folder, (host, 0), ("127.0.0.1", 0), local_node=False, node_arguments=(), settings=settings)
    async with AsyncExitStack() as stack:
        listener = open_listener(host, 0)
        stack.callback(listener.close)
        store, authority = Database(folder), ClusterCa(folder / "authority", time.time)
        stack.callback(store.close)
        store.create_cluster(authority.cluster, "lab")
        fence = GenerationFence(authority, 0)
        state = CoordinatorState(folder, folder / "x.log", EventLog(), store, authority, fence, True, 7, "1.0")
        access = load_credentials(state, settings.http, host)
        cluster = await start_cluster(options, state, access, lambda mark: None, stack)
        endpoint = create_endpoint(options, folder, cluster.port, listener)
        await serve_http(options, state, access, cluster, endpoint, stack)
        create_local_key(state, access, endpoint, stack)
        yield Started(folder, access, cluster, endpoint)


async def test_commands_of_the_owner_reach_the_endpoint_while_it_runs(tmp_path: Path):
    run = tmp_path / "run.json"
    async with started(tmp_path, HttpSettings(tls="off"), "0.0.0.0") as made:
        facts = json.loads(run.read_text())
        assert (facts["url"], facts["pid"], facts["ca"]) == (made.url, os.getpid(), "")
        assert made.url.startswith("http://127.0.0.1:"), "a change of the network does not matter"
        assert stat.S_IMODE(run.stat().st_mode) == 0o600
        async with httpx.AsyncClient(base_url=facts["url"], trust_env=False) as client:
            headers = {"authorization": f"Bearer {facts['secret']}"}
            status = (await client.get("/api/v1/status", headers=headers)).json()
            assert (status["epoch"], status["version"], status["cluster"]["name"]) == (7, "1.0", "home")
            assert (await client.post("/api/v1/keys", json={"name": "app"}, headers=headers)).status_code == 200
    assert not run.exists()


async def test_the_owner_trusts_the_endpoint_with_its_own_authority(tmp_path: Path):
    async with started(tmp_path, HttpSettings(tls="on")) as made:
        facts = json.loads((tmp_path / "run.json").read_text())
        assert facts["url"] == made.url
        assert facts["ca"] == made.endpoint.ca_pem
        assert facts["ca"].startswith("-----BEGIN CERTIFICATE-----")
        ready = build_ready_facts(made.endpoint, "mpj1.x", "mp_first")
    assert (ready["tls"], ready["api_key"], ready["base_url"]) == (True, "mp_first", f"{made.url}/v1")
    assert ready["trust"].startswith(f"cluster trust-ca {made.url} --fingerprint ")
    assert ready["join"].startswith("echo mpj1.x | cluster join macpool://127.0.0.1:")


@pytest.mark.parametrize("anonymous", [True, False])
async def test_an_endpoint_without_keys_refuses_names_of_the_local_network(tmp_path: Path, anonymous: bool):
    async with started(tmp_path, HttpSettings(anonymous=anonymous)) as made:
        async with httpx.AsyncClient(base_url=made.url, trust_env=False) as client:
            keyless = await client.get("/v1/models")
            named = await client.get("/v1/models", headers={"host": "mac.local"})
        assert (keyless.status_code, named.status_code) == ((200, 421) if anonymous else (401, 401))
        assert "api_key" not in build_ready_facts(made.endpoint, "mpj1.x", None)


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
