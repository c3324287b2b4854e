"""Model descriptor: a model in a folder, before it is loaded."""

from dataclasses import dataclass, field
from pathlib import PurePath

from node.models.embedding_layout import EmbeddingLayout
from wire.models.kind import ModelKind
from wire.models.version import ModelVersion
from wire.report import KvParameters, TransientModel


@dataclass(frozen=True, slots=True)
class ModelDescriptor:
    """Text model in a folder of the catalogue, described from its files."""

    name: str
    """Name of the model."""
    folder: PurePath
    """Folder of the model's files."""
    fingerprint: str = ""
    """Hash of the files that change prompts or answers, and of the headers and samples of the weights
    (`node.models.catalogue`)."""
    weights: int = 0
    """Bytes of the tensors in memory, estimated from the files."""
    context: int = 0
    """Maximum tokens of a row, prompt and answer together."""
    kv: KvParameters = field(default_factory=lambda: KvParameters(0))
    """Parameters of the KV memory of a row, estimated from the config."""
    cause: str = ""
    """Why the model cannot be served; empty if it can. With a cause, the other fields may be unset."""
    forward: TransientModel = field(default_factory=TransientModel)
    """Coefficients of the transient bytes of a forward, estimated from the config."""
    content: str = ""
    """Hash of the content of the files; empty until they are hashed."""
    quantization: str = ""
    """Quantization of the weights, or the type of unquantized weights; empty if unknown."""
    removable: bool = False
    """Whether the node may delete the files."""
    written: float = 0.0
    """Unix time in seconds of the newest change of the files, such as their download; 0 if unknown."""
    stored: int = 0
    """Bytes of the tensors on disk. An fp8 checkpoint may take more bytes in memory."""
    kind: ModelKind = ModelKind.CHAT
    """Kind of requests that the model serves."""
    layout: EmbeddingLayout | None = None
    """Steps by which the model computes vectors or scores; None for a chat model."""
    reasoning: bool = False
    """Whether the chat template can begin the reasoning of an answer (`template_files.has_reasoning`)."""

    @property
    def version(self) -> ModelVersion:
        """Identity of the model's files."""
        return ModelVersion(self.fingerprint, self.content)
