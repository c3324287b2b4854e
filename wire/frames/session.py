"""Frames of the link itself: greeting, reports, pings, certificates, fetches of files, pause, and fragments.

Other modules have the frames that the link carries for requests, model files and video jobs.
"""

from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from wire.bounds import (
    MAX_ITEMS,
    MAX_MODELS,
    Blob,
    Difference,
    ErrorText,
    Natural,
    Number,
    Seconds,
    Size,
    Text,
    Word,
)
from wire.enforcer_report import Enforcement
from wire.frames.frame import Frame
from wire.machine import Disk, SystemMemory
from wire.report import (
    EngineState,
    Hardware,
    Memory,
    Model,
    Sharing,
)
from wire.video import VideoState


class Hello(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: description of the node. First frame of a link."""

    protocol: Natural
    """Protocol version of the node."""
    node: Word
    """Id of the node."""
    name: Word
    """Display name of the node."""
    instance: Word
    """Random id of this run of the agent."""
    machine: Word
    """Machine id."""
    version: Word
    """Version of Macpool on the node."""
    hardware: Hardware
    takeover: bool = False
    """Whether this link replaces the link of the same instance without ending its requests."""
    generation: Number = 0
    """Highest generation that the node has received in Welcome; 0 before the first.

    A coordinator with a lower one is outdated.
    """
    seal: Blob = b""
    """Signature of `generation` by the CA, from `Welcome.seal`; empty before the first Welcome with a signature."""
    frames: Annotated[tuple[Natural, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Tags of the frames that the node knows. A node of version 0.1.0 does not name them."""


class MemberQuery(Frame, frozen=True, array_like=True, gc=False):
    """Command on a member → coordinator, in place of Hello: request a path of the API.

    The coordinator sends JSON in FetchChunks and closes the connection. The link of the node is not affected.
    """

    protocol: Natural
    """Protocol version of the member."""
    node: Word
    """Id of the member."""
    machine: Word
    """Machine id."""
    path: Text
    """Path to read, such as `/api/v1/status`. A path that members may not read is denied as `not_readable`."""


class Welcome(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: the link is accepted."""

    epoch: Number
    """Number that grows with every start of the coordinator."""
    cluster: Word
    """Id of the cluster."""
    cluster_name: Word
    time: Seconds
    """Unix time of the coordinator in seconds."""
    version: Word
    """Version of Macpool on the coordinator."""
    addresses: Annotated[tuple[Word, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Addresses of the coordinator (`host:port`) for later connections."""
    generation: Number = 0
    """Number that grows with every restore of a backup."""
    seal: Blob = b""
    """Signature of `generation` by the CA, with which a node proves the generation to another coordinator."""


class Denied(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: a link, enrollment, query or relay connection is refused, or an open link is ended."""

    reason: Text
    """Machine-readable reason."""
    message: ErrorText
    final: bool = False
    """Whether a retry has the same result until a person acts."""
    retry_after: Seconds = 0.0
    """Minimum seconds before the next try; 0 for no minimum."""


class Report(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: heartbeat with the state of the node."""

    sequence: Number
    """Sequence number of the report in this run of the agent, from 1."""
    memory: Memory
    engine: EngineState
    models: Annotated[tuple[Model, ...], Meta(max_length=MAX_MODELS)] = ()
    acked_seq: Number = 0
    """`EngineReport.acked_seq`; 0 before the first report of the engine."""
    draining: bool = False
    """Whether the node accepts no new requests; also true while `sharing.paused`, for older coordinators."""
    ping: Number = 0
    """Nonce of the newest Ping; 0 before the first."""
    system: SystemMemory = SystemMemory()
    enforcement: Enforcement = Enforcement()
    video: VideoState = VideoState()
    sharing: Sharing = Sharing()
    illegal_events: Natural = 0
    """Events that the state machines of the agent refused since its start. Each of them is a bug."""
    disk: Disk = Disk()


class GoodbyeReason(StrEnum):
    """Reason why a node ends its link."""

    STOPPING = "stopping"
    """The agent ends."""
    ASLEEP = "asleep"
    """The machine goes to sleep."""
    LEAVE = "leave"
    """The node leaves the cluster."""


class Goodbye(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: last frame of a link."""

    reason: Text
    """A `GoodbyeReason`, or the reason of a newer node, which counts as `stopping`."""


class Ping(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node, or agent → engine: check that the receiver responds.

    A node answers with a Report, an engine with a Pong.
    """

    nonce: Number


class Pong(Frame, frozen=True, array_like=True, gc=False):
    """Engine → agent: answer to a Ping, sent by a thread of the engine that runs no model."""

    nonce: Number
    busy: Seconds = 0.0
    """Seconds since the native call in progress began; 0 without a call."""
    expected: Seconds = 0.0
    """Expected duration of the native call in progress, in seconds; 0 without a call."""


class RenewCertificate(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: request a new certificate; sent after two thirds of the validity."""

    csr: Blob
    """Certificate request in DER."""


class CertificateRenewed(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: the new certificate. With this certificate the node opens a second link."""

    certificate: Blob
    """New certificate of the node in DER."""


class FetchRequest(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: request a window of a file (the bytes from `offset`, at most `limit`), or all measurements.

    Long files are requested in windows. A slow reader then neither delays other readers nor fills memory.
    """

    number: Number
    """Number of the request, which its answers repeat."""
    source: Text
    """`logs`, `artifact:LEASE/NAME` or `metrics`.

    The answer to `metrics` is all of `NodeMeasures` as msgpack: `offset` and `limit` have no effect.
    """
    offset: Difference = 0
    """First byte. A negative offset counts from the end.

    An offset above the size of the file counts as 0; if the log was rotated meanwhile, it is an offset in the rotated
    file.
    """
    limit: Size = 0
    """Maximum bytes of the window."""


class FetchChunk(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: part of the answer to a FetchRequest.

    The coordinator answers a MemberQuery with this frame.
    """

    number: Number
    """Number of the request; 0 in the answer to a MemberQuery."""
    payload: Blob
    """Next bytes of the answer; may be empty in the last part."""
    last: bool = False
    """Whether this is the last part of the answer."""
    error: ErrorText = ""
    """Error that ended the answer; empty without an error."""
    next: Size = 0
    """In the last part: offset of the next window, 0 if the file has no more bytes. 0 in other parts."""
    end: Size = 0
    """In the last part: offset of the byte after this window. A reader that follows a log continues there.

    Else 0: in other parts, for measurements, and after the rest of a rotated log, because the new log follows.
    """


class Fragment(Frame, frozen=True, array_like=True, gc=False):
    """Both directions: a piece of a long frame. Only the codec uses it."""

    message: Number
    """Number of the long frame on this connection."""
    payload: bytes
    last: bool = False
    """Whether this is the last piece of the long frame."""


class PauseNode(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: accept no new requests for a time.

    `sharing` of the next report has the result. The frame is sent only to nodes that report `sharing`.
    """

    seconds: Seconds | None
    """Duration of the pause in seconds; None until a person resumes the node, 0 to resume now."""
    by: Text = ""
    """Name of the person or API key that paused the node."""
