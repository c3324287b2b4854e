r"""Format of a backup: one file, read in one pass, with a digest for every part.

    b"macpool backup 1\n" | length of the manifest, 4 bytes | manifest, JSON | its SHA-256, 32 bytes | the files

The files follow in the order and with the sizes of the manifest, each with its SHA-256, and then the file ends. No
content is used before its digest was verified. The format has no links, no modes and no paths except those of `NAMES`,
hence no entry can point outside the state folder. With a passphrase, all of this is encrypted (`encryption`).
"""

import hashlib
import re
from collections.abc import Iterator
from typing import BinaryIO, Protocol

import msgspec

MAGIC = b"macpool backup 1\n"
FAMILY = b"macpool backup "
"""First bytes of a backup of any format version."""
FORMAT = 1
HEAD_BYTES = 64
"""Number of bytes at the start of a file that determine its format, encrypted or not."""
MAX_MANIFEST_BYTES = 16 * 2**20
CHUNK_BYTES = 2**20
DATABASE, VIDEOS = "cluster.db", "videos.db"
NAMES = re.compile(
    r"cluster\.db|videos\.db|config\.toml|pepper|authority/[a-z-]{1,60}\.pem"
    r"|videos/video_[A-Za-z0-9]{1,64}/[A-Za-z0-9][A-Za-z0-9_-]{0,60}\.[a-z0-9]{2,4}"
)
"""Pattern of the file names that a backup may contain, relative to the state folder. Any other name is refused."""
NEEDED = frozenset({DATABASE, "pepper", "authority/authority.pem"})
"""Names of the files that a backup must contain."""


class ArchiveError(Exception):
    """Raised if a backup cannot be used. The text has the reason and, if known, the next step."""


class ArchiveMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Description of one file in a backup: name relative to the state folder, size in bytes, SHA-256 in hex."""

    name: str
    size: int
    sha256: str


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Description of a backup, at its start: the cluster at the time of the backup, and the files in their order."""

    format: int
    """Version of the format; `FORMAT` for a new backup."""
    macpool: str
    """Version of Macpool that made the backup."""
    made: float
    """Time of the backup, in Unix seconds."""
    cluster: str
    """Id of the cluster."""
    name: str
    """Display name of the cluster."""
    epoch: int
    """Epoch of the coordinator (`ClusterMeta.epoch`)."""
    generation: int
    """Generation of the coordinator (`ClusterMeta.generation`)."""
    schemas: dict[str, int]
    """Schema versions of the databases, by file name."""
    members: tuple[ArchiveMember, ...]
    artifacts: bool = False
    """Whether the files of video jobs are included."""
    outside: tuple[str, ...] = ()
    """Paths of files that the settings name and that the backup does not contain."""


class ReadableStream(Protocol):
    """Stream from which a backup is read: a plain file, or the decrypted content of an encrypted one."""

    def read(self, size: int, /) -> bytes:
        """Return up to `size` bytes; fewer only at the end.

        Raise `OSError` if the file cannot be read, and `EncryptionError` if its content cannot be decrypted. The
        functions of this module pass both errors on.
        """
        ...


def encode_header(manifest: Manifest) -> bytes:
    """Return the part of a backup between `MAGIC` and the first file: length, manifest and digest."""
    encoded = msgspec.json.encode(manifest)
    return len(encoded).to_bytes(4, "big") + encoded + hashlib.sha256(encoded).digest()


def read_manifest(source: ReadableStream) -> Manifest:
    """Read the manifest from a stream that is positioned after `MAGIC`.

    Raise `ArchiveError` if the manifest is damaged or of a newer format. Other reasons for the error: the manifest
    lists a file that is not allowed, lists a file twice, or lacks a required one.
    """
    length = int.from_bytes(read_exactly(source, 4), "big")
    if length > MAX_MANIFEST_BYTES:
        raise ArchiveError(f"its manifest would have {length} bytes: it is damaged")
    encoded = read_exactly(source, length)
    if hashlib.sha256(encoded).digest() != read_exactly(source, 32):
        raise ArchiveError("its manifest is damaged: use another copy of the file")
    try:
        number = msgspec.json.decode(encoded, type=_Numbered).format
        if number > FORMAT:
            raise ArchiveError(
                f"it was made by a newer macpool (format {number}, this one reads {FORMAT}): update macpool"
            )
        manifest = msgspec.json.decode(encoded, type=Manifest)
    except msgspec.MsgspecError as error:
        raise ArchiveError(f"its manifest cannot be read ({error}): use another copy of the file") from None
    _check(manifest)
    return manifest


class _Numbered(msgspec.Struct, frozen=True):
    format: int


def _check(manifest: Manifest) -> None:
    names = [member.name for member in manifest.members]
    wrong = next((name for name in names if NAMES.fullmatch(name) is None), None)
    if wrong is not None:
        raise ArchiveError(f"it contains {wrong[:100]!r}, which does not belong in a backup")
    if len(set(names)) < len(names) or not set(names) >= NEEDED or any(member.size < 0 for member in manifest.members):
        raise ArchiveError("its manifest lists a file twice, or lacks a required file")


def read_member(source: ReadableStream, member: ArchiveMember) -> Iterator[bytes]:
    """Yield the bytes of the next file in pieces of at most `CHUNK_BYTES`.

    Raise `ArchiveError` if the stream ends early, or, after the last piece, if the digest is wrong.
    """
    digest, left = hashlib.sha256(), member.size
    while left:
        piece = read_exactly(source, min(CHUNK_BYTES, left))
        digest.update(piece)
        left -= len(piece)
        yield piece
    if digest.hexdigest() != member.sha256:
        raise ArchiveError(f"{member.name} in it is damaged: use another copy of the file")


def check_end(source: ReadableStream) -> None:
    """Raise `ArchiveError` if data follows the last file of a backup.

    Read at most 1 byte. The errors of `ReadableStream.read` are raised.
    """
    if source.read(1):
        raise ArchiveError("it has data after its last member: use another copy of the file")


def read_exactly(source: ReadableStream, size: int) -> bytes:
    """Return exactly `size` bytes. Raise `ArchiveError` if there are fewer, and the errors of `ReadableStream.read`."""
    data = b""
    while piece := source.read(size - len(data)):
        data += piece
    if len(data) < size:
        raise ArchiveError("it is truncated: use another copy of the file")
    return data


def compute_digest(file: BinaryIO) -> tuple[int, str]:
    """Read a file from its position to its end. Return the number of bytes, and their SHA-256 in hex."""
    digest, size = hashlib.sha256(), 0
    while piece := file.read(CHUNK_BYTES):
        digest.update(piece)
        size += len(piece)
    return size, digest.hexdigest()
