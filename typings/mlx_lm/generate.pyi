from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import mlx.core as mx

class StopSequences:
    def __init__(self, stop_sequences: Sequence[Sequence[int]] | None = None) -> None: ...
    def matcher(self) -> object: ...

class GenerationBatch:
    class Response:
        uid: int
        token: int
        logprobs: mx.array

    uids: list[int]
    prompt_cache: list[Any]
    tokens: list[list[int]]
    def __init__(
        self,
        model: Any,
        uids: list[int],
        inputs: mx.array,
        prompt_cache: list[Any],
        tokens: list[list[int]],
        samplers: list[Callable[[mx.array], mx.array]],
        fallback_sampler: Callable[[mx.array], mx.array],
        logits_processors: list[list[Callable[[mx.array, mx.array], mx.array]]],
        stop_sequences: list[StopSequences],
        max_tokens: list[int],
    ) -> None: ...
    def extend(self, batch: GenerationBatch) -> None: ...
    def filter(self, keep: list[int]) -> None: ...
    def next(self) -> list[Response]: ...

_S = TypeVar("_S", bound=Hashable)
_T = TypeVar("_T", bound=Hashable)

class _State(Generic[_S]): ...

class TextStateMachine(Generic[_S]):
    def __init__(self, transitions: Mapping[_S, Sequence[tuple[str, _S]]] | None = None) -> None: ...
    def make_state(self, initial: _S) -> _State[_S]: ...
    @staticmethod
    def split(state: _State[_T], text: str) -> tuple[_State[_T], list[tuple[_T, str]]]: ...
    @staticmethod
    def flush(state: _State[_T]) -> tuple[_State[_T], str, _T]: ...

class BatchGenerator:
    def __init__(self, model: Any, **kwargs: Any) -> None: ...
    def __getattr__(self, name: str) -> Any: ...

def generate_step(prompt: mx.array, model: Any, *, max_tokens: int = 256) -> Iterator[tuple[int, mx.array]]: ...
def generate(model: Any, tokenizer: Any, prompt: Sequence[int] | str, *, max_tokens: int = 256) -> str: ...
