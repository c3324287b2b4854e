"""Version of a model: the identity of its files, by samples of every tensor, and by their whole content once hashed.

Two nodes have the same model if their content hashes are equal. While one of the nodes has no content hash, the samples
must be equal instead. `VersionGrade` has the grades of this identity.
"""

from enum import StrEnum
from typing import NamedTuple


class VersionGrade(StrEnum):
    """Grade of the identity of two versions."""

    CONTENT = "content"
    """All bytes of the files that change answers are equal."""
    SAMPLED = "sampled"
    """Configuration, tokenizer, headers and samples of every tensor are equal; not all files are hashed yet."""
    DIFFERS = "differs"
    """Content or samples differ, or only one of the versions is known."""


class ModelVersion(NamedTuple):
    """Version of a model on one node."""

    fingerprint: str = ""
    """Hash of configuration, headers and samples; empty if unknown."""
    content: str = ""
    """Hash of the content of all files that change answers; empty until they are hashed."""

    def is_same(self, other: "ModelVersion") -> bool:
        """Return whether both versions are the same model, by content or by samples (`compare`)."""
        return self.compare(other) is not VersionGrade.DIFFERS

    def compare(self, other: "ModelVersion") -> VersionGrade:
        """Return the grade at which both versions are the same model. Two unknown versions are `SAMPLED`."""
        if self.content and other.content:
            return VersionGrade.CONTENT if self.content == other.content else VersionGrade.DIFFERS
        return VersionGrade.SAMPLED if self.fingerprint == other.fingerprint else VersionGrade.DIFFERS


UNKNOWN_VERSION = ModelVersion()
"""Version of a model about which nothing is known."""
