"""Model descriptor: a model in a folder, before it is loaded."""

from dataclasses import dataclass, field
from pathlib import PurePath

from wire.report import KvParameters, TransientModel


@dataclass(frozen=True, slots=True)
class ModelDescriptor:
    """Model on disk."""

    name: str
    """Name of the model."""
    folder: PurePath
    """Folder of its files."""
    fingerprint: str = ""
    """Hash that identifies its files."""
    weights: int = 0
    """Bytes of its tensors once loaded."""
    context: int = 0
    """Most tokens of a row."""
    kv: KvParameters = field(default_factory=lambda: KvParameters(0))
    """Bytes of a row, estimated from its config."""
    cause: str = ""
    """Why it cannot be served; empty when it can. With a cause the other fields may be unset."""
    forward: TransientModel = field(default_factory=TransientModel)
    """Transient of a forward, estimated from its config."""
    stored: int = 0
    """Bytes of its tensors on disk; an fp8 checkpoint may grow when loaded."""
