"""Files of a model: the manifest of a repository at one commit, and the sources from which a node gets the files.

Sizes are bytes. Fields are only appended, never reordered, as in `wire.report`.
"""

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from wire.bounds import MAX_ITEMS, Size, Text, Word
from wire.report import WireStruct

PIECE_BYTES = 8 * 1024 * 1024
"""Maximum bytes that a download fetches again after an interruption, over all of its connections."""
MAX_PATH_CHARACTERS = 255
"""Maximum characters of a path in a repository."""
MAX_PATH_PARTS = 8
"""Maximum names in a path, separated by `/`."""

_REPO = re.compile(
    r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?/[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"[A-Za-z0-9_+@(),=][A-Za-z0-9 ._+@(),=-]*")


class ModelFile(WireStruct, frozen=True, array_like=True, gc=False):
    """A file of a repository, with the digest by which its content is verified: `sha256`, or else `git_sha1`."""

    path: Word
    """Path below the root of the repository, with `/`."""
    size: Size
    """Size of the file in bytes."""
    sha256: Word = ""
    """SHA-256 of the content, 64 hex digits; empty if the hub does not know it (files outside of LFS)."""
    git_sha1: Word = ""
    """SHA-1 of the git blob, 40 hex digits; empty if unknown."""

    @property
    def etag(self) -> str:
        """Name of the file's blob in the Hugging Face cache: `sha256`, or else `git_sha1`."""
        return self.sha256 or self.git_sha1


class ModelManifest(WireStruct, frozen=True, array_like=True, gc=False):
    """Files of a repository at one commit. All nodes of a pull get the same manifest."""

    repo: Word
    """Repository, as `publisher/name`."""
    commit: Word
    """Commit, 40 hex digits."""
    files: Annotated[tuple[ModelFile, ...], Meta(max_length=MAX_ITEMS)]
    revision: Word = ""
    """Branch or tag that named the commit, which becomes a reference of the cache; empty for `main`."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


class SourceKind(StrEnum):
    """Kind of a source of model files."""

    HUB = "hub"
    """The Hugging Face hub, or a server with its protocol."""
    MIRROR = "mirror"
    """Another node, which serves its files for one transfer by the protocol of the hub."""
    RELAY = "relay"
    """Another node, through the coordinator's cluster port."""


class ModelSource(WireStruct, frozen=True, array_like=True, gc=False):
    """Source from which a node gets the files of a model."""

    kind: Word
    """A `SourceKind`, or the kind of a newer coordinator, which the node skips."""
    url: Text
    """Base URL of the server, without a path; empty for a relay: the node dials the address of its link."""
    token: Text = ""
    """Secret for this source: the token of the hub, or the token of the transfer; empty for none."""
    node: Word = ""
    """Id of the node that serves, which its certificate must name; empty for the hub."""


def is_valid_repo(repo: str) -> bool:
    """Return whether a text is the name of a repository, `publisher/name`, by the rules of the hub."""
    return _REPO.fullmatch(repo) is not None and "--" not in repo and ".." not in repo


def find_manifest_fault(manifest: ModelManifest) -> str:
    """Return why a manifest must not be written to a disk, as one sentence; empty if it may be written.

    The check covers the name of the repository, the commit, the revision and the digests. It refuses paths that are too
    long, leave the folder, or conflict on a case-insensitive file system, and a manifest without files.
    """
    if not is_valid_repo(manifest.repo):
        return f"{manifest.repo!r} is not the name of a repository: use publisher/name"
    if _COMMIT.fullmatch(manifest.commit) is None:
        return f"the commit {manifest.commit!r} is not 40 hex digits"
    if not manifest.files:
        return f"{manifest.repo} has no files"
    if manifest.revision and not is_valid_path(manifest.revision):
        return f"the revision {manifest.revision[:MAX_PATH_CHARACTERS]!r} is not the name of a branch or tag"
    faults = (_find_file_fault(file) for file in manifest.files)
    return next((fault for fault in faults if fault), "") or _find_path_conflict(manifest.files)


def is_valid_path(path: str) -> bool:
    """Return whether a text is a plain relative path, which stays below its folder.

    The limits are MAX_PATH_CHARACTERS and MAX_PATH_PARTS.
    """
    parts = path.split("/")
    return len(path) <= MAX_PATH_CHARACTERS and len(parts) <= MAX_PATH_PARTS and all(map(_is_safe_part, parts))


def _find_file_fault(file: ModelFile) -> str:
    parts = file.path.split("/")
    if len(file.path) > MAX_PATH_CHARACTERS or len(parts) > MAX_PATH_PARTS:
        return f"the path {file.path[:MAX_PATH_CHARACTERS]!r} is too long"
    if not all(_is_safe_part(part) for part in parts):
        return f"the path {file.path!r} is not a plain path below the repository"
    if file.sha256 and _SHA256.fullmatch(file.sha256) is None:
        return f"{file.path}: {file.sha256!r} is not a SHA-256"
    if not file.sha256 and _COMMIT.fullmatch(file.git_sha1) is None:
        return f"{file.path}: the hub gives no digest, and content without a digest cannot be verified"
    return ""


def _is_safe_part(part: str) -> bool:
    return _PART.fullmatch(part.removeprefix(".")) is not None and part not in (".", "..")


def _find_path_conflict(files: Iterable[ModelFile]) -> str:
    paths: set[str] = set()
    folders: set[str] = set()
    for file in files:
        folded = file.path.casefold()
        if folded in paths:
            return f"two files have the path {file.path!r}, if case is ignored"
        paths.add(folded)
        parts = folded.split("/")
        folders.update("/".join(parts[:at]) for at in range(1, len(parts)))
    both = sorted(paths & folders)
    return f"{both[0]!r} is both a file and a folder" if both else ""
