"""Query for a repository on the hub: messages between the coordinator and its child `node.hub.query`, as JSON."""

import msgspec

from wire.models.files import ModelManifest
from wire.report import KvParameters, Model, TransientModel

QUERY_TIMEOUT_SECONDS = 60.0
"""Default of `HubQuery.timeout_seconds`."""


class HubQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query for a repository."""

    endpoint: str
    """Base URL of the hub."""
    repo: str
    """Repository, as `publisher/name`."""
    token: str = ""
    """Token of the hub; empty for none."""
    revision: str = ""
    """Branch, tag or commit; empty for `main`."""
    timeout_seconds: float = QUERY_TIMEOUT_SECONDS
    """Maximum duration of the query in seconds."""


class SkippedFile(msgspec.Struct, frozen=True):
    """File of a repository that serving does not need. `size` is in bytes."""

    path: str
    size: int


class ModelPrediction(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of a model that is not downloaded. Sizes are bytes."""

    architecture: str = ""
    """`model_type` of the model's config; empty if unknown."""
    quantization: str = ""
    """Quantization of the weights for display, as in `Model.quantization`; empty if unknown."""
    weights: int = 0
    """Bytes of the tensors once loaded; 0 if unknown."""
    stored: int = 0
    """Bytes of the tensors on the disk."""
    context: int = 0
    """Maximum tokens of a row; 0 if unknown."""
    kv: KvParameters = msgspec.field(default_factory=lambda: KvParameters(0))
    """Parameters of the KV memory of a row."""
    transient: TransientModel = msgspec.field(default_factory=TransientModel)
    """Coefficients of the transient bytes of a forward."""
    cause: str = ""
    """Why the model cannot be served; empty if it can."""

    def to_model(self, name: str) -> Model:
        """Return the prediction as the model of a report, for the memory arithmetic."""
        return Model(
            name=name,
            weights=self.weights,
            kv_per_token=self.kv.per_token,
            kv_step=self.kv.step,
            kv_fixed=self.kv.fixed,
            kv_window=self.kv.window,
            kv_window_per_token=self.kv.window_per_token,
            kv_waste=self.kv.waste,
            context=self.context,
            forward=self.transient,
        )


class HubAnswer(msgspec.Struct, frozen=True, kw_only=True, tag="answer"):
    """Answer of the hub to a query of a repository: its files, and the predicted properties of its model."""

    manifest: ModelManifest
    """Files that serving needs, at the commit of the revision."""
    model: ModelPrediction
    skipped: tuple[SkippedFile, ...] = ()


class HubRefusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """Reason why a repository cannot be pulled, or why the query of the hub failed."""

    code: str
    """A `wire.frames.ModelOrderCode`."""
    message: str
    """Text for a person, without secrets."""
    retry_after: float = 0.0
    """Minimum seconds before the next try; 0 if unknown."""
