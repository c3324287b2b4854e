"""Hidden states between the layers of a forward that is built and not evaluated yet.

MLX evaluates an array together with all that it depends on. A forward is therefore evaluated in parts by evaluating the
states after some of its layers first, one after the other.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import mlx.core as mx

StateRecorder = Callable[[int, mx.array], None]
"""Function that is called after a layer with the number of layers that have run. The second argument is the lazy states
after this layer, shape (texts, tokens, features)."""


def choose_pauses(layers: int, parts: int) -> frozenset[int]:
    """Return the numbers of layers after which a forward in `parts` parts pauses: at the end of each part but the last.

    The parts have nearly the same number of layers. `parts` must be at most `layers`.
    """
    return frozenset(layers * part // parts for part in range(1, parts))


def count_layers(module: object) -> int:
    """Return the number of layers of a decoder of mlx-lm; 1 if it has no list of layers."""
    return max(1, len(_list_layers(module)))


@contextmanager
def record_layers(module: object, record: StateRecorder) -> Generator[None]:
    """Call `record` after each layer that a decoder of mlx-lm runs while the context is open.

    `module` is the module with the list of layers; without such a list, `record` is never called. While the context is
    open, only the inference thread may use the module.
    """
    layers = _list_layers(module)
    own = list(layers)
    layers[:] = [_RecordedLayer(layer, number, record) for number, layer in enumerate(own, 1)]
    try:
        yield
    finally:
        layers[:] = own


def _list_layers(module: object) -> list[Any]:
    layers = getattr(module, "layers", None)
    return cast("list[Any]", layers) if isinstance(layers, list) else []


class _RecordedLayer:
    """Layer that records its output. It has the attributes of the wrapped layer, which some architectures read."""

    def __init__(self, layer: Any, number: int, record: StateRecorder) -> None:
        self._layer = layer
        self._number = number
        self._record = record

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        result = self._layer(*arguments, **options)
        states = cast("Any", result)[0] if isinstance(result, tuple) else result
        if isinstance(states, mx.array):
            self._record(self._number, states)
        return cast("Any", result)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)
