"""Messages between the agent and its child processes for model files: one JSON document per line.

The first line of the standard input is the order. A child ends at the end of its standard input, because the agent has
ended. Each line of the standard output is a `ChildProgress`, and the last line a `ChildEnd`. Access tokens are passed
in the order and not in arguments, because other processes can read the arguments of a process.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, TypeVar

import msgspec

from wire.frames.model_files import ModelOrderCode
from wire.models.files import PIECE_BYTES, ModelManifest, ModelSource

T = TypeVar("T")

CONNECTIONS = 4
"""Parallel ranges of a download."""


class ClusterFiles(msgspec.Struct, frozen=True, kw_only=True):
    """Ids, CA and certificate file of this node, for TLS connections to other nodes and to the coordinator."""

    cluster: str = ""
    """Id of the cluster."""
    ca: bytes = b""
    """Certificate of the cluster's CA in DER."""
    certificate: str = ""
    """File with the key and the certificate of this node in PEM."""
    node: str = ""
    """Id of this node."""
    machine: str = ""
    """Machine id."""
    coordinator: str = ""
    """Address of the coordinator's cluster port, `host:port`, which relays transfers between nodes."""


class DownloadOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Order of `node.hub.downloader`."""

    manifest: ModelManifest
    """Files to download."""
    sources: tuple[ModelSource, ...]
    """Sources of the files in order of preference. The download uses the first source that is not lost."""
    hub: str
    """Folder of the Hugging Face cache."""
    digests: str
    """File of the digest store."""
    cluster: ClusterFiles = ClusterFiles()
    piece_bytes: int = PIECE_BYTES // CONNECTIONS
    """Bytes of a piece. By default, an interruption of all connections loses at most `PIECE_BYTES`."""
    connections: int = CONNECTIONS
    """Number of parallel ranges."""
    reserve_bytes: int = -1
    """Bytes of disk that stay free; -1 for 5 GiB or 5 % of the disk, whichever is less."""
    source_timeout_seconds: float = 0.0
    """Seconds without progress after which a source is lost; 0 for the default of its kind."""


class MirrorOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Order of `node.hub.serving.mirror`."""

    manifest: ModelManifest
    """Files to serve, as far as they are in the cache."""
    hub: str
    """Folder of the Hugging Face cache."""
    token: str
    """Token that a client of the mirror must send."""
    cluster: ClusterFiles
    hosts: tuple[str, ...]
    """Addresses of this machine at which the mirror listens."""
    idle_seconds: float
    """Seconds without a request after which the mirror ends."""
    relay: bool = False
    """Whether the mirror also serves through the coordinator."""


class VerifyOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Order of `node.hub.verifier`."""

    folder: str
    """Folder of the model."""
    digests: str
    """File of the digest store."""
    max_bytes_per_second: int = 0
    """Maximum read rate in bytes per second; 0 for no limit."""


class QuantizeOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Order of `node.engine.conversion.quantizer`."""

    source: str
    """Folder of the model."""
    target: str
    """Folder that the child creates, with the quantized model."""
    bits: int
    """Bits per weight of the result."""


class ChildProgress(msgspec.Struct, frozen=True, kw_only=True, tag="progress", omit_defaults=True):
    """Progress of an order. `ModelOrderProgress` describes the fields."""

    phase: str
    done: int = 0
    total: int = 0
    speed: float = 0.0
    source: str = ""
    addresses: tuple[str, ...] = ()
    fetched: int = 0
    message: str = ""


class ChildEnd(msgspec.Struct, frozen=True, kw_only=True, tag="end", omit_defaults=True):
    """End of an order. `ModelOrderEnded` describes the fields."""

    code: str
    message: str = ""
    content: str = ""
    fetched: int = 0
    freed: int = 0
    retry_after: float = 0.0
    stored: int = 0
    peak: int = 0


ChildMessage = ChildProgress | ChildEnd


class ChildChannel:
    """Child's end of the messages: its standard input and output.

    The event `stop` is set when the agent has ended or no longer reads, and on SIGTERM after `stop_on_sigterm`.
    """

    def __init__(self) -> None:
        self.stop = threading.Event()

    def read_order(self, kind: type[T]) -> T:
        """Read the order, of type `kind`, from the standard input. Raise `msgspec.DecodeError` for an invalid line."""
        return msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)

    def stop_on_sigterm(self) -> None:
        """Set `stop` on SIGTERM."""
        signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        self.stop.set()

    def watch_agent(self, on_end: Callable[[], object]) -> None:
        """Start a thread that waits for the end of the standard input, then calls `on_end` and sets `stop`."""
        threading.Thread(target=self._watch, args=(on_end,), daemon=True).start()

    def _watch(self, on_end: Callable[[], object]) -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        on_end()
        self.stop.set()

    def send(self, message: ChildMessage) -> None:
        """Write a message. Set `stop` if the agent no longer reads."""
        try:
            sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            self.stop.set()


def perform_order(
    kind: type[T], work: Callable[[T, ChildChannel], ChildEnd], on_agent_end: Callable[[T], object] = lambda order: None
) -> NoReturn:
    """Read an order of type `kind`, perform it with `work`, send the end that `work` returns, and exit with code 0.

    For an unreadable order, send the end `invalid` and exit with code 2. Threads that still work end with the process.
    `on_agent_end` is called with the order, in a thread, when the agent has ended.
    """
    channel = ChildChannel()
    channel.stop_on_sigterm()
    try:
        order = channel.read_order(kind)
    except msgspec.DecodeError:
        channel.send(build_end(ModelOrderCode.INVALID, "the order cannot be read"))
        sys.exit(2)
    channel.watch_agent(lambda: on_agent_end(order))
    channel.send(work(order, channel))
    os._exit(0)


def build_end(code: ModelOrderCode, message: str = "") -> ChildEnd:
    """Return an end of an order with this code and message, and default values in all other fields."""
    return ChildEnd(code=code, message=message)
