"""A hostile member that claims to make videos: the frames that it is sent, and those that it is not."""

import json
from pathlib import Path

from tests.contract.test_videos import pool
from tests.support.processes import Pool
from tests.support.video.standin import standin
from tests.support.video.studio import flat
from wire.codec import encode
from wire.frames import AllowVideo, FetchRequest, LeaseRelease, LeaseRequest, Ping, Welcome


async def test_a_member_that_is_not_allowed_gets_no_prompt_whatever_it_reports(tmp_path: Path):
    async with pool(tmp_path, "good", "hostile", peer={"plays": False}) as one, one.http() as http:
        good, hostile = one.peers
        assert hostile.who is not None
        one.port.application.nodes.administration.set_video_allowed(hostile.who.node, on=False)
        await one.port.until(lambda: not hostile.allowed)
        hostile.video = {"allowed": True}  # and it has the most room
        hostile.room, good.room = 100 * 2**30, 60 * 2**30
        for _ in range(2):
            assert (await http.post("/v1/videos", json={"prompt": "a secret fox"})).status_code == 200
        await one.port.until(lambda: good.of(LeaseRequest))
        await one.port.until(
            lambda: any(
                "allow-video" in job.phase or "makes another" in job.phase for job in one.conductor.table.jobs.values()
            )
        )
        assert hostile.of(LeaseRequest) == []


async def test_frames_to_a_video_member_have_no_secret(tmp_path: Path):
    async with pool(tmp_path) as one, one.http() as http:
        made = (await http.post("/v1/videos", json={"prompt": "x"})).json()["id"]
        await one.until(made, "completed")
        assert {type(frame) for frame in one.peer.heard} - {Ping, Welcome} <= {
            AllowVideo,
            LeaseRequest,
            LeaseRelease,
            FetchRequest,
        }
        for frame in one.peer.heard:
            assert b"PRIVATE KEY" not in encode(frame)
            assert b"CERTIFICATE" not in encode(frame)


def test_the_coordinator_of_a_pool_that_makes_videos_runs_no_ray(cluster_pool: Pool, tmp_path: Path):
    gate = standin(tmp_path)
    settings = flat(worker__environments=str(gate.environments), models__folders="")
    cluster_pool.up()
    cluster_pool.join("a", *(f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in settings.items()))
    cluster_pool.cli("node", "allow-video", "a")
    assert cluster_pool.coordinator is not None
    assert cluster_pool.coordinator.children() == []
    assert [file for file in cluster_pool.state.rglob("*") if "ray" in file.name.lower()] == []
