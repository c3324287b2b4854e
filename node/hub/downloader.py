"""Child process that downloads the files of a manifest into the Hugging Face cache: `python -m node.hub.downloader`.

The process reads its order (`DownloadOrder`) from the standard input. It creates the snapshot and the references only
after every file is verified. After a failure or a cancel, received pieces stay on the disk, and the next download
continues there.
"""

import errno
import os
import time
from collections import deque
from pathlib import Path

from node.hub.cache_layout import RepositoryFolder
from node.hub.child_messages import ChildChannel, ChildEnd, ChildProgress, DownloadOrder, perform_order
from node.hub.digests import ContentHasher, DigestStore, FileDigest, find_content, hash_file
from node.hub.download.disk_space import DiskSpace
from node.hub.download.source_pool import SourcePool
from node.hub.download.transfer import Transfer
from node.hub.errors import ModelFileError, OrderStopped
from wire.frames.model_files import ModelOrderCode, ModelOrderPhase
from wire.models.files import ModelFile, find_manifest_fault

REPORT_SECONDS = 0.5
SPEED_SECONDS = 5.0
"""Seconds over which the reported speed is averaged."""


class Download:
    """Download of one order: checks files on the disk, fetches missing ones, creates the snapshot and references."""

    def __init__(self, order: DownloadOrder, channel: ChildChannel) -> None:
        self._order = order
        self._channel = channel
        self._folder = RepositoryFolder(Path(os.path.realpath(order.hub)), order.manifest.repo)
        self._store = DigestStore(Path(order.digests))
        self._files = tuple({file.etag: file for file in order.manifest.files}.values())
        self._present_bytes = 0
        self._digests: dict[Path, FileDigest] = {}
        self._reported_at = 0.0
        self._samples: deque[tuple[float, int]] = deque()
        self.fetched = 0
        """Bytes received over the network."""

    def run(self) -> str:
        """Download all missing files and return the content hash of the model.

        Raise `OrderStopped` after a cancel. Raise `ModelFileError` if the manifest is invalid, a file cannot be
        downloaded or verified, the digests cannot be written, or another process has the lock. Raise `OSError` for
        faults of the cache's disk.
        """
        fault = find_manifest_fault(self._order.manifest)
        if fault:
            raise ModelFileError(ModelOrderCode.INVALID, fault)
        self._folder.hub.mkdir(parents=True, exist_ok=True)
        with self._folder.lock():
            self._folder.prepare()
            missing = [file for file in self._files if not self._is_present(file)]
            if missing:
                self._fetch(missing)
            self._store.add(self._digests)
            return self._publish()

    def _is_present(self, file: ModelFile) -> bool:
        """Return whether the blob of a file has the content of the manifest, by its stored digest or a new one.

        The name of the blob is not trusted. Raise `OrderStopped` after a cancel.
        """
        path = self._folder.get_blob(file.etag)
        if not path.is_file() or path.stat().st_size != file.size:
            return False
        if not (file.sha256 and self._store.find(path) == file.sha256):
            hasher, done = ContentHasher(file), self._present_bytes

            def add(block: bytes) -> None:
                nonlocal done
                if self._channel.stop.is_set():
                    raise OrderStopped
                hasher.update(block)
                done += len(block)
                self._report(ChildProgress(phase=ModelOrderPhase.CHECKING, done=done, total=self._total))

            digest = hash_file(path, add)
            if digest is None or not hasher.is_expected():
                return False
            self._digests[path] = digest
        self._present_bytes += file.size
        return True

    @property
    def _total(self) -> int:
        return sum(file.size for file in self._files)

    def _fetch(self, missing: list[ModelFile]) -> None:
        order = self._order
        pool = SourcePool.open(order.sources, order.cluster, order.source_timeout_seconds, order.connections)
        transfer = Transfer(
            self._folder,
            order.manifest,
            missing,
            pool,
            DiskSpace(self._folder.root, order.reserve_bytes),
            self._channel.stop,
            piece_bytes=order.piece_bytes,
            connections=order.connections,
        )
        try:
            if not transfer.run(lambda: self._report_transfer(transfer, pool)):
                raise OrderStopped
        finally:
            self.fetched = pool.fetched
            pool.close()
            self._digests |= {self._folder.get_blob(etag): digest for etag, digest in transfer.list_digests().items()}

    def _publish(self) -> str:
        """Create the links and references, remove partial files, and return the content hash."""
        manifest = self._order.manifest
        self._folder.create_snapshot(manifest)
        names = ("main", manifest.revision) if manifest.revision not in ("", "main", manifest.commit) else ("main",)
        self._folder.write_references(manifest.commit, names)
        self._folder.remove_parts()
        return find_content(self._folder.get_snapshot(manifest.commit), self._store)

    def _report_transfer(self, transfer: Transfer, pool: SourcePool) -> None:
        self.fetched = pool.fetched
        done = self._present_bytes + transfer.received_bytes
        self._report(
            ChildProgress(
                phase=ModelOrderPhase.VERIFYING if done == self._total else ModelOrderPhase.DOWNLOADING,
                done=done,
                total=self._total,
                speed=self._measure_speed(),
                source=pool.current.client.url if pool.current is not None else "",
                fetched=pool.fetched,
                message=pool.describe_faults(),
            )
        )

    def _measure_speed(self) -> float:
        now = time.monotonic()
        self._samples.append((now, self.fetched))
        while now - self._samples[0][0] > SPEED_SECONDS:
            self._samples.popleft()
        since, before = self._samples[0]
        return (self.fetched - before) / (now - since) if now > since else 0.0

    def _report(self, progress: ChildProgress) -> None:
        """Send progress, at most every `REPORT_SECONDS`."""
        now = time.monotonic()
        if now - self._reported_at >= REPORT_SECONDS:
            self._reported_at = now
            self._channel.send(progress)


def run_download(order: DownloadOrder, channel: ChildChannel) -> ChildEnd:
    """Perform a download order. Return its end, also after a cancel or a fault."""
    download = Download(order, channel)
    try:
        content = download.run()
    except OrderStopped:
        return ChildEnd(code=ModelOrderCode.CANCELLED, fetched=download.fetched)
    except ModelFileError as error:
        return ChildEnd(code=error.code, message=error.message, fetched=download.fetched, retry_after=error.retry_after)
    except OSError as error:
        code = ModelOrderCode.DISK_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else ModelOrderCode.FAILED
        text = f"the cache {order.hub} cannot be used: {error.strerror or type(error).__name__}"
        return ChildEnd(code=code, message=text, fetched=download.fetched)
    return ChildEnd(code=ModelOrderCode.COMPLETED, content=content, fetched=download.fetched)


def main() -> None:
    """Read an order from standard input, download the model, send the end of the order, and end the process.

    The exit code is 0, also after a failed download, and 2 if the order cannot be read.
    """
    perform_order(DownloadOrder, run_download)


if __name__ == "__main__":
    main()
