"""Ray as a child process; a real one runs in tests/e2e/video/test_ray.py."""

import asyncio
import os
import stat
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from node.video.ray import ray_process
from node.video.ray.ray_process import STARTED


def test_a_folder_below_tmp_is_short_and_ours_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    found = ray_process.create_short_folder(Path("/some/state", "x" * 90))
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    assert found.stat().st_uid == os.getuid()
    assert len(found.name) < 24
    found.rmdir()
    found.symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError, match=f"{found} is no folder: delete it"):
        ray_process.create_short_folder(Path("/some/state", "x" * 90))


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("sys.platform", "linux")
    user = os.getuid()
    monkeypatch.setattr(ray_process, "os", SimpleNamespace(**{**vars(os), "getuid": lambda: user + 1}))
    with pytest.raises(PermissionError, match="belongs to another user: delete it as that user or as an administrator"):
        ray_process.create_short_folder(Path("/some/state"))


def test_the_environment_is_named_confines_ray_to_loopback_and_holds_no_secret(tmp_path: Path):
    inherited = {
        "PATH": "/bin",
        "RAY_AUTH_TOKEN": "s3cret",
        "OPENAI_API_KEY": "sk",
        "RAY_ADDRESS": "evil",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",
        "RAY_AUTH_MODE": "disabled",
    }
    found = ray_process.build_environment(inherited, tmp_path)
    assert (found["PATH"], found["RAY_AUTH_TOKEN_PATH"]) == ("/bin", str(tmp_path / "token"))
    assert (found["RAY_AUTH_MODE"], found["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"]) == ("token", "0")
    assert not {"RAY_AUTH_TOKEN", "OPENAI_API_KEY", "RAY_ADDRESS"} & set(found)
    assert "s3cret" not in found.values()


async def started(script: str, folder: Path, seconds: float = 20.0) -> tuple[asyncio.subprocess.Process, bytes]:
    process = await ray_process.start_ray([sys.executable, "-c", script], {}, folder)
    return process, await ray_process.read_until_started(process, seconds)


async def ended(process: asyncio.subprocess.Process) -> int:
    waiting = asyncio.create_task(process.wait())
    await ray_process.end_ray(process, waiting)
    return waiting.result()


async def test_it_is_read_until_it_is_up_and_ended_with_all_of_its_group(tmp_path: Path):
    script = f"import os,time; os.fork(); print('a', {STARTED.decode()!r}, flush=True); time.sleep(600)"
    process, said = await started(script, tmp_path)
    assert STARTED in said
    assert await ended(process) == -15, "no process of the group holds the pipe"


async def test_a_failed_start_has_its_last_output_and_long_output_is_cut(tmp_path: Path):
    process, said = await started("print('one'); print('two\\n\\n three '); print('four')", tmp_path)
    assert ray_process.summarize_output(said) == "two / three / four"
    assert ray_process.summarize_output(b"") == "it printed nothing"
    await ended(process)
    process, said = await started("while True: print('x' * 4095)", tmp_path)
    assert ray_process.MAX_OUTPUT_BYTES <= len(said) < ray_process.MAX_OUTPUT_BYTES + 4096
    await ended(process)


async def test_no_request_waits_for_ever(tmp_path: Path):
    process, said = await started("import time; time.sleep(600)", tmp_path, 0.1)
    assert said == b""
    await ended(process)
