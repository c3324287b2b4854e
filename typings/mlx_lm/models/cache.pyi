from typing import Any

import mlx.core as mx

def make_prompt_cache(model: Any, max_kv_size: int | None = None) -> list[Any]: ...

class TokenBuffer:
    def __init__(self, tokens: list[int] | None = None) -> None: ...

class KVCache:
    keys: mx.array
    values: mx.array
    offset: int

class RotatingKVCache:
    keys: mx.array
    values: mx.array
    offset: int
    max_size: int
    keep: int
    _idx: int

class ArraysCache:
    cache: list[mx.array | None]

class CacheList:
    caches: tuple[Any, ...]

class ChunkedKVCache: ...

class BatchKVCache:
    def __init__(self, left_padding: list[int]) -> None: ...
