"""The video controller over the real link: peers that refuse, vanish, return or lie, and a coordinator that
restarts."""

import asyncio
import errno
import hashlib
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from coordinator.video import artifacts as artifacts_module
from coordinator.video.artifacts import ArtifactFolder
from coordinator.video.state.events import JobPlaced
from coordinator.video.state.jobs import JobFault, JobState
from coordinator.video.store import FILE, VideoStore
from tests.contract.test_videos import Pool, pool
from tests.support.cluster.cluster_port import opened
from tests.support.cluster.loopback_cluster import a_memory
from tests.support.video.peer import CLIP, VideoPeer, artifacts_of
from tests.unit.coordinator.state.test_forgetting import found
from tests.unit.coordinator.video.state.test_job_table import a_job
from wire.frames import AllowVideo, Generate, LeaseEnded, LeaseGranted, LeaseRefused, LeaseRelease, LeaseRequest
from wire.identity import NodeId
from wire.state_machine import IllegalEventCounts, IllegalEventError
from wire.units import GIB
from wire.video import Artifact

NO = LeaseRefused("", 0, "no_headroom", "no", need=36 * GIB, retry_after=1.0, waiting_for="waiting for tiny to be idle")


async def asked(one: Pool, **fields: Any) -> str:
    async with one.http() as http:
        answer = await http.post("/v1/videos", json={"prompt": "x", **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()["id"]


def state(one: Pool, video: str) -> JobState:
    job = one.conductor.find_job(video)
    assert job is not None
    return job.state


def fault(one: Pool, video: str) -> str:
    job = one.conductor.find_job(video)
    assert job is not None
    assert job.fault is not None
    return job.fault.code


async def test_two_nodes_run_the_queue_in_order(tmp_path: Path):
    async with pool(tmp_path, "a", "b", peer={"plays": False}) as one:
        videos = [await asked(one) for _ in range(3)]
        await one.until(videos[1], "in_progress")
        first, second = one.peers
        await one.port.until(lambda: [len(peer.of(LeaseRequest)) for peer in one.peers] == [1, 1])
        assert state(one, videos[2]) == JobState.QUEUED
        waits = one.conductor.find_job(videos[2])
        await one.port.until(lambda: "makes another video" in one.conductor.table.jobs[videos[2]].phase)
        assert waits is not None
        holder = first if first.of(LeaseRequest)[0].job == videos[0] else second
        holder.finish(holder.of(LeaseRequest)[0].lease)
        await one.until(videos[0], "completed")
        await one.until(videos[2], "in_progress")
        assert len(holder.of(LeaseRequest)) == 2
        rows = await one.port.get("/api/v1/leases")
        assert {(row["job"], row["size"], row["orphan"]) for row in rows["leases"]} == {
            (videos[1], 36 * GIB, False),
            (videos[2], 36 * GIB, False),
        }


async def test_refused_job_keeps_its_place_and_chat_continues(tmp_path: Path):
    async with pool(tmp_path, peer={"refusal": NO}) as one:
        first, second = await asked(one), await asked(one)
        await one.port.until(lambda: one.conductor.table.jobs[first].phase == NO.waiting_for)
        assert [lease.job for lease in one.peer.of(LeaseRequest)] == [first], "the second does not overtake"
        one.peer.refusal = None
        await one.until(first, "completed")
        await one.until(second, "completed")
        assert [lease.job for lease in one.peer.of(LeaseRequest)][-1] == second
        assert one.peer.of(Generate) == []


async def test_next_job_is_judged_by_the_lowered_ceiling(tmp_path: Path):
    memory = a_memory(20 * GIB, 128 * GIB)
    async with pool(tmp_path, "a", "b", peer={"plays": False}) as one:
        one.peers[1].report_changes = {"memory": memory}
        await one.port.until(lambda: one.conductor.view.nodes[1].memory.headroom == 20 * GIB)
        video = await asked(one)
        await one.until(video, "in_progress")
        assert [len(peer.of(LeaseRequest)) for peer in one.peers] == [1, 0], (
            "the lease is requested where the video fits without an unload"
        )


async def test_returning_node_continues_its_video_job(tmp_path: Path):
    async with pool(tmp_path, peer={"plays": False}, node_loss_timeout_seconds=30) as one:
        video = await asked(one)
        await one.until(video, "in_progress")
        await one.peer.cut()
        assert one.conductor.table.jobs[video].away
        assert one.conductor.table.find_hold(one.peer.who.node if one.peer.who else "") is not None
        await one.peer.link()
        await one.port.until(lambda: not one.conductor.table.jobs[video].away)
        one.peer.finish(next(iter(one.peer.leases)))
        await one.until(video, "completed")


@pytest.mark.parametrize(("rule", "ended"), [("fail", "failed"), ("requeue", "completed")])
async def test_absent_node_loses_its_job_as_configured(tmp_path: Path, rule: str, ended: str):
    async with pool(tmp_path, "a", "b", peer={"plays": False}, node_loss_timeout_seconds=0.3, on_node_loss=rule) as one:
        video = await asked(one)
        await one.until(video, "in_progress")
        holder, other = sorted(one.peers, key=lambda peer: -len(peer.leases))
        other.plays = True
        await holder.cut()
        await one.until(video, ended)
        assert one.conductor.table.holds == {}
        if rule == "fail":
            assert fault(one, video) == "node_lost"
        else:
            assert len(other.of(LeaseRequest)) == 1
        late = next(iter(holder.leases))
        await holder.link()
        await one.port.until(lambda: any(one.lease == late for one in holder.of(LeaseRelease)))
        assert holder.of(LeaseRelease)[0].cause == "superseded", "a lease of an unknown job is released"


async def test_returning_node_without_its_job_fails_it(tmp_path: Path):
    async with pool(tmp_path, peer={"plays": False}) as one:
        video = await asked(one)
        await one.until(video, "in_progress")
        await one.peer.cut()
        one.peer.leases.clear()
        await one.peer.link()
        await one.until(video, "failed")
        assert fault(one, video) == "worker_lost"


@pytest.mark.parametrize("peer", [{"refuses": "Ray has no room"}, {"starts": False}])
async def test_an_actor_that_does_not_start_is_tried_again_and_then_fails(tmp_path: Path, peer: dict[str, Any]):
    async with pool(tmp_path, peer={"plays": False, **peer}, start_timeout_seconds=0.2) as one:
        one.conductor.table = type(one.conductor.table)(
            type(one.conductor.table.rules)(attempts=0, start_seconds=0.2), {}, {}, {}
        )
        video = await asked(one)
        await one.until(video, "failed")
        assert fault(one, video) == "start_failed"
        await one.port.until(lambda: not one.conductor.table.holds)


async def test_only_nodes_allowed_to_make_videos_get_jobs(tmp_path: Path):
    async with pool(tmp_path, "a", "b", peer={"permitted": False, "plays": False}) as one:
        nodes = one.port.application.nodes
        first, second = one.peers
        assert [one.allowed for one in one.peers] == [False, False]
        assert second.who is not None
        nodes.administration.set_video_allowed(second.who.node, on=True)
        await one.port.until(lambda: second.allowed)
        video = await asked(one)
        await one.until(video, "in_progress")
        assert [len(peer.of(LeaseRequest)) for peer in one.peers] == [0, 1]
        waiting = await asked(one)
        nodes.administration.set_video_allowed(second.who.node, on=False)
        await one.port.until(lambda: not second.allowed)
        second.finish(next(iter(second.leases)))
        await one.until(video, "completed")
        await one.port.until(lambda: "allow-video" in one.conductor.table.jobs[waiting].phase)
        assert first.of(AllowVideo) == [], "the node had been allowed before"
        assert [frame.allowed for frame in second.of(AllowVideo)] == [True, False]
        await second.cut()
        nodes.administration.set_video_allowed(second.who.node, on=True)
        await second.link()
        await one.port.until(lambda: second.allowed)


async def test_this_process_begins_again_and_finds_its_jobs(tmp_path: Path):
    async with opened(tmp_path) as port:
        peer = VideoPeer(port, "a", plays=False)
        await peer.link()
        before = Pool(port, [peer])
        running, waiting = await asked(before), await asked(before)
        await before.until(running, "in_progress")
        await peer.cut()
    assert not (tmp_path / "state" / f"{FILE}-wal").exists(), "the database was closed"
    async with opened(tmp_path) as port:
        peer.port = port
        after = Pool(port, [peer])
        admin = after.http(after.new_key("admin"))
        assert state(after, running) == JobState.IN_PROGRESS
        peer.progress = lambda *_, **__: None
        await peer.link()
        del peer.progress
        peer.finish(next(iter(peer.leases)))
        await after.port.until(lambda: state(after, running) == JobState.COMPLETED)
        await after.port.until(lambda: state(after, waiting) == JobState.IN_PROGRESS)
        async with admin:
            assert (await admin.get(f"/v1/videos/{running}/content")).content == CLIP


async def test_a_broken_file_fails_the_job_and_is_not_kept(tmp_path: Path):
    for wrong in ({"video.mp4": CLIP[:-1] + b"x"}, {"video.mp4": CLIP + b"x"}, {"other.bin": b"x"}):
        async with pool(tmp_path / str(len(str(wrong))), peer={"told": wrong}) as one:
            video = await asked(one)
            await one.until(video, "failed")
            assert fault(one, video) == ("output_invalid" if "other.bin" in wrong else "artifact_broken")
            folder = one.conductor.artifacts.get_folder(video)
            await one.port.until(lambda: not folder.exists())  # noqa: B023  waited for at once


async def test_files_are_fetched_again_after_an_interruption_and_acknowledged_then(tmp_path: Path):
    async with pool(tmp_path, peer={"plays": False}) as one:
        video = await asked(one)
        await one.until(video, "in_progress")
        clip = one.peer.files.pop("video.mp4")
        one.peer.told = {"video.mp4": clip}
        one.peer.finish(next(iter(one.peer.leases)))
        await one.port.until(lambda: state(one, video) == JobState.FINALIZING)
        await asyncio.sleep(0)
        assert one.peer.of(LeaseRelease) == [], "kept until it is here"
        await one.peer.cut()
        one.peer.files["video.mp4"] = clip
        await one.peer.link()
        await one.until(video, "completed")
        await one.port.until(lambda: one.peer.of(LeaseRelease) != [])
        assert one.peer.of(LeaseRelease)[-1].cause == "acknowledged"


async def test_files_missing_on_their_node_fail_the_job(tmp_path: Path):
    async with pool(tmp_path, peer={"plays": False}) as one:
        video = await asked(one)
        await one.until(video, "in_progress")
        one.peer.told = {"video.mp4": one.peer.files.pop("video.mp4")}
        one.peer.finish(next(iter(one.peer.leases)))
        await one.port.until(lambda: state(one, video) == JobState.FINALIZING)
        one.peer.leases.clear()
        await one.until(video, "failed")
        assert fault(one, video) == "artifact_lost"


async def test_a_removed_node_is_not_kept_anywhere(tmp_path: Path):
    async with pool(tmp_path, "a", "b", peer={"plays": False}) as one:
        for _ in range(2):
            await asked(one)
        await one.port.until(lambda: len(one.conductor.table.holds) == 2)
        who = one.peer.who
        assert who is not None
        assert list(found(one.conductor, who.node, "conductor", set())) != []
        one.port.application.nodes.administration.remove_node(who.node)
        one.conductor.delete_node_data(who.node)
        one.conductor.apply_view(
            type(one.conductor.view)(tuple(n for n in one.conductor.view.nodes if n.id != who.node))
        )
        assert [path for path in found(one.conductor, who.node, "conductor", set()) if "_links" not in path] == []


async def test_lease_frames_of_another_node_are_ignored(tmp_path: Path):
    async with pool(tmp_path, "a", "b", peer={"plays": False}) as one:
        video = await asked(one)
        await one.until(video, "in_progress")
        holder, other = sorted(one.peers, key=lambda peer: -len(peer.leases))
        (lease,) = holder.leases
        other.leases[lease] = holder.leases[lease]
        other.finish(lease, "worker_crashed")
        other.say(LeaseGranted(lease, 99))
        await asyncio.sleep(0.2)
        assert state(one, video) == JobState.IN_PROGRESS


# files


def asks(data: bytes) -> Any:
    async def ask(node: str, what: str, limit: int) -> Any:
        for at in range(0, len(data), 1000):
            yield data[at : at + 1000]

    return ask


async def test_stored_file_is_private_to_its_user(tmp_path: Path):
    artifacts = ArtifactFolder(tmp_path / "videos", asks(CLIP))
    kept = await artifacts.fetch_files(a_job(1), artifacts_of({"video.mp4": CLIP}))
    assert not isinstance(kept, JobFault)
    assert kept[0].sha256 == hashlib.sha256(CLIP).hexdigest()
    folder = artifacts.get_folder("video_1")
    assert [(file.name, file.stat().st_mode & 0o777) for file in folder.iterdir()] == [("video.mp4", 0o600)]
    assert folder.stat().st_mode & 0o777 == 0o700
    artifacts.remove_unknown({"video_2"})
    assert not folder.exists()


@pytest.mark.parametrize("name", ["../video.mp4", "/etc/x.mp4", ".mp4", "a/b.mp4", "x" * 99 + ".mp4", "a.mp4\n", ""])
async def test_names_of_files_are_never_paths(tmp_path: Path, name: str):
    artifacts = ArtifactFolder(tmp_path / "videos", asks(CLIP))
    found = await artifacts.fetch_files(a_job(1), (Artifact(name, len(CLIP), hashlib.sha256(CLIP).digest()),))
    assert isinstance(found, JobFault)
    assert not (tmp_path / "videos").exists()


async def test_a_disk_that_cannot_be_written_is_a_clear_error(tmp_path: Path):
    (tmp_path / "videos").write_text("in the way")
    found = await ArtifactFolder(tmp_path / "videos", asks(CLIP)).fetch_files(
        a_job(1), artifacts_of({"video.mp4": CLIP})
    )
    assert isinstance(found, JobFault)
    assert found.code == "storage_failed"
    assert "the coordinator cannot write" in found.message


async def test_a_full_disk_is_a_clear_error_and_the_node_may_drop_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def full(descriptor: int, piece: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(artifacts_module, "_write", full)
    async with pool(tmp_path) as one:
        video = await asked(one)
        failed = await one.until(video, "failed")
        assert failed["error"]["code"] == "storage_full"
        assert "the disk of the coordinator is full" in failed["error"]["message"]
        await one.port.until(lambda: one.peer.ended == {})
        folder = one.conductor.artifacts.get_folder(video)
        await one.port.until(lambda: not folder.exists())


async def test_an_illegal_event_of_a_video_job_is_counted(tmp_path: Path):
    async with pool(tmp_path) as one:
        counts = one.port.application.dispatcher.counters.illegal_events
        with pytest.raises(IllegalEventError, match="unknown is not to be placed on node-1 now"):
            one.conductor.apply_event(JobPlaced("unknown", "node-1", "lease"))
        assert counts == IllegalEventCounts() | {"video_job": 1}
        await asked(one)
        assert counts == IllegalEventCounts() | {"video_job": 1}, "later events are legal"


async def test_a_job_that_cannot_be_stored_does_not_run(tmp_path: Path):
    async with pool(tmp_path, peer={"plays": False}) as one, one.http() as http:
        stored = await asked(one)
        await one.until(stored, "in_progress")
        await http.post(f"/v1/videos/{stored}/cancel")
        await one.port.until(lambda: not one.conductor.table.holds)
        with sqlite3.connect(tmp_path / "state" / FILE) as other:
            other.execute("DROP TABLE jobs")
        for _ in range(2):
            answer = await http.post("/v1/videos", json={"prompt": "x"}, headers={"Idempotency-Key": "again"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_failed")
            assert list(one.conductor.table.jobs) == [stored]
            await one.port.until(lambda: not one.conductor.table.holds)
        await one.port.until(lambda: {lease.phase for lease in one.peer.leases.values()} <= {"ended"})


async def test_a_repeated_request_is_confirmed_only_after_its_job_is_on_disk(tmp_path: Path):
    async with pool(tmp_path, peer={"muted": True}) as one, one.http() as http:
        await http.delete(f"/v1/videos/{await asked(one)}")
        with closing(sqlite3.connect(tmp_path / "state" / FILE, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")  # the next write waits for its end
            headers, body = {"Idempotency-Key": "again"}, {"prompt": "x"}
            requests = [asyncio.create_task(http.post("/v1/videos", json=body, headers=headers)) for _ in range(2)]
            await one.port.until(lambda: one.conductor.table.jobs)
            await one.port.until(lambda: len(one.peer.of(LeaseRequest)) == 2)
            assert [request.done() for request in requests] == [False, False]
            other.execute("ALTER TABLE jobs RENAME TO away")
            other.execute("COMMIT")
        answers = await asyncio.gather(*requests)
        assert [answer.status_code for answer in answers] == [503, 503]
        assert not one.conductor.table.jobs


async def test_a_stored_job_whose_next_state_cannot_be_stored_is_confirmed(tmp_path: Path):
    """A restart queues the stored job again, therefore the client must not get an error."""
    async with pool(tmp_path, peer={"plays": False}) as one, one.http() as http:
        await http.delete(f"/v1/videos/{await asked(one)}")
        with sqlite3.connect(tmp_path / "state" / FILE) as other:
            other.execute(
                "CREATE TRIGGER full BEFORE INSERT ON jobs WHEN json_extract(new.record, '$.state') != 'queued' "
                "BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
            )
        await one.port.until(lambda: not one.conductor.table.holds)
        video = await asked(one)
        await one.until(video, "in_progress")
        assert one.conductor.take_snapshot().counters.ends["cancelled"] == 1, "the job that was deleted"
        answer = await http.post("/v1/videos", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_failed")
        assert list(one.conductor.table.jobs) == [video]
        assert one.conductor.take_snapshot().counters.ends["cancelled"] == 1, "a refused job was not cancelled"
    stored = VideoStore(tmp_path / "state")
    assert [(job.id, job.state) for job in stored.jobs] == [(video, JobState.QUEUED)]
    stored.close()


async def test_a_job_that_cannot_be_stored_is_refused_and_not_counted_as_cancelled(tmp_path: Path):
    async with pool(tmp_path, peer={"plays": False}) as one, one.http() as http:
        await http.delete(f"/v1/videos/{await asked(one)}")
        with sqlite3.connect(tmp_path / "state" / FILE) as other:
            other.execute(
                "CREATE TRIGGER full BEFORE INSERT ON jobs BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
            )
        answer = await http.post("/v1/videos", json={"prompt": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_failed")
        assert not one.conductor.table.jobs
        assert one.conductor.take_snapshot().counters.ends["cancelled"] == 1, "the job that was deleted"


async def test_a_second_end_of_a_lease_that_contradicts_the_first_is_ignored(tmp_path: Path):
    async with pool(tmp_path, peer={"plays": False}) as one:
        video = await asked(one)
        await one.until(video, "in_progress")
        (lease,) = one.peer.of(LeaseRequest)
        node = one.conductor.table.jobs[video].node
        files = artifacts_of({"video.mp4": CLIP})
        for code in ("completed", "start_failed"):
            one.conductor.handle_frame(NodeId(node), LeaseEnded(lease.lease, lease.generation, code, code, files))
        assert state(one, video) == JobState.FINALIZING
        assert one.port.application.dispatcher.counters.illegal_events == IllegalEventCounts() | {"video_job": 1}


@pytest.mark.parametrize(("verb", "statement"), [("POST", "INSERT"), ("DELETE", "DELETE")])
async def test_an_end_that_cannot_be_stored_is_an_error(tmp_path: Path, verb: str, statement: str):
    async with pool(tmp_path, peer={"plays": False}) as one, one.http() as http:
        video = await asked(one)
        await one.until(video, "in_progress")
        with sqlite3.connect(tmp_path / "state" / FILE) as other:
            other.execute(
                f"CREATE TRIGGER full BEFORE {statement} ON jobs BEGIN SELECT RAISE(ABORT, 'the disk is full'); END"
            )
        answer = await http.request(verb, f"/v1/videos/{video}{'/cancel' if verb == 'POST' else ''}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "storage_failed")
        await one.port.until(lambda: one.peer.of(LeaseRelease))


async def test_a_waiting_job_is_placed_with_the_report_of_its_node_and_not_at_the_next_tick(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("coordinator.video.job_timer.TICK_SECONDS", 3600.0)
    async with pool(tmp_path, peer={"plays": False}) as one:
        await one.peer.cut()
        video = await asked(one)
        assert state(one, video) == JobState.QUEUED
        await one.peer.link()
        await one.until(video, "in_progress")
