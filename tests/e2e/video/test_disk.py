"""Disks that are really full: small file systems on either side of a video."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from node.video.lease_rules import LeasePhase
from tests.contract.test_video_controller import asked, fault
from tests.contract.test_videos import pool
from tests.support.cluster.hosts import unsupported
from tests.support.video.peer import CLIP
from tests.support.video.standin import standin
from tests.support.video.studio import JOB, Node, flat
from wire.frames import LeaseGranted, LeaseRefused

pytestmark = [pytest.mark.hosts, pytest.mark.slow, pytest.mark.timeout(300)]


@contextmanager
def disk(folder: Path, size: int) -> Iterator[Path]:
    """Mount a file system of `size` bytes."""
    reason = unsupported()
    if reason:
        pytest.skip(reason)
    folder.mkdir(parents=True, mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def larger(folder: Path, size: int) -> None:
    """Change the size of a mounted file system."""
    subprocess.run(["mount", "-o", f"remount,size={size}", folder], check=True)


def fill(folder: Path) -> Path:
    """Fill the disk completely, and return the file that fills it."""
    file = folder / "filler"
    with file.open("wb", buffering=0) as filler:
        try:
            while filler.write(bytes(4096)) == 4096:
                pass
        except OSError:
            pass
    return file


async def test_a_clip_that_finds_no_room_fails_by_name_and_the_next_one_does(tmp_path: Path):
    with disk(tmp_path / "state" / "videos", len(CLIP) // 2) as full:
        async with pool(tmp_path) as one:
            video = await asked(one)
            failed = await one.until(video, "failed")
            assert fault(one, video) == "storage_full"
            assert "the disk of the coordinator is full" in failed["error"]["message"]
            await one.port.until(lambda: one.peer.ended == {})
            await one.port.until(lambda: list(full.iterdir()) == [])
            larger(full, 4 * len(CLIP))
            video = await asked(one)
            await one.until(video, "completed")
            async with one.http() as http:
                assert (await http.get(f"/v1/videos/{video}/content")).content == CLIP


async def test_a_node_with_a_full_disk_reports_it_and_lends_again_after_space_is_freed(tmp_path: Path):
    gate = standin(tmp_path)
    with disk(tmp_path / "node" / "node" / "video" / "leases", 2**20) as full:
        node = Node(tmp_path / "node", flat(worker__environments=str(gate.environments)))
        try:
            await node.start()
            before = node.ceiling
            node.ask(job={**JOB, "prompt": "hold=denoising clip=500000"})
            await node.working(LeasePhase.DENOISING)
            filler = fill(full)
            gate.open(1)
            ended = await node.ended()
            assert ended.code == "disk_full", ended.message
            assert (node.ceiling, node.limiter.leases) == (before, 0)
            filler.touch()
            fill(full)
            node.ask(lease="l-2")
            refused = await node.answer("l-2")
            assert isinstance(refused, LeaseRefused)
            assert refused.code == "disk_full"
            filler.unlink()
            node.ask(lease="l-3")
            assert isinstance(await node.answer("l-3"), LeaseGranted)
            assert (await node.ended("l-3")).code == "completed"
        finally:
            await node.stop()
