import asyncio
import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from node.settings import WorkerSettings
from node.video import raylet
from wire.frames import RayHead

HEAD = RayHead("192.0.2.1:6380", "secret-token", "192.0.2.7", b"ca", b"certificate", b"key", version("ray"))


def words(head: RayHead = HEAD) -> list[str]:
    return raylet.command(head, 6480, Path("/tmp/mp"), 96)


def test_the_ports_are_sixty_in_a_row_and_no_secret_is_a_word():
    said = dict(word.removeprefix("--").split("=", 1) for word in words() if "=" in word)
    ports = [int(value) for name, value in said.items() if name.endswith("port")]
    assert min(ports) == 6480
    assert max(ports) == 6480 + raylet.PORTS - 1
    assert len(set(ports)) == len(ports) == 8
    assert json.loads(said["resources"]) == {"video_lease_gib": 96}
    assert (said["address"], said["node-ip-address"]) == ("192.0.2.1:6380", "192.0.2.7")
    assert "secret" not in " ".join(words())
    assert f"--node-manager-port={7000}" in words(RayHead("a:1", base_port=7000))


def test_the_environment_is_named_and_holds_paths_of_secrets_alone(tmp_path: Path):
    told = raylet.environment(HEAD, {"PATH": "/bin", "OPENAI_API_KEY": "sk", "RAY_ADDRESS": "evil"}, tmp_path, "ab")
    assert "OPENAI_API_KEY" not in told
    assert "RAY_ADDRESS" not in told
    assert "secret-token" not in told.values()
    assert told["RAY_AUTH_MODE"] == "token"
    assert told["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "token")
    assert told["RAY_USE_TLS"] == "1"
    assert told["RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL"] == "minor"
    assert int(told["RAY_gcs_rpc_server_reconnect_timeout_s"]) > 3600, "a job outlives a head that is away for long"
    assert "RAY_USE_TLS" not in raylet.environment(RayHead("a:1", "t"), {}, tmp_path, "ab")


def test_a_head_says_only_what_is_rays(tmp_path: Path):
    pairs = (("RAY_health_check_period_ms", "2000"), ("LD_PRELOAD", "/evil.so"), ("RAY_X\n", "1"))
    told = raylet.environment(RayHead("a:1", environment=pairs), {}, tmp_path, "ab")
    assert told["RAY_health_check_period_ms"] == "2000"
    assert "LD_PRELOAD" not in told
    assert "RAY_X\n" not in told


def test_another_version_is_not_followed():
    assert raylet.unusable(HEAD) == ""
    assert "have to be the same" in raylet.unusable(RayHead("a:1", version="1.0"))


@pytest.mark.slow
async def test_a_job_keeps_the_ray_that_started_it_until_it_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = "import sys; print('Ray runtime started', flush=True); sys.stdin.read()"
    monkeypatch.setattr(raylet, "command", lambda *_: [sys.executable, "-c", program])
    one = raylet.Raylet(WorkerSettings(ray_folder=str(tmp_path / "ray")), tmp_path / "files", tmp_path / "log", 1)
    news = asyncio.Event()
    one.changed = news.set

    async def another(than: str) -> str:
        async with asyncio.timeout(20):
            while one.node in ("", than):
                news.clear()
                await news.wait()
        return one.node

    one.offer(wanted=True)
    one.follow(RayHead("a:1"))
    first = await another("")
    one.lend(on=True)
    one.follow(RayHead("b:1"))
    one.follow(RayHead(""))
    one.follow(RayHead("c:1"))
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert one.node == first, "its actor holds the worker"
    one.lend(on=False)
    second = await another(first)
    one.lend(on=True)
    one.lend(on=False)
    for _ in range(20):
        await asyncio.sleep(0.01)
    assert one.node == second, "the end of a job alone replaces nothing"
    await one.stop()
