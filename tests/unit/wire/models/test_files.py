"""Manifests of repositories: which of them may be written to a disk."""

import pytest

from wire.models.files import ModelFile, ModelManifest, find_manifest_fault, is_valid_repo

SHA256 = "a" * 64
GIT_SHA1 = "b" * 40
COMMIT = "c" * 40


def make_manifest(*paths: str, commit: str = COMMIT, repo: str = "mlx-community/tiny") -> ModelManifest:
    return ModelManifest(repo, commit, tuple(ModelFile(path, 5, SHA256) for path in paths))


def test_find_manifest_fault_accepts_plain_repositories() -> None:
    manifest = make_manifest(
        "config.json", "1_Pooling/config.json", ".gitattributes", "model-00001-of-00002.safetensors"
    )
    assert find_manifest_fault(manifest) == ""
    assert manifest.size == 20
    small = ModelManifest("a/b", COMMIT, (ModelFile("x.json", 0, "", GIT_SHA1),))
    assert find_manifest_fault(small) == ""
    assert small.files[0].etag == GIT_SHA1


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc/passwd",
        "../x",
        "a/../b",
        "a//b",
        "a/./b",
        "..",
        ".",
        "a\\b",
        "a\nb",
        "x/",
        "C:x",
        "a" * 256,
        "/".join("abcdefghi"),
    ],
)
def test_find_manifest_fault_refuses_paths_that_leave_the_folder(path: str) -> None:
    assert "path" in find_manifest_fault(make_manifest("config.json", path))


def test_find_manifest_fault_refuses_paths_that_conflict_without_case() -> None:
    assert "two files" in find_manifest_fault(make_manifest("config.json", "Config.json"))
    assert "both a file and a folder" in find_manifest_fault(make_manifest("Sub", "sub/x.json"))


@pytest.mark.parametrize(("sha256", "git_sha1"), [("", ""), ("A" * 64, ""), ("a" * 63, GIT_SHA1), ("", "b" * 39)])
def test_find_manifest_fault_refuses_files_without_a_digest(sha256: str, git_sha1: str) -> None:
    manifest = ModelManifest("a/b", COMMIT, (ModelFile("config.json", 1, sha256, git_sha1),))
    assert "config.json" in find_manifest_fault(manifest)


def test_find_manifest_fault_refuses_other_faults() -> None:
    assert "commit" in find_manifest_fault(make_manifest("config.json", commit="main"))
    assert "no files" in find_manifest_fault(make_manifest())
    assert "publisher/name" in find_manifest_fault(make_manifest("config.json", repo="../../x"))


@pytest.mark.parametrize("repo", ["mlx-community/Qwen3-8B-4bit", "a/b", "org.x/model_1.5"])
def test_is_valid_repo_accepts_names_of_the_hub(repo: str) -> None:
    assert is_valid_repo(repo)


@pytest.mark.parametrize(
    "repo", ["", "gpt2", "a/b/c", "a/..", "../b", "a--b/c", "a/b--c", "-a/b", "a/b.", "a b/c", "a/b\n"]
)
def test_is_valid_repo_refuses_other_names(repo: str) -> None:
    assert not is_valid_repo(repo)
