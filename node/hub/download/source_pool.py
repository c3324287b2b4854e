"""Choose the source of each request of a download: the first in their order that is not lost.

A source is lost after a refusal, or after a demand for too long a wait. It is also lost after a time without progress,
which depends on the fault.
"""

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from node.hub.child_messages import ClusterFiles
from node.hub.download.retry_rules import MAX_WAIT_SECONDS, compute_backoff
from node.hub.download.source_client import SourceClient
from node.hub.download.source_errors import SourceError, SourceLimited, SourcePending, SourceRefusal
from node.hub.errors import ModelFileError
from wire.frames.model_files import ModelOrderCode
from wire.models.files import ModelSource, SourceKind

HUB_TIMEOUT_SECONDS = 60.0
"""Seconds without progress after which the hub is lost."""
MIRROR_TIMEOUT_SECONDS = 15.0
"""Seconds without progress after which a mirror or a relay is lost."""
PENDING_TIMEOUT_SECONDS = 600.0
"""Minimum seconds without progress after which a mirror is lost while it still downloads the requested piece."""
_TELLING = (ModelOrderCode.GATED, ModelOrderCode.NOT_FOUND, ModelOrderCode.RATE_LIMITED)
"""Codes of lost sources that become the code of the download's error, because they name a cause for the user."""


@dataclass(slots=True, eq=False)
class DownloadSource:
    """Source of a download, with its faults since the last progress. Not thread-safe. Times are monotonic seconds."""

    client: SourceClient
    """Client of the source."""
    timeout: float
    """Seconds without progress after which the source is lost."""
    progressed_at: float = 0.0
    """Time of the last progress, or of the first request; 0 before."""
    failures: int = 0
    """Faults since the last progress."""
    lost: ModelFileError | None = None
    """Reason for which the source is not used any more; None while it is used."""
    waiting: str = ""
    """Fault of the last request; empty after progress."""

    def begin(self) -> None:
        """Start the time without progress at the first request. Do nothing at later ones."""
        self.progressed_at = self.progressed_at or time.monotonic()

    def record_progress(self) -> None:
        """Record that bytes arrived now: restart the time without progress, and clear `failures` and `waiting`."""
        self.progressed_at, self.failures, self.waiting = time.monotonic(), 0, ""

    def record_error(self, error: SourceError) -> float:
        """Count an error, which can make the source lost. Return the seconds to wait before the next request.

        Return 0 for a lost source.
        """
        if self.lost is not None:
            return 0.0
        self.failures += 1
        self.waiting = str(error)
        self.lost = self._judge(error, time.monotonic() - self.progressed_at)
        if self.lost is not None:
            return 0.0
        if isinstance(error, SourceLimited | SourcePending):
            return error.seconds
        return compute_backoff(self.failures - 1, random.random())  # noqa: S311  no secret

    def _judge(self, error: SourceError, silent: float) -> ModelFileError | None:
        """Return why the source is lost after an error; None if it is not. `silent` is the seconds without progress."""
        if isinstance(error, SourceRefusal):
            return ModelFileError(error.code, str(error))
        if isinstance(error, SourceLimited):
            if max(error.seconds, silent) <= MAX_WAIT_SECONDS:
                return None
            text = f"{error}: pull again after that time, or set a token with a higher limit"
            return ModelFileError(ModelOrderCode.RATE_LIMITED, text, error.seconds)
        limit = max(PENDING_TIMEOUT_SECONDS, self.timeout) if isinstance(error, SourcePending) else self.timeout
        if silent <= limit:
            return None
        return ModelFileError(ModelOrderCode.SOURCE_LOST, f"{error}, without progress for {silent:.0f} s")


@dataclass(slots=True)
class SourcePool:
    """Thread-safe pool of the sources of a download."""

    sources: Sequence[DownloadSource]
    """Sources in the order of their use."""
    unusable: tuple[str, ...] = ()
    """Reasons why the clients of sources could not be created, which are therefore omitted."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Lock that guards the state of the pool and of its sources."""
    fetched: int = 0
    """Bytes received over the network."""
    current: DownloadSource | None = None
    """Source of the last request; None before."""

    @classmethod
    def open(
        cls, sources: Sequence[ModelSource], cluster: ClusterFiles, timeout: float, connections: int
    ) -> "SourcePool":
        """Return a pool with the clients of all sources whose kind is known, each for `connections` parallel requests.

        `cluster` has the certificates for other nodes. `timeout` is the maximum seconds without progress of each
        source; 0 selects the default of its kind. A source whose client cannot be created is omitted, and `unusable`
        has the reason.
        """
        opened, unusable = list[DownloadSource](), list[str]()
        for source in sources:
            if source.kind not in frozenset(SourceKind):
                continue
            default = HUB_TIMEOUT_SECONDS if source.kind == SourceKind.HUB else MIRROR_TIMEOUT_SECONDS
            try:
                client = SourceClient(source, cluster, connections=connections)
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                unusable.append(f"a {source.kind} cannot be used: {reason}")
                continue
            opened.append(DownloadSource(client, timeout or default))
        return cls(opened, tuple(unusable))

    def choose(self, excluded: frozenset[DownloadSource]) -> DownloadSource | None:
        """Return the source for the next request, and store it as `current`; None if all are lost or excluded."""
        with self.lock:
            chosen = next((source for source in self.sources if source.lost is None and source not in excluded), None)
            if chosen is not None:
                self.current = chosen
                chosen.begin()
            return chosen

    def record_progress(self, source: DownloadSource, size: int) -> None:
        """Count `size` received bytes of a source. Restart its time without progress, and reset its failures."""
        with self.lock:
            self.fetched += size
            source.record_progress()

    def record_error(self, source: DownloadSource, error: SourceError) -> float:
        """Count an error of a source, which can make it lost. Return the seconds to wait before the next request."""
        with self.lock:
            return source.record_error(error)

    def describe_faults(self) -> str:
        """Return the faults of the sources that are lost or wait, as text; empty without faults."""
        with self.lock:
            faults = [str(source.lost) if source.lost is not None else source.waiting for source in self.sources]
        return "; ".join(fault for fault in faults if fault)

    def build_error(self) -> ModelFileError:
        """Return the error of a download that has no source left.

        The result is the last error with the code GATED, NOT_FOUND or RATE_LIMITED, or the error of the only source.
        Without such an error, the code is SOURCE_LOST, and the text has the reason of each lost or unusable source.
        """
        lost = [source.lost for source in self.sources if source.lost is not None]
        if not self.sources:
            reasons = "; ".join(self.unusable) or "the order names none"
            return ModelFileError(ModelOrderCode.SOURCE_LOST, f"this node can use no source: {reasons}")
        telling = next((error for error in reversed(lost) if error.code in _TELLING), None)
        if telling is not None or (len(lost) == 1 and not self.unusable):
            return telling or lost[0]
        reasons = "; ".join((*self.unusable, *(str(error) for error in lost)))
        return ModelFileError(ModelOrderCode.SOURCE_LOST, f"all sources are lost, the received pieces stay: {reasons}")

    def close(self) -> None:
        """Close all connections."""
        for source in self.sources:
            source.client.close()
