"""Frames about the files of models: pull, serve, verify and remove them. The coordinator orders, the agent performs.

An order of the coordinator has a number, which the answers of the node repeat. Each order gets exactly one
ModelOrderEnded, after any number of ModelOrderProgress.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from wire.bounds import MAX_ITEMS, ErrorText, Number, Real, Seconds, Size, Text, Word
from wire.frames.frame import Frame
from wire.model_files import ModelManifest, ModelSource


class ModelOrderPhase(StrEnum):
    """Phase of an order about model files, in `ModelOrderProgress.phase`."""

    CHECKING = "checking"
    """Files on the disk are compared with the manifest."""
    DOWNLOADING = "downloading"
    VERIFYING = "verifying"
    """Content is hashed."""
    SERVING = "serving"
    """The mirror listens; `addresses` has its URLs."""


class ModelOrderCode(StrEnum):
    """Machine-readable end of an order about model files, in `ModelOrderEnded.code`."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    NOT_FOUND = "not_found"
    """The source or the node does not have the repository, the revision or the file."""
    GATED = "gated"
    """The repository needs a token, or a person must accept its terms."""
    RATE_LIMITED = "rate_limited"
    DISK_FULL = "disk_full"
    SOURCE_LOST = "source_lost"
    """No source can be reached any more. The received pieces stay on the disk."""
    CONTENT_MISMATCH = "content_mismatch"
    """The content does not have the digest of the manifest."""
    INVALID = "invalid"
    """The order cannot be performed: an unsafe manifest, a folder that is not the node's to change."""
    IN_USE = "in_use"
    """The model is loaded, or another order works on the same repository."""
    INTERRUPTED = "interrupted"
    """A signal ended the process of the order. The received pieces stay on the disk."""
    FAILED = "failed"


class PullModel(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: get the files of a manifest into the Hugging Face cache of this machine."""

    order: Number
    manifest: ModelManifest
    sources: Annotated[tuple[ModelSource, ...], Meta(max_length=MAX_ITEMS)]
    """Sources in the order in which the node tries them."""


class ServeModel(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: serve the files of a manifest to other nodes, also while this node still gets them.

    The node opens a TLS port with its certificate and reports `SERVING`. The order ends by CancelModelOrder, or after
    `idle` seconds without a request.
    """

    order: Number
    manifest: ModelManifest
    token: Text
    """Secret that a client must send."""
    idle: Seconds = 60.0


class VerifyModel(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: read all files of a model and compute their digests again."""

    order: Number
    model: Word


class RemoveModel(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: delete the files of a model from the disk."""

    order: Number
    model: Word


class CancelModelOrder(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: end an order. Received pieces stay on the disk."""

    order: Number


class ModelOrderProgress(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: progress of an order, at most twice a second."""

    order: Number
    phase: Word
    """A `ModelOrderPhase`, or the phase of a newer node."""
    done: Size = 0
    """Bytes that are on the disk; bytes sent by a mirror."""
    total: Size = 0
    speed: Real = 0.0
    """Bytes per second of the last seconds."""
    source: Text = ""
    """URL of the source in use, without its token."""
    addresses: Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)] = ()
    """URLs at which a mirror listens."""
    fetched: Size = 0
    """Bytes received over the network since the start of the order."""
    message: ErrorText = ""
    """Fault from which the node recovers, such as a lost source; empty without one."""


class ModelOrderEnded(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: end of an order."""

    order: Number
    code: Word
    """A `ModelOrderCode`, or the code of a newer node, which counts as `failed`."""
    message: ErrorText = ""
    """Reason with the next step; empty after `completed`."""
    content: Word = ""
    """Content hash of the model, if it was verified (`wire.identity`)."""
    fetched: Size = 0
    """Bytes received over the network."""
    freed: Size = 0
    """Bytes of disk that the order freed."""
    retry_after: Seconds = 0.0
    """Minimum seconds before the next try; 0 if unknown."""
