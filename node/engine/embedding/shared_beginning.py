"""Shared beginning of the texts of one request: its keys and values are computed once, and serve all texts.

The prompts of a generative reranker begin with the same instruction and query. Texts for embeddings may begin with the
same prompt.
"""

from collections.abc import Sequence

from node.engine.kv.kv_cache import create_cache, is_plain
from node.engine.models.loaded_model import LoadedModel
from node.models.embedding_layout import Pooling

MIN_TOKENS = 32
"""Minimum tokens of a beginning that is computed separately. For a shorter beginning, the extra forward costs as much
as it saves."""
MIN_TEXTS = 3
"""Minimum number of texts whose shared beginning is computed separately if it is not cached."""


def find_shared_beginning(
    loaded_model: LoadedModel, texts: Sequence[tuple[int, ...]], cached: int = 0
) -> tuple[int, ...]:
    """Return the tokens with which all texts begin, without the last token of the shortest text. Return an empty tuple
    if these are fewer than `MIN_TOKENS`, or if the model cannot continue from a cached beginning.

    `cached`: number of these tokens in the prefix cache. For fewer than `MIN_TEXTS` texts, at most `cached` tokens are
    returned.

    A model can continue if it is a decoder whose pooling reads only the state of the last token. All its layers must
    keep keys and values by position.
    """
    head = loaded_model.head
    most = len(texts[0]) if len(texts) >= MIN_TEXTS else cached
    if most < MIN_TOKENS or head is None or head.runs_whole_texts:
        return ()
    if set(head.layout.poolings) != {Pooling.LAST} or not is_plain(create_cache(loaded_model.model)):
        return ()
    count = min(most, count_shared_tokens(texts))
    return texts[0][:count] if count >= MIN_TOKENS else ()


def count_shared_tokens(texts: Sequence[tuple[int, ...]]) -> int:
    """Return the length in tokens of the common prefix of all texts, at most the length of the shortest text minus
    1."""
    first, last = min(texts), max(texts)  # all other texts sort between these two
    most = min(len(text) for text in texts) - 1
    return next((place for place in range(most) if first[place] != last[place]), most)
