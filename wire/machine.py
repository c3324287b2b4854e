"""Parts of a node's report about its machine: memory of the system and disk of the models."""

from wire.bounds import Seconds, Size, Text, Word
from wire.report import WireStruct


class SystemMemory(WireStruct, frozen=True, array_like=True, gc=False):
    """Memory of the machine, as the agent reads it."""

    available: Size | None = None
    """Bytes that can be allocated without displacing other programs; None if unknown."""
    pressure: Word = ""
    """Memory pressure of the system: `normal`, `warn`, `critical`, or empty if unknown."""
    source: Word = ""
    """Name of the source of `available` and `pressure`: `psutil`, or `pretended` for a simulated machine."""
    age: Seconds = 0.0
    """Age of `available` and `pressure` in seconds when the report was written."""
    worker: Size = 0
    """Footprint in bytes of the video worker or quantization that uses the node's lease; 0 for none or if unreadable.
    """


class Disk(WireStruct, frozen=True, array_like=True, gc=False):
    """Disk on which a node stores pulled models."""

    free: Size = 0
    """Bytes that this user can write; 0 if unknown."""
    total: Size = 0
    """Size of the disk in bytes; 0 if unknown, as from an older node."""
    folder: Text = ""
    """Folder of the Hugging Face cache; empty from a node that cannot pull models."""
