"""Videos over a pool of real processes: the SDK, the coordinator, Ray, nodes, the real engine on a tiny package.

Kills of each process in each phase are in test_chain.py.
"""

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.support.processes import NO_TLS, Pool, environment, get_ray_ports, pool, until
from tests.support.video.chain import until_ray
from tests.support.video.standin import Gate, standin
from tests.support.video.studio import flat

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
SMALL: dict[str, Any] = {"model": "tiny-wan", "prompt": "a red fox", "size": "64x48"}
HELD: Any = SMALL | {"prompt": "hold=denoising"}
QUICK = {"frames": 9, "fps": 8, "steps": 4, "seed": 1}
LEASE = 36 * 2**30
PORTS = get_ray_ports(0)
"""First port of this worker's Rays. They need a range of ports, therefore free ports cannot be chosen one by one."""


@pytest.fixture(scope="module")
def real() -> Iterator[Pool]:
    """Start a pool with one node and the real engine, with its Ray running."""
    with tempfile.TemporaryDirectory(prefix="mp-") as folder, pool(Path(folder)) as made:
        up(made)
        yield made


def settings(ports: int, **more: Any) -> list[str]:
    made = flat(worker__ray_ports=ports, node__report_busy_seconds=0.2, **more)
    return [f"{key}={json.dumps(value) if not isinstance(value, str) else value}" for key, value in made.items()]


def up(pool: Pool, *names: str, gate: Gate | None = None, **more: Any) -> openai.OpenAI:
    """Start a coordinator and nodes, and return a client once Ray is up.

    With a `gate` the nodes use a stand-in for the engine. They run at the same time as the nodes of `real`, and
    therefore use other ports.
    """
    extra = [f"video.{key}={value}" for key, value in more.items()]
    pool.up("video.max_steps=1000", *extra)
    engine = {} if gate is None else {"worker__environments": str(gate.environments)}
    for number, name in enumerate(names or ("a",)):
        pool.join(name, *settings(PORTS + 100 * number + (0 if gate is None else 300), **engine))
    for name in names or ("a",):
        until_ray(pool, name)
    return again(pool)


def again(pool: Pool, key: str = "") -> openai.OpenAI:
    """Return a client of a running coordinator."""
    direct = openai.DefaultHttpxClient(trust_env=False, verify=NO_TLS, timeout=60)
    return openai.OpenAI(base_url=pool.facts["base_url"], api_key=key or pool.key, max_retries=0, http_client=direct)


def video(pool: Pool, name: str) -> dict[str, Any]:
    return pool.node(name)["video"]


def ask(client: openai.OpenAI, name: str) -> Any:
    return client.videos.retrieve(name)


def phase(client: openai.OpenAI, name: str, *phases: str, seconds: float = 90.0) -> Any:
    """Wait until a job is in one of these phases."""
    return until(lambda: found if (found := ask(client, name)).phase in phases else None, seconds, f"{name} {phases}")


def done(client: openai.OpenAI, name: str, seconds: float = 120.0) -> Any:
    return until(lambda: found if (found := ask(client, name)).status in ("completed", "failed") else None, seconds)


def leases(pool: Pool) -> list[dict[str, Any]]:
    return pool.get("/api/v1/leases")["leases"]


def below(pool: Pool, *words: str) -> list[psutil.Process]:
    """Return the coordinator's processes whose command line contains these words."""
    assert pool.coordinator is not None
    found: list[psutil.Process] = []
    for process in pool.coordinator.children():
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if all(word in line for word in words):
            found.append(process)
    return found


def chats(pool: Pool, client: openai.OpenAI) -> None:
    said = client.chat.completions.create(
        model="scripted-1", messages=[{"role": "user", "content": "hi"}], max_tokens=5, timeout=20
    )
    assert said.choices[0].message.content


def probe(data: bytes, folder: Path) -> dict[str, Any]:
    """Check a clip. Return its first stream by ffprobe; without ffprobe the values that the tests expect."""
    assert data[4:8] == b"ftyp"
    file = folder / "clip.mp4"
    file.write_bytes(data)
    ffprobe = shutil.which("ffprobe")
    if ffprobe is None:
        return {"codec_name": "h264", "width": 64, "height": 48, "nb_read_frames": "9"}
    command = [ffprobe, "-v", "error", "-count_frames", "-select_streams", "v", "-show_streams", "-of", "json", file]
    return json.loads(subprocess.run(command, capture_output=True, check=True, env=environment()).stdout)["streams"][0]


def test_a_job_from_the_library_to_a_file_that_plays(real: Pool, tmp_path: Path):
    pool, client = real, again(real)
    made = client.videos.create_and_poll(**SMALL, extra_body=QUICK, poll_interval_ms=200)
    assert made.status == "completed", made
    data = client.videos.download_content(made.id).read()
    found = probe(data, tmp_path)
    assert (found["codec_name"], found["width"], found["height"], found["nb_read_frames"]) == ("h264", 64, 48, "9")
    assert client.videos.download_content(made.id, variant="thumbnail").read()[:4] == b"RIFF"
    direct = client._client  # pyright: ignore[reportPrivateUsage]  the library has no ranges
    url = f"{pool.facts['base_url']}/videos/{made.id}/content"
    part = direct.get(url, headers={"authorization": f"Bearer {pool.key}", "range": "bytes=4-7"})
    assert (part.status_code, part.content) == (206, b"ftyp")
    until(lambda: leases(pool) == [], 10, "its memory back")
    state = pool.state / "videos" / made.id
    assert {file.stat().st_mode & 0o777 for file in state.iterdir()} == {0o600}
    until(lambda: not video(pool, "a")["leases"], 10, "the end acknowledged")
    (profile,) = pool.get("/api/v1/videos/models")["profiles"]
    assert (profile["package"], profile["measured"] > 0, profile["calibrated"]) == ("tiny-wan", True, True)
    client.videos.delete(made.id)
    until(lambda: not state.exists(), 10, "its files removed")
    assert "token" not in " ".join(word for process in below(pool) for word in process.cmdline()).lower().replace(
        "token-fd", ""
    ), "no secret on a command line"
    chats(pool, client)


@pytest.mark.nightly
def test_two_nodes_make_two_videos_and_one_that_is_killed_fails_its_own(cluster_pool: Pool, tmp_path: Path):
    """CI has these tests:

    - `tests/contract/test_video_controller.py::test_two_nodes_run_the_queue_in_order`
    - `tests/contract/test_video_controller.py::test_absent_node_loses_its_job_as_configured`
    - `tests/unit/coordinator/video/state/test_lease_placement.py::test_a_node_that_makes_a_video_takes_no_second_one`
    - `tests/unit/coordinator/video/state/test_job_table.py::test_absent_node_ends_its_job_after_the_configured_time`
    """
    pool, gate = cluster_pool, standin(tmp_path)
    client = up(pool, "a", "b", gate=gate, on_node_loss="fail", node_loss_timeout_seconds=3)
    first, second, third = (client.videos.create(**HELD, extra_body={**QUICK, "seed": seed}) for seed in (1, 2, 3))
    for job in (first, second):
        phase(client, job.id, "denoising")
    held = {one["job"]: one for one in leases(pool)}
    assert {one["name"] for one in held.values()} == {"a", "b"}
    assert {one["size"] for one in held.values()} == {LEASE}
    assert "makes another video" in ask(client, third.id).phase
    for name in ("a", "b"):
        assert pool.node(name)["leases"] == LEASE
    pool.run("video", "cancel", first.id, "--state", str(pool.state))
    phase(client, third.id, "denoising")
    assert {one["job"] for one in leases(pool)} == {second.id, third.id}
    pool.nodes[held[second.id]["name"]].kill()
    lost = done(client, second.id)
    assert (lost.status, lost.error.code) == ("failed", "node_lost")
    assert [one["job"] for one in leases(pool)] == [third.id], "the memory of the ended lease counts as free"
    chats(pool, client)
    gate.open(3)
    assert done(client, third.id).status == "completed"
    until(lambda: leases(pool) == [], 10, "all memory back")
    until(lambda: pool.node(held[first.id]["name"])["leases"] == 0, 10, "the node says so as well")


def test_a_pool_without_videos_pays_nothing(cluster_pool: Pool):
    pool = cluster_pool
    pool.up()
    pool.join("a")
    assert below(pool) == []
    assert not (pool.state / "videos.db").exists()
    client = again(pool)
    with pytest.raises(openai.NotFoundError):
        client.videos.create(**SMALL)


def test_the_video_command_creates_waits_downloads_and_measures(cluster_pool: Pool, tmp_path: Path):
    pool = cluster_pool
    up(pool, gate=standin(tmp_path, pace=0.3))
    state = ("--state", str(pool.state))
    short = ("--size", "64x48", "--fps", "8", "--frames", "9")
    assert "ready" in pool.run("nodes", *state).stdout
    file = tmp_path / "fox.mp4"
    done_ = pool.run("video", "create", "a", "fox", *short, "--steps", "4", "--output-file", str(file), *state)
    assert done_.returncode == 0, done_.stderr
    assert file.read_bytes()[4:8] == b"ftyp"
    assert "%" in done_.stderr, "without a terminal each phase has one line"
    made = pool.cli("video", "create", "hold=denoising", *short, "--steps", "400")
    phase(again(pool, pool.secret), made["id"], "denoising")
    assert made["id"] in pool.run("video", "leases", *state).stdout
    assert "leases 36.0 GiB" in pool.run("nodes", *state).stdout
    assert pool.run("video", "wait", made["id"], "--timeout", "1s", *state).returncode == 7
    assert pool.cli("video", "cancel", made["id"])["status"] == "failed"
    assert pool.run("video", "wait", made["id"], *state).returncode == 6
    assert pool.run("video", "get", made["id"], *state).returncode == 6
    assert pool.run("video", "show", "video_x", *state).returncode == 5
    listed = pool.run("video", "list", *state).stdout
    assert "it was cancelled" in listed
    assert "completed" in listed
    assert pool.cli("video", "show", made["id"])["error"]["code"] == "cancelled"
    until(lambda: leases(pool) == [], 10, "its memory back")
    found = pool.cli("video", "calibrate", "--sizes", "96x64,64x48", "--frames", "5", "--steps", "1")
    assert [(one["size"], one["status"]) for one in found["clips"]] == [("64x48", "completed"), ("96x64", "completed")]
    assert all(one["peak"] > 0 for one in found["clips"])
    assert found["profiles"][0]["measured"] >= 3
    assert len(pool.cli("video", "list")["data"]) == 2, "clips of a calibration are not kept"
