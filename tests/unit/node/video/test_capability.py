"""Whether a node can make videos: by its settings, its packages and the environment of the worker."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from node.settings import resolve_settings
from node.video import capability, environment
from node.video.capability import VideoCapability, get_environments_folder
from tests.support.video.standin import standin
from tests.unit.node.video.test_packages import package

Open = Callable[..., VideoCapability]


@pytest.fixture
async def open_(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Open]:
    """Yield a function that creates the capability of a node with folders of the test, checked all the time.

    `changes` gets an item at each change.
    """
    monkeypatch.setattr(capability, "CHECK_INTERVAL_SECONDS", 0.001)
    made: list[VideoCapability] = []

    def start(changes: asyncio.Queue[None] | None = None, **settings: Any) -> VideoCapability:
        flat = {"models.folders": str(tmp_path / "packages"), "models.use_huggingface_cache": False}
        flat |= {"worker.environments": str(tmp_path / "environments")}
        flat |= {key.replace("__", "."): value for key, value in settings.items()}
        changed = (lambda: None) if changes is None else (lambda: changes.put_nowait(None))
        made.append(VideoCapability(resolve_settings([("test", flat)]).value, tmp_path, changed, {}))
        return made[-1]

    yield start
    for one in made:
        await one.stop()


async def test_a_node_is_ready_once_it_has_an_environment_and_a_usable_package(open_: Open, tmp_path: Path):
    changes: asyncio.Queue[None] = asyncio.Queue()
    one = open_(changes)
    assert one.unready == "this node is still searching for video packages"
    package(tmp_path / "packages/wan")
    one.start()
    await asyncio.wait_for(one.checked.wait(), 30)
    assert "`cluster video install`" in one.unready
    assert [found.described.engine for found in one.packages.values()] == [""], "nothing can run it"
    await asyncio.wait_for(changes.get(), 30)
    standin(tmp_path)
    await asyncio.wait_for(changes.get(), 30)
    assert one.unready == ""
    version = environment.read_engine_version(environment.find_requirement_files())
    assert {name: found.described.engine for name, found in one.packages.items()} == {"wan": version}
    assert version
    assert one.python.is_relative_to(tmp_path / "environments")
    assert one.python.exists()
    (tmp_path / "packages/wan/vae").rename(tmp_path / "vae")
    await asyncio.wait_for(changes.get(), 30)
    assert "no usable video package" in one.unready
    assert list(one.packages) == ["wan"], "a package that cannot be used is listed"
    (tmp_path / "packages").rename(tmp_path / "others")
    await asyncio.wait_for(changes.get(), 30)
    assert ("no usable video package" in one.unready, one.packages) == (True, {})
    assert changes.empty(), "a check without a difference is no change"


async def test_a_node_without_video_checks_nothing(open_: Open, tmp_path: Path):
    package(tmp_path / "packages/wan")
    standin(tmp_path)
    one = open_(worker__enabled=False)
    one.start()
    assert one.checked.is_set()
    assert not one.enabled
    assert "worker.enabled" in one.unready
    assert one.packages == {}


@pytest.mark.parametrize(
    "error", [OSError(2, "No such file", "gone.lock"), ValueError("gone.lock is no file")], ids=str
)
async def test_a_check_that_fails_is_the_reason_and_is_repeated(
    open_: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
):
    def fail() -> tuple[Path, ...]:
        raise error

    changes: asyncio.Queue[None] = asyncio.Queue()
    package(tmp_path / "packages/wan")
    standin(tmp_path)
    one = open_(changes)
    with monkeypatch.context() as patch:
        patch.setattr(environment, "find_requirement_files", fail)
        one.start()
        await asyncio.wait_for(changes.get(), 30)
        assert "cannot be checked" in one.unready
        assert "gone.lock" in one.unready
    await asyncio.wait_for(changes.get(), 30)
    assert one.unready == ""


@pytest.mark.parametrize(
    ("wanted", "folder"),
    [("", "/state/node/video/environments"), ("/other", "/other"), ("~/x", ""), ("~unknown-user/x", "~unknown-user/x")],
)
def test_the_environments_are_below_the_state_unless_a_setting_names_a_folder(wanted: str, folder: str):
    settings = resolve_settings([("test", {"worker.environments": wanted})]).value
    assert get_environments_folder(settings, Path("/state")) == (Path(folder) if folder else Path.home() / "x")
