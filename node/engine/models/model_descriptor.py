"""A model as it lies in a folder, before anything of it is loaded."""

from dataclasses import dataclass, field
from pathlib import PurePath

from wire.report import Kv, Transient


@dataclass(frozen=True, slots=True)
class Found:
    """`weights` are the bytes of its tensors once they are loaded, `stored` those in its files: a checkpoint in fp8 may
    grow. `kv` and `forward` are what its config lets one foresee of a row and of a forward; `cause` says why it can not
    be served (then the rest may be empty)."""

    name: str
    folder: PurePath
    fingerprint: str = ""
    weights: int = 0
    context: int = 0
    kv: Kv = field(default_factory=lambda: Kv(0))
    cause: str = ""
    forward: Transient = field(default_factory=Transient)
    stored: int = 0
