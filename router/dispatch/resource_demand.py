"""Demand of a request on a node, computed in the same way for every dialect."""

from collections.abc import Iterable

from router.admission.request_limits import TEMPLATE_BYTES
from router.dispatch.request import EmbeddingInput
from router.placement.candidate import GRAMMAR, LOGPROBS, SAMPLING, TOOLS, ResourceDemand
from wire.frames import GenerationParams, Message
from wire.models.kind import ModelKind

BYTES_PER_ID = 4
"""Bytes of text for which a token id counts, equal to `router.admission.rate_limits.BYTES_PER_TOKEN`."""
_PLAIN: frozenset[str] = frozenset()


def compute_demand(
    model: str, messages: Iterable[Message], params: GenerationParams, tools: str = ""
) -> ResourceDemand:
    """Return the demand of a conversation: the bytes of its prompt, and the features that it needs (`find_features`).

    `tools` is the JSON text of the tools in the prompt; empty without tools. The demand has no number of prompt tokens,
    which only a node can count.
    """
    size = len(tools.encode()) if tools else 0
    for message in messages:
        content = message.content
        size += (len(content) if content.isascii() else len(content.encode())) + TEMPLATE_BYTES
        if message.tool_calls or message.reasoning:
            size += _count_extra_bytes(message)
    return ResourceDemand(model, size, None, params.max_tokens, params.n, find_features(params, tools))


def compute_plain_demand(model: str, text: str, ids: tuple[int, ...], params: GenerationParams) -> ResourceDemand:
    """Return the demand of a prompt without a template: `text`, or `ids` if the text is empty.

    The number of prompt tokens is exact for `ids`, and unknown for a text.
    """
    size, tokens = (len(text.encode()), None) if text else (0, len(ids))
    return ResourceDemand(model, size, tokens, params.max_tokens, params.n, find_features(params))


def compute_embedding_demand(model: str, embed: EmbeddingInput) -> ResourceDemand:
    """Return the demand of a request for embeddings or scores.

    A token id counts as `BYTES_PER_ID` bytes. The query counts once with each document. Raise `ValueError` if `embed`
    has no texts.
    """
    query = len(embed.query.encode())
    sizes = [query + len(text.encode()) for text in embed.texts] + [BYTES_PER_ID * len(ids) for ids in embed.ids]
    longest, kind = max(sizes), ModelKind.RERANK if query else ModelKind.EMBED
    return ResourceDemand(model, longest, max_tokens=1, kind=kind, other_bytes=sum(sizes) - longest)


def _count_extra_bytes(message: Message) -> int:
    calls = sum(len(f"{call.id}{call.name}{call.arguments}".encode()) + TEMPLATE_BYTES for call in message.tool_calls)
    return calls + len(message.reasoning.encode())


def find_features(params: GenerationParams, tools: str = "") -> frozenset[str]:
    """Return the features that a request needs beyond plain sampling, with the names of `Model.features`.

    `tools` is the JSON text of the tools; empty without tools. Parameters without an effect need no feature.
    """
    sampling = (
        params.top_k
        or params.min_p
        or params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1
        or params.logit_bias
    )
    if not (sampling or params.logprobs or params.grammar or tools):
        return _PLAIN
    requested = {GRAMMAR: params.grammar, TOOLS: tools, LOGPROBS: params.logprobs, SAMPLING: sampling}
    return frozenset(name for name, wanted in requested.items() if wanted)
