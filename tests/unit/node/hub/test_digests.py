"""The store of digests and the content hash of a model."""

import errno
import hashlib
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from node.hub.digests import (
    ContentHasher,
    DigestStore,
    DigestStoreError,
    compute_content,
    find_content,
    hash_file,
    list_content_files,
    record_digest,
)
from tests.support.hub.hub import git_sha1
from tests.support.processes import ROOT, environment
from wire.frames.model_files import ModelOrderCode
from wire.models.files import ModelFile

CONTENT = b"weights"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model folder whose weights are a link, as in the cache."""
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "blob").write_bytes(CONTENT)
    (folder / "model.safetensors").symlink_to("../blob")
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("not content")
    return folder


def hash_model(folder: Path, store: DigestStore) -> None:
    found = {folder / name: hash_file(folder / name, len) for name in list_content_files(folder)}
    store.add({path: one for path, one in found.items() if one is not None})


def test_find_returns_the_digest_until_the_file_changes(tmp_path: Path, model: Path):
    store = DigestStore(tmp_path / "state" / "digests.json")
    weights = model / "model.safetensors"
    assert store.find(weights) == ""
    store.add({weights: record_digest(weights, SHA256)})
    assert store.find(weights) == store.find(tmp_path / "blob") == SHA256
    before = weights.stat()
    (tmp_path / "blob").write_bytes(b"another")
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert store.find(weights) == ""


@pytest.mark.parametrize("field", [0, 1, 2])
def test_find_compares_size_time_and_inode(tmp_path: Path, model: Path, field: int):
    file = tmp_path / "state" / "digests.json"
    hash_model(model, DigestStore(file))
    entries = json.loads(file.read_text())
    entries[str(tmp_path / "blob")][field] += 1
    file.write_text(json.dumps(entries))
    assert DigestStore(file).find(model / "model.safetensors") == ""
    assert DigestStore(file).find(model / "config.json") != ""


def test_find_reads_a_store_that_another_process_has_replaced(tmp_path: Path, model: Path):
    reader, writer = (DigestStore(tmp_path / "state" / "digests.json") for _ in range(2))
    assert find_content(model, reader) == ""
    hash_model(model, writer)
    assert find_content(model, reader) == compute_content(
        {"model.safetensors": SHA256, "config.json": hashlib.sha256(b"{}").hexdigest()}
    )


def test_find_reads_a_replaced_store_of_the_same_size(tmp_path: Path, model: Path):
    reader, writer = (DigestStore(tmp_path / "state" / "digests.json") for _ in range(2))
    weights = model / "model.safetensors"
    found = list[str]()
    for sha256 in (SHA256, "0" * 64):
        writer.add({weights: record_digest(weights, sha256)})
        found.append(reader.find(weights))
    assert found == [SHA256, "0" * 64]


def test_find_content_is_empty_if_a_file_is_unknown(tmp_path: Path, model: Path):
    store = DigestStore(tmp_path / "state" / "digests.json")
    hash_model(model, store)
    assert len(find_content(model, store)) == 64
    (model / "tokenizer.json").write_text("{}")
    assert find_content(model, store) == ""
    assert find_content(tmp_path / "missing", store) == ""


def test_the_content_of_a_model_has_no_files_of_macos(tmp_path: Path, model: Path):
    store = DigestStore(tmp_path / "state" / "digests.json")
    hash_model(model, store)
    before = find_content(model, store)
    (model / "._model.safetensors").write_bytes(b"attributes")
    assert list_content_files(model) == ["config.json", "model.safetensors"]
    assert find_content(model, store) == before


def test_compute_content_depends_on_names_and_digests():
    hashes = {
        compute_content(one) for one in ({"a": "1", "b": "2"}, {"a": "2", "b": "1"}, {"a": "1"}, {"a": "1", "c": "2"})
    }
    assert len(hashes) == 4
    assert compute_content({"b": "2", "a": "1"}) == compute_content({"a": "1", "b": "2"})


@pytest.mark.parametrize("content", [b"", b"[", b'{"a": 1}'])
def test_a_damaged_store_is_empty(tmp_path: Path, model: Path, content: bytes):
    file = tmp_path / "state" / "digests.json"
    store = DigestStore(file)
    hash_model(model, store)
    file.write_bytes(content)
    assert store.find(model / "config.json") == ""
    hash_model(model, store)
    assert len(find_content(model, store)) == 64


def test_add_removes_entries_of_missing_files_and_is_private(tmp_path: Path, model: Path):
    file = tmp_path / "state" / "digests.json"
    hash_model(model, DigestStore(file))
    (model / "config.json").unlink()
    DigestStore(file).add({})
    assert list(json.loads(file.read_text())) == [str(tmp_path / "blob")]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


WRITER = """
import sys
from pathlib import Path
from node.hub.digests import DigestStore, record_digest
folder, number = Path(sys.argv[1]), sys.argv[2]
for at in range(20):
    path = folder / f"{number}-{at}"
    path.write_text("x")
    DigestStore(folder / "state" / "digests.json").add({path: record_digest(path, "0" * 64)})
"""


def test_add_keeps_the_entries_of_processes_that_write_at_once(tmp_path: Path):
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), str(number)], env=environment(), cwd=ROOT)
        for number in range(3)
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0, 0]
    assert len(json.loads((tmp_path / "state" / "digests.json").read_text())) == 60


def test_content_hasher_computes_both_kinds_of_digests():
    for file in (ModelFile("a", len(CONTENT), SHA256), ModelFile("a", len(CONTENT), "", git_sha1(CONTENT))):
        hasher = ContentHasher(file)
        hasher.update(CONTENT[:3])
        assert not hasher.is_expected()
        hasher.update(CONTENT[3:])
        assert hasher.is_expected()
        assert (hasher.sha256, hasher.digest) == (SHA256, file.etag)


def test_hash_file_returns_none_if_the_file_changes_meanwhile(tmp_path: Path):
    file = tmp_path / "file"
    file.write_bytes(CONTENT)
    assert hash_file(file, lambda _: None) == record_digest(file, SHA256)
    assert hash_file(file, lambda _: file.write_bytes(b"longer than before")) is None


def test_the_lock_of_the_store_is_private_and_can_be_taken_again(tmp_path: Path):
    store = DigestStore(tmp_path / "state" / "digests.json")
    for _ in range(2):
        store.add({})
    (lock,) = (path for path in (tmp_path / "state").iterdir() if path.name.endswith(".lock"))
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("number", "code", "step"),
    [
        (errno.ENOSPC, ModelOrderCode.DISK_FULL, "free disk space there, then try again"),
        (errno.EDQUOT, ModelOrderCode.DISK_FULL, "free disk space there, then try again"),
        (errno.EACCES, ModelOrderCode.FAILED, "check its folder, then try again"),
    ],
)
def test_a_store_that_cannot_be_written_has_the_next_step(tmp_path: Path, number: int, code: str, step: str):
    error = DigestStoreError(tmp_path / "digests.json", OSError(number, os.strerror(number)))
    assert (error.code, error.message) == (
        code,
        f"the digests of files cannot be written to {tmp_path / 'digests.json'}: {os.strerror(number)}: {step}",
    )
