"""Frames about the files of models: pull, serve, verify, remove and quantize them.

The coordinator orders, the agent performs. An order of the coordinator has a number, which the answers of the node
repeat. Each order has one end, after any number of ModelOrderProgress. The node may send its ModelOrderEnded again on a
new link.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from wire.bounds import MAX_ITEMS, ErrorText, Natural, Number, Real, Seconds, Size, Text, Word
from wire.frames.frame import Frame
from wire.models.files import ModelManifest, ModelSource


class ModelOrderPhase(StrEnum):
    """Phase of an order about model files, in `ModelOrderProgress.phase`."""

    CHECKING = "checking"
    """Files on the disk are compared with the manifest."""
    DOWNLOADING = "downloading"
    VERIFYING = "verifying"
    """The content of files is hashed."""
    SERVING = "serving"
    """The mirror listens; `addresses` has its URLs."""
    LEASING = "leasing"
    """The node makes room for a lease of memory."""
    QUANTIZING = "quantizing"
    """The weights are quantized and written."""


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
    """The digest of a file's content differs from the manifest, or in a verification from the name of its blob."""
    INVALID = "invalid"
    """The order cannot be performed, for example an unsafe manifest, or a folder that the node may not change."""
    IN_USE = "in_use"
    """The model is loaded, another order or process changes its repository, or memory is leased already.

    Also: the node stops, or has its maximum of orders. Also, for a quantization: the node does not share, or has
    another quantization in progress.
    """
    INTERRUPTED = "interrupted"
    """A signal ended the process of the order. The received pieces stay on the disk."""
    NAME_TAKEN = "name_taken"
    """The node already has a model with the name of the result."""
    NO_MEMORY = "no_memory"
    """The order needs more memory than the node can lease now, or its process exceeded the lease."""
    FAILED = "failed"
    """Any other failure, which the message describes."""


class PullModel(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: get the files of a manifest into the Hugging Face cache of the node."""

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
    """Secret that a node must send to get the files."""
    idle: Seconds = 60.0
    relay: bool = False
    """Whether the coordinator relays this transfer (`JoinRelay`)."""


class VerifyModel(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: read all files of a model and compute their digests again.

    The end has the result in `ModelOrderEnded.content`.
    """

    order: Number
    model: Word


class RemoveModel(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: delete the files of a model from the disk. The end has the deleted bytes in `freed`."""

    order: Number
    model: Word


class QuantizeModel(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: quantize the weights of a model and store the result as another model on the disk.

    The node leases memory for the order. A repeated order for the same result attaches to the running order.
    """

    order: Number
    model: Word
    bits: Natural
    """Bits of each quantized weight in the result."""
    name: Word
    """Name of the quantized model."""


class JoinRelay(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator, in place of Hello: use this connection for the files of a model, through the coordinator.

    The coordinator joins a connection of the node that serves with one of a node that gets the files. It sends
    RelayJoined on both, and copies bytes between them from then on. A node sends nothing before RelayJoined. The link
    of the node is not affected.
    """

    protocol: Natural
    """Protocol version of the node."""
    node: Word
    """Id of the node."""
    machine: Word
    """Machine id."""
    token: Text
    """Token of the transfer."""
    serves: bool
    """Whether the node serves the files; else it gets them."""


class RelayJoined(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: the connection is relayed to a connection of the other node.

    All bytes after this frame come from that node.
    """


class CancelModelOrder(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: end an order. Received pieces stay on the disk."""

    order: Number


class ModelOrderProgress(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: progress of an order, at most twice a second."""

    order: Number
    phase: Word
    """A `ModelOrderPhase`, or the phase of a newer node."""
    done: Size = 0
    """Bytes done so far in the phase: compared, on disk, hashed, sent by a mirror, or computed as quantized weights."""
    total: Size = 0
    """Bytes of `done` at the end of the order or phase; for a mirror the bytes of all files. 0 if unknown."""
    speed: Real = 0.0
    """Bytes per second: of the last seconds in a download, on average in other orders; 0 if not measured."""
    source: Text = ""
    """URL of the source in use, without its token; empty without one."""
    addresses: Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)] = ()
    """URLs at which a mirror listens; empty for other orders."""
    fetched: Size = 0
    """Bytes received over the network since the start of the order; 0 for orders other than a pull."""
    message: ErrorText = ""
    """Fault from which the node recovers, such as a lost source; empty without one."""
    from_mirror: bool = False
    """Whether the download has a mirror or relay among its sources.

    For an order to download from the hub, this is possible if the order is attached to the download of another pull.
    """


class ModelOrderEnded(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: end of an order."""

    order: Number
    code: Word
    """A `ModelOrderCode`, or the code of a newer node, which counts as `failed`."""
    message: ErrorText = ""
    """Reason, for a person; empty after `completed`."""
    content: Word = ""
    """Content hash of the model (`ModelVersion.content`), if its files were hashed; else empty."""
    fetched: Size = 0
    """Bytes received over the network; 0 for orders other than a pull."""
    freed: Size = 0
    """Bytes of disk that the order freed; 0 for orders other than a removal."""
    retry_after: Seconds = 0.0
    """Minimum seconds before the next try; 0 if unknown."""
    stored: Size = 0
    """Bytes of the weights of a quantized model; 0 for other orders and ends."""
    peak: Size = 0
    """Highest measured footprint of the process that quantized, in bytes; 0 for other orders, or without a reading."""
