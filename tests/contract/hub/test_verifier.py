"""The verifier as a process."""

import time
from pathlib import Path

import pytest

from node.hub.child_messages import VerifyOrder
from node.hub.digests import DigestStore, find_content
from tests.support.hub.downloads import Child
from wire.frames.model_files import ModelOrderCode, ModelOrderPhase
from wire.units import MIB

pytestmark = pytest.mark.slow


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(8 * MIB))
    return folder


def start(model: Path, rate: int = 0) -> Child:
    order = VerifyOrder(
        folder=str(model), digests=str(model.parent / "state" / "digests.json"), max_bytes_per_second=rate
    )
    return Child("node.hub.verifier", order, model.parent / "log")


def test_a_verification_stores_the_digests(model: Path):
    child = start(model)
    end = child.wait_end()
    child.close()
    assert end.code == ModelOrderCode.COMPLETED
    assert end.content == find_content(model, DigestStore(model.parent / "state" / "digests.json")) != ""


def test_a_verification_can_be_slowed_down(model: Path):
    began = time.monotonic()
    child = start(model, rate=4 * MIB)
    assert child.wait_end().code == ModelOrderCode.COMPLETED
    child.close()
    assert time.monotonic() - began > 1.7
    assert {message.phase for message in child.progress} == {ModelOrderPhase.VERIFYING}


def test_a_verification_is_cancelled_at_once(model: Path):
    child = start(model, rate=MIB // 2)
    assert child.read() is not None
    child.popen.terminate()
    began = time.monotonic()
    assert child.wait_end().code == ModelOrderCode.CANCELLED
    assert time.monotonic() - began < 5
    child.close()


def test_a_folder_without_a_model_is_named(model: Path):
    for file in model.iterdir():
        file.unlink()
    child = start(model)
    assert child.wait_end().code == ModelOrderCode.NOT_FOUND
    child.close()
