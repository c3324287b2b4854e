from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

class StopSequences:
    def __init__(self, stop_sequences: Sequence[Sequence[int]] | None = None) -> None: ...

class GenerationBatch:
    class Response:
        uid: int
        token: int
        logprobs: mx.array

    uids: list[int]
    prompt_cache: list[Any]
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
