"""Verification of a model folder in this process: digests, changed files, and the rate of reads."""

import hashlib
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from node.hub import verifier
from node.hub.cache_layout import RepositoryFolder
from node.hub.child_messages import ChildChannel, ChildEnd, ChildMessage, ChildProgress, VerifyOrder
from node.hub.digests import READ_BYTES, DigestStore, compute_content
from node.hub.verifier import REPORT_SECONDS, run_verification
from tests.support.hub.hub import git_sha1
from wire.frames.model_files import ModelOrderCode, ModelOrderPhase

CONFIG, WEIGHTS = b'{"model_type": "llama"}', bytes(range(256)) * 1000
CONTENT = compute_content(
    {"config.json": hashlib.sha256(CONFIG).hexdigest(), "model.safetensors": hashlib.sha256(WEIGHTS).hexdigest()}
)
CHANGED = "changed on the disk since the download: remove the model and pull it again"


class Model:
    """A model folder with a digest store, and its verifications."""

    def __init__(self, folder: Path, output: pytest.CaptureFixture[bytes]) -> None:
        self.folder, self._output = folder / "model", output
        self.folder.mkdir()
        self.store = DigestStore(folder / "state" / "digests.json")
        self._digests = folder / "state" / "digests.json"
        self.channel = ChildChannel()
        self.progress: list[ChildProgress] = []

    def put(self, name: str, content: bytes) -> None:
        (self.folder / name).write_bytes(content)

    def verify(self, folder: Path | None = None, rate: int = 0) -> ChildEnd:
        order = VerifyOrder(folder=str(folder or self.folder), digests=str(self._digests), max_bytes_per_second=rate)
        end = run_verification(order, self.channel)
        messages = [msgspec.json.decode(line, type=ChildMessage) for line in self._output.readouterr().out.splitlines()]
        self.progress = [message for message in messages if isinstance(message, ChildProgress)]
        return end


@pytest.fixture
def model(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> Model:
    made = Model(tmp_path, capsysbinary)
    made.put("config.json", CONFIG)
    made.put("model.safetensors", WEIGHTS)
    made.put("README.md", b"not content")
    return made


def make_cached(hub: Path, config_blob: str, weights_blob: str) -> Path:
    """Return the snapshot of a repository with these names of its blobs."""
    repository = RepositoryFolder(hub, "tests/tiny")
    repository.prepare()
    snapshot = repository.get_snapshot("c" * 40)
    snapshot.mkdir()
    for name, blob, content in (("config.json", config_blob, CONFIG), ("model.safetensors", weights_blob, WEIGHTS)):
        repository.get_blob(blob).write_bytes(content)
        (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot


def test_the_digest_of_every_file_of_the_content_is_stored(model: Model):
    assert model.verify() == ChildEnd(code=ModelOrderCode.COMPLETED, content=CONTENT)
    assert model.store.find(model.folder / "config.json") == hashlib.sha256(CONFIG).hexdigest()
    assert model.store.find(model.folder / "model.safetensors") == hashlib.sha256(WEIGHTS).hexdigest()
    assert model.store.find(model.folder / "README.md") == ""


def test_a_folder_without_files_of_a_model_is_named(model: Model, tmp_path: Path):
    empty = tmp_path / "empty"
    empty.mkdir()
    end = model.verify(empty)
    assert end == ChildEnd(code=ModelOrderCode.NOT_FOUND, message=f"{empty} has no files of a model")


def test_a_file_that_cannot_be_read_is_a_failure_with_its_reason(model: Model):
    (model.folder / "model.safetensors").unlink()
    (model.folder / "model.safetensors").mkdir()
    end = model.verify()
    assert end == ChildEnd(code=ModelOrderCode.FAILED, message=f"{model.folder} cannot be read: Is a directory")


def test_digests_that_cannot_be_stored_are_a_failure_with_their_file(model: Model, tmp_path: Path):
    (tmp_path / "state").write_text("a file in place of the folder")
    end = model.verify()
    assert (end.code, end.message) == (
        ModelOrderCode.FAILED,
        f"the digests of files cannot be written to {tmp_path / 'state' / 'digests.json'}: File exists: check its "
        "folder, then try again",
    )


@pytest.mark.parametrize("config_blob", [git_sha1(CONFIG), hashlib.sha256(CONFIG).hexdigest()])
def test_blobs_with_the_digests_of_their_names_are_intact(model: Model, tmp_path: Path, config_blob: str):
    snapshot = make_cached(tmp_path / "hub", config_blob, hashlib.sha256(WEIGHTS).hexdigest())
    assert model.verify(snapshot) == ChildEnd(code=ModelOrderCode.COMPLETED, content=CONTENT)
    assert model.progress[0].total == len(CONFIG) + len(WEIGHTS), "the bytes of the blobs, not those of the links"


@pytest.mark.parametrize(
    ("config_blob", "weights_blob", "changed"),
    [
        (git_sha1(b"{}"), hashlib.sha256(WEIGHTS).hexdigest(), "config.json"),
        (hashlib.sha1(CONFIG).hexdigest(), hashlib.sha256(WEIGHTS).hexdigest(), "config.json"),
        (git_sha1(CONFIG), "a" * 64, "model.safetensors"),
        ("b" * 64, "a" * 64, "config.json, model.safetensors"),
    ],
)
def test_blobs_with_other_digests_are_named(
    model: Model, tmp_path: Path, config_blob: str, weights_blob: str, changed: str
):
    end = model.verify(make_cached(tmp_path / "hub", config_blob, weights_blob))
    assert end == ChildEnd(code=ModelOrderCode.CONTENT_MISMATCH, message=f"{changed} {CHANGED}", content=CONTENT), (
        "the content is that on the disk"
    )


@pytest.mark.parametrize("blob", ["x" * 64, "a" * 63, "A" * 64, "weights"])
def test_blobs_with_other_names_are_not_compared(model: Model, tmp_path: Path, blob: str):
    snapshot = make_cached(tmp_path / "hub", git_sha1(CONFIG), blob)
    assert model.verify(snapshot).code == ModelOrderCode.COMPLETED


def test_files_outside_of_a_cache_are_not_compared_with_their_names(model: Model):
    (model.folder / "model.safetensors").rename(model.folder / ("a" * 64))
    (model.folder / "model.safetensors").symlink_to("a" * 64)
    assert model.verify().code == ModelOrderCode.COMPLETED


def test_a_verification_keeps_its_rate_and_reports_its_progress(model: Model):
    content = bytes(3 * READ_BYTES)
    model.put("model.safetensors", content)
    total, rate = len(CONFIG) + len(content), 3 * READ_BYTES // 2
    began = time.monotonic()
    assert model.verify(rate=rate).code == ModelOrderCode.COMPLETED
    seconds = time.monotonic() - began
    assert seconds >= total / rate - 0.1
    assert 1 <= len(model.progress) <= seconds / REPORT_SECONDS + 1
    for progress in model.progress:
        assert (progress.phase, progress.total) == (ModelOrderPhase.VERIFYING, total)
        assert 0 < progress.done <= total
    assert [one.done for one in model.progress] == sorted({one.done for one in model.progress})
    *_, last = model.progress
    assert last.done > READ_BYTES
    assert rate / 4 < last.speed < 0.9 * last.done, "the last report comes after more than a second"


class StoppedClock(threading.Event):
    """Clock that advances only while a process waits for its stop."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 1000.0

    def wait(self, timeout: float | None = None) -> bool:
        self.now += max(0.0, timeout or 0.0)
        return self.is_set()


def test_a_verification_waits_as_long_as_its_rate_demands(model: Model, monkeypatch: pytest.MonkeyPatch):
    clock = model.channel.stop = StoppedClock()
    monkeypatch.setattr(verifier, "time", SimpleNamespace(monotonic=lambda: clock.now))
    model.put("model.safetensors", bytes(4 * READ_BYTES))
    model.verify(rate=READ_BYTES)
    assert clock.now - 1000 == pytest.approx(4 + len(CONFIG) / READ_BYTES)
    first, *later = model.progress
    assert (first.done, first.speed) == (len(CONFIG), 0.0)
    done = [len(CONFIG) + number * READ_BYTES for number in (2, 3, 4)]
    assert [one.done for one in later] == done
    seconds = [before / READ_BYTES for before in (done[0] - READ_BYTES, *done)]
    assert [one.speed for one in later] == pytest.approx([now / at for now, at in zip(done, seconds, strict=False)])


class ChangingChannel(ChildChannel):
    """Channel that touches a file at each message."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self._file = file

    def send(self, message: ChildMessage) -> None:
        os.utime(self._file, (1, 1))


def test_a_file_that_changes_while_it_is_read_is_named_and_nothing_is_stored(model: Model):
    model.channel = ChangingChannel(model.folder / "config.json")
    assert model.verify() == ChildEnd(
        code=ModelOrderCode.FAILED, message="config.json changed while it was read: verify again"
    )
    assert model.store.find(model.folder / "config.json") == ""
    model.channel = ChildChannel()
    assert model.verify().code == ModelOrderCode.COMPLETED


def test_the_git_digest_of_a_large_file_is_not_computed(model: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    snapshot = make_cached(tmp_path / "hub", "a" * 40, hashlib.sha256(WEIGHTS).hexdigest())
    for most, code in ((len(CONFIG), ModelOrderCode.CONTENT_MISMATCH), (len(CONFIG) - 1, ModelOrderCode.COMPLETED)):
        monkeypatch.setattr(verifier, "MAX_GIT_BYTES", most)
        assert model.verify(snapshot).code == code


def test_progress_is_reported_twice_a_second(model: Model):
    model.put("model.safetensors", bytes(40 * READ_BYTES))
    began = time.monotonic()
    assert model.verify().code == ModelOrderCode.COMPLETED
    assert 1 <= len(model.progress) <= (time.monotonic() - began) / REPORT_SECONDS + 1


def test_a_cancelled_verification_stores_nothing(model: Model):
    model.channel.stop.set()
    assert model.verify() == ChildEnd(code=ModelOrderCode.CANCELLED)
    assert model.store.find(model.folder / "config.json") == ""
