"""Child process that hashes and verifies the files of a model: `python -m node.hub.verifier`.

The process reads its order (`VerifyOrder`) from the standard input, and stores the digests for the agent
(`node.hub.digests`). In the Hugging Face cache, each digest is compared with the name of the blob. If one differs, the
order ends as `content_mismatch`. The process runs with low priority, and reads at most `max_bytes_per_second`.
"""

import hashlib
import os
import re
import time
from pathlib import Path

from node.hub.child_messages import ChildChannel, ChildEnd, ChildProgress, VerifyOrder, build_end, perform_order
from node.hub.digests import DigestStore, FileDigest, compute_content, hash_file, list_content_files
from node.hub.errors import ModelFileError, OrderStopped
from wire.frames.model_files import ModelOrderCode, ModelOrderPhase

REPORT_SECONDS = 0.5
MAX_GIT_BYTES = 64 * 1024 * 1024
"""Maximum bytes of a file whose git digest is checked. Larger files of the hub have a SHA-256."""
_SHA256, _SHA1 = re.compile(r"[0-9a-f]{64}"), re.compile(r"[0-9a-f]{40}")


class Verification:
    """Verification of one model folder: hashes its files, and compares the digests with the names of blobs."""

    def __init__(self, order: VerifyOrder, channel: ChildChannel) -> None:
        self._order = order
        self._channel = channel
        self._folder = Path(order.folder)
        self._began = time.monotonic()
        self._reported_at = 0.0
        self._total = 0
        self._done = 0

    def run(self) -> ChildEnd:
        """Hash all files, store their digests, and return the end of the order with the content hash.

        The end is `content_mismatch`, also with the content hash, if a digest differs from the name of its blob. The
        end is `failed`, and no digest is stored, if a file changed meanwhile. The end is `not_found` without files.

        Raise `OrderStopped` after a cancel, `OSError` if a file cannot be read, `ModelFileError` if the digests cannot
        be written.
        """
        names = list_content_files(self._folder)
        self._total = sum((self._folder / name).stat().st_size for name in names)
        digests: dict[str, FileDigest] = {}
        for name in names:
            digest = hash_file(self._folder / name, self._add)
            if digest is None:
                return build_end(ModelOrderCode.FAILED, f"{name} changed while it was read: verify again")
            digests[name] = digest
        changed = [name for name, digest in digests.items() if _is_changed_blob(self._folder / name, digest)]
        DigestStore(Path(self._order.digests)).add({self._folder / name: digest for name, digest in digests.items()})
        content = compute_content({name: digest.sha256 for name, digest in digests.items()})
        if not content:
            return build_end(ModelOrderCode.NOT_FOUND, f"{self._folder} has no files of a model")
        if changed:
            text = f"{', '.join(changed)} changed on the disk since the download: remove the model and pull it again"
            return ChildEnd(code=ModelOrderCode.CONTENT_MISMATCH, message=text, content=content)
        return ChildEnd(code=ModelOrderCode.COMPLETED, content=content)

    def _add(self, block: bytes) -> None:
        if self._channel.stop.is_set():
            raise OrderStopped
        self._done += len(block)
        now = time.monotonic()
        if self._order.max_bytes_per_second:
            self._channel.stop.wait(self._began + self._done / self._order.max_bytes_per_second - now)
        if now - self._reported_at >= REPORT_SECONDS:
            self._reported_at = now
            speed = self._done / (now - self._began) if now > self._began else 0.0
            self._channel.send(
                ChildProgress(phase=ModelOrderPhase.VERIFYING, done=self._done, total=self._total, speed=speed)
            )


def _is_changed_blob(path: Path, digest: FileDigest) -> bool:
    """Return whether a file of the Hugging Face cache does not have the digest by which its blob is named.

    That is the SHA-256, or for small files the SHA-1 of git. Raise `OSError` if the file cannot be read.
    """
    blob = Path(os.path.realpath(path))
    if blob.parent.name != "blobs":
        return False
    if _SHA256.fullmatch(blob.name):
        return blob.name != digest.sha256
    if _SHA1.fullmatch(blob.name) and digest.size <= MAX_GIT_BYTES:
        content = blob.read_bytes()
        return blob.name != hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    return False


def run_verification(order: VerifyOrder, channel: ChildChannel) -> ChildEnd:
    """Perform an order to verify a model. Return its end, also after a cancel or for an unreadable file."""
    try:
        return Verification(order, channel).run()
    except OrderStopped:
        return build_end(ModelOrderCode.CANCELLED)
    except ModelFileError as error:
        return build_end(error.code, error.message)
    except OSError as error:
        return build_end(ModelOrderCode.FAILED, f"{order.folder} cannot be read: {error.strerror or error}")


def main() -> None:
    """Read an order from standard input, verify the model, send the end of the order, and end the process.

    The exit code is 0, also after a failure, or 2 if the order cannot be read.
    """
    perform_order(VerifyOrder, run_verification)


if __name__ == "__main__":
    main()
