"""Download missing files of a manifest: fetch several ranges in parallel, record each piece, and verify each file.

Threads
- `connections` workers fetch spans. A span is a run of consecutive pieces of one file, fetched by one request.
- One verifier hashes the pieces of each file in order, up to the first missing piece. A complete file with the digest
  of the manifest gets the name of its blob. Any other file is discarded and fetched again. The sources that contributed
  to it are then excluded for this file, unless it contained pieces of an earlier download.

A worker keeps its span until the span is complete. After a body that ends early, the worker requests the rest from the
same source or the next.
"""

import errno
import threading
from collections import deque
from collections.abc import Callable, Sequence

from node.hub.cache_layout import RepositoryFolder
from node.hub.digests import ContentHasher, FileDigest, record_digest
from node.hub.download.disk_space import DiskSpace
from node.hub.download.part_file import PartFile
from node.hub.download.source_errors import SourceError, SourceFault
from node.hub.download.source_pool import DownloadSource, SourcePool
from node.hub.errors import ModelFileError
from wire.frames.model_files import ModelOrderCode
from wire.models.files import ModelFile, ModelManifest

MAX_SPAN_PIECES = 32
"""Maximum pieces of a span."""
POLL_SECONDS = 0.2
END_SECONDS = 1.0
"""Maximum seconds to wait for the end of the threads. A thread that still waits for a source ends with the process."""


class _TransferOver(Exception):
    """Error that ends a thread of a transfer that was stopped or has failed."""


class _FileTask:
    """Download of one file. The transfer's lock protects `waiting`."""

    def __init__(self, file: ModelFile, part: PartFile) -> None:
        self.file = file
        self.part = part
        self.waiting: deque[int] = deque()
        """Pieces that no worker has."""
        self.excluded: frozenset[DownloadSource] = frozenset()
        """Sources that contributed to wrong content of this file."""
        self.digest: FileDigest | None = None
        """Entry for the digest store, once the file is verified."""
        self.mismatch = ""
        """Digests of the last wrong content."""
        self._origins = set[DownloadSource]()
        self._resumed = False
        self._hasher = ContentHasher(file)
        self._hashed = 0

    def open(self) -> None:
        """Open the partial file. Raise `OSError` on failure."""
        self.part.open()
        self._resumed = self.part.received_bytes > 0
        self._queue_missing()

    def _queue_missing(self) -> None:
        self.waiting = deque(piece for piece in range(self.part.count_pieces()) if not self.part.has_piece(piece))

    @property
    def missing_bytes(self) -> int:
        """Bytes of the file that are not on the disk."""
        return self.file.size - self.part.received_bytes

    def add_origin(self, source: DownloadSource) -> None:
        """Record a source that contributes content."""
        self._origins.add(source)

    def take_span(self, longest: int) -> deque[int]:
        """Remove the first consecutive pieces from `waiting`, at most `longest`, and return them."""
        span = deque[int]()
        while self.waiting and len(span) < longest and (not span or self.waiting[0] == span[-1] + 1):
            span.append(self.waiting.popleft())
        return span

    def hash_next(self) -> bool:
        """Hash the next piece and return True; return False if that piece is not on the disk yet, or none is left.

        Raise `OSError` if the piece cannot be read.
        """
        if not self.part.has_piece(self._hashed):
            return False
        self._hasher.update(self.part.read_piece(self._hashed))
        self._hashed += 1
        return True

    def is_hashed(self) -> bool:
        """Return whether all pieces are hashed."""
        return self._hashed == self.part.count_pieces()

    def finish(self, blob: RepositoryFolder) -> bool:
        """Rename the file to its blob if its content has the expected digest; discard its content otherwise.

        Return whether the file was renamed. Raise `OSError` on failure.
        """
        if self._hasher.is_expected():
            self.part.finish()
            self.digest = record_digest(blob.get_blob(self.file.etag), self._hasher.sha256)
            return True
        self.mismatch = f"{self.file.path} has the digest {self._hasher.digest} instead of {self.file.etag}"
        if not self._resumed:
            self.excluded |= self._origins
        self._origins, self._resumed = set[DownloadSource](), False
        self._hasher, self._hashed = ContentHasher(self.file), 0
        self.part.discard()
        return False

    def requeue(self) -> None:
        """Queue all pieces again, after the content was discarded."""
        self._queue_missing()


class Transfer:
    """Download of `files` into a repository folder, whose lock the caller must hold.

    The event `stop` ends `run` early. `piece_bytes` is the size of each piece except the last, `connections` the number
    of parallel requests.
    """

    def __init__(
        self,
        folder: RepositoryFolder,
        manifest: ModelManifest,
        files: Sequence[ModelFile],
        pool: SourcePool,
        disk: DiskSpace,
        stop: threading.Event,
        *,
        piece_bytes: int,
        connections: int,
    ) -> None:
        self._folder = folder
        self._manifest = manifest
        self._tasks = [_FileTask(file, PartFile(folder, file, piece_bytes)) for file in files]
        self._pool = pool
        self._disk = disk
        self._stop = stop
        self._connections = connections
        self._changed = threading.Condition()
        self._error: Exception | None = None

    @property
    def received_bytes(self) -> int:
        """Bytes of all complete pieces on the disk; discarded content does not count."""
        return sum(task.part.received_bytes for task in self._tasks)

    def list_digests(self) -> dict[str, FileDigest]:
        """Return the digest store entries of all verified files, by ETag."""
        return {task.file.etag: task.digest for task in self._tasks if task.digest is not None}

    def run(self, report: Callable[[], None]) -> bool:
        """Download and verify all files, and call `report` about every `POLL_SECONDS`. Return whether all are verified.

        The call blocks. It returns False only if `stop` was set. Raise `ModelFileError` if a file cannot be downloaded
        or verified, `OSError` for faults of the disk. After False or an error, the process must end, because threads
        may still wait for a source.
        """
        for task in self._tasks:
            task.open()
        self._disk.check(self._count_missing())
        works = [self._fetch_spans] * self._connections + [self._verify]
        threads = [threading.Thread(target=self._guard, args=(work,), daemon=True) for work in works]
        for thread in threads:
            thread.start()
        while (alive := [thread for thread in threads if thread.is_alive()]) and not self._is_over():
            alive[-1].join(POLL_SECONDS)
            report()
        for thread in threads:
            thread.join(END_SECONDS / len(threads))
        if self._error is not None:
            raise self._error
        return not self._list_open()

    def _guard(self, work: Callable[[], None]) -> None:
        """Run a thread. Its error becomes that of the transfer."""
        try:
            work()
        except _TransferOver:
            pass
        except Exception as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _is_over(self) -> bool:
        return self._stop.is_set() or self._error is not None

    def _check_over(self) -> None:
        if self._is_over():
            raise _TransferOver

    def _list_open(self) -> list[_FileTask]:
        return [task for task in self._tasks if task.digest is None]

    # workers

    def _fetch_spans(self) -> None:
        while (taken := self._take_span()) is not None:
            self._fetch_span(*taken)

    def _take_span(self) -> tuple[_FileTask, deque[int]] | None:
        """Wait for a span. Return None when all files are verified."""
        with self._changed:
            while self._list_open():
                self._check_over()
                waiting = sum(len(task.waiting) for task in self._tasks)
                longest = min(MAX_SPAN_PIECES, max(1, waiting // (2 * self._connections)))
                task = next((task for task in self._tasks if task.waiting), None)
                if task is not None:
                    return task, task.take_span(longest)
                self._changed.wait(POLL_SECONDS)
        return None

    def _fetch_span(self, task: _FileTask, pieces: deque[int]) -> None:
        """Fetch the pieces of a span, over as many requests and sources as it takes."""
        buffer = bytearray()
        while pieces:
            self._check_over()
            source = self._choose(task)
            start, end = task.part.get_extent(pieces[0])[0] + len(buffer), task.part.get_extent(pieces[-1])[1]
            try:
                with source.client.open_range(self._manifest, task.file, start, end) as blocks:
                    task.add_origin(source)
                    for block in blocks:
                        self._check_over()
                        self._pool.record_progress(source, len(block))
                        buffer += block
                        self._store_pieces(task, pieces, buffer)
                if pieces:
                    raise SourceFault(f"{source.client.url} ended the body of {task.file.path} early")
            except SourceError as error:
                self._stop.wait(self._pool.record_error(source, error))

    def _choose(self, task: _FileTask) -> DownloadSource:
        source = self._pool.choose(task.excluded)
        if source is not None:
            return source
        if task.mismatch:
            raise ModelFileError(
                ModelOrderCode.CONTENT_MISMATCH,
                f"{task.mismatch}, from every source: the repository has changed or a source is damaged; pull again",
            )
        raise self._pool.build_error()

    def _store_pieces(self, task: _FileTask, pieces: deque[int], buffer: bytearray) -> None:
        """Write the complete pieces at the start of `buffer`, and remove them from `pieces` and `buffer`."""
        while pieces:
            start, end = task.part.get_extent(pieces[0])
            if len(buffer) < end - start:
                return
            self._write_piece(task, pieces.popleft(), buffer[: end - start])
            del buffer[: end - start]
            with self._changed:
                self._changed.notify_all()

    def _write_piece(self, task: _FileTask, piece: int, content: bytearray) -> None:
        """Write a piece if the disk has room. Raise `ModelFileError` with the missing bytes if it has not."""
        if not self._disk.has_room(0):
            raise self._disk.build_error(self._count_missing())
        try:
            task.part.write_piece(piece, content)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise self._disk.build_error(self._count_missing()) from None

    def _count_missing(self) -> int:
        return sum(task.missing_bytes for task in self._tasks)

    # verifier

    def _verify(self) -> None:
        while open_tasks := self._list_open():
            self._check_over()
            advanced = [self._advance(task) for task in open_tasks]
            if not any(advanced):
                with self._changed:
                    self._changed.wait(POLL_SECONDS)

    def _advance(self, task: _FileTask) -> bool:
        """Hash the pieces of a file that are there, and finish a complete file. Return whether anything was done."""
        advanced = False
        while task.hash_next():
            self._check_over()
            advanced = True
        if not task.is_hashed():
            return advanced
        if not task.finish(self._folder):
            with self._changed:
                task.requeue()
        with self._changed:
            self._changed.notify_all()
        return True
