"""Tokenization of a query with a document, from whose tokens a model computes the score of the document."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from node.engine.text.chat_template import ChatTemplate
from node.engine.text.tokenizer import Tokenizer
from node.engine.text.tokenizer_errors import TemplateFailed, TooLong, convert_panics
from node.models.embedding_layout import AnswerTokens
from wire.frames import Embed, Generate, GenerationParams, Message

_PLACE: Final = "\ue000document\ue000"
"""Placeholder of the document while the prompt is rendered."""
_QWEN_HEAD: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: "
)
_QWEN_MIDDLE: Final = "\n<Document>: "
_QWEN_TAIL: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class TokenizedPair(NamedTuple):
    """Tokens of a query and a document, or of a single text."""

    ids: tuple[int, ...]
    segment: int = 0
    """Position of the first token of the document, if the model has segments; otherwise 0."""


class PromptPairs:
    """Prompts of one request to a reranker that is a decoder. The prompts differ only in the document.

    `most`: maximum tokens of a prompt. Raise `TemplateFailed` if the chat template is missing or leaves out the
    document, and `TokenizerPanic` if the native tokenizer panics. Other errors of the template propagate.
    """

    def __init__(self, tokenizer: Tokenizer, answers: AnswerTokens, request: Embed, most: int) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._most = most
        self._head, tail = _render(tokenizer, answers, request)
        self._head_tokens = len(tokenizer.encode(self._head, plain=False))
        self._tail = tokenizer.encode(tail, plain=False)

    def tokenize(self, document: str) -> TokenizedPair:
        """Return the tokens of the prompt for a document. Cut the document to `max_tokens` of the request (0: no cut).
        With `truncate`, also cut the document to the room that `most` leaves.

        Without `truncate`, a prompt may have more than `most` tokens. Raise `TooLong` for a query without room for any
        document, and for a very long document that is not cut (`Tokenizer.encode`). Raise `TokenizerPanic` if the
        native tokenizer panics.
        """
        truncate, room = self._request.truncate, self._most - len(self._tail)
        if self._head_tokens >= room:
            raise TooLong(f"the query has {self._head_tokens + len(self._tail)} tokens with the prompt of the model")
        cut = truncate or self._request.max_tokens > 0
        body: Sequence[int] = self._tokenizer.encode(self._head + document, plain=False, max_tokens=0 if cut else room)
        if self._request.max_tokens:
            body = body[: self._head_tokens + self._request.max_tokens]
        return TokenizedPair((*(body[:room] if truncate else body), *self._tail))


class EncoderPairs:
    """Pairs of the query of one request and a document for a cross-encoder, joined by the tokenizer of the model.

    `most`: maximum tokens of a pair. Raise `TemplateFailed` for a tokenizer that cannot join two texts.
    """

    def __init__(self, tokenizer: Tokenizer, request: Embed, most: int) -> None:
        if tokenizer.rust is None:
            raise TemplateFailed("its tokenizer joins no pairs of texts: its folder needs a tokenizer.json")
        self._rust = tokenizer.rust
        self._request = request
        self._most = most

    def tokenize(self, document: str) -> TokenizedPair:
        """Return the tokens of the pair with a document. Cut the document to `max_tokens` of the request (0: no cut).

        With `truncate`, also cut the document to the room that `most` leaves, and raise `TooLong` if the query leaves
        no room. Without `truncate`, a pair may have more than `most` tokens. Raise `TokenizerPanic` if the native
        tokenizer panics.
        """
        with convert_panics():
            found = self._rust.encode(self._request.query, document)
        ids, own = found.ids, [place for place, text in enumerate(found.sequence_ids) if text == 1]
        cut = max(0, len(own) - self._request.max_tokens) if self._request.max_tokens else 0
        cut = max(cut, len(ids) - self._most) if self._request.truncate else cut
        if cut and cut >= len(own):
            raise TooLong(f"the query has {len(ids) - len(own)} tokens")
        gone = set(own[len(own) - cut :])
        kept = tuple(token for place, token in enumerate(ids) if place not in gone)
        return TokenizedPair(kept, found.type_ids.index(1) if 1 in found.type_ids else 0)


def _render(tokenizer: Tokenizer, answers: AnswerTokens, request: Embed) -> tuple[str, str]:
    """Return the texts of a prompt before and after the document. Raise `TemplateFailed` if the chat template leaves
    out the document; exceptions of its rendering propagate."""
    if not answers.has_template:
        return _QWEN_HEAD + request.query + _QWEN_MIDDLE, _QWEN_TAIL
    messages = Message("query", request.query), Message("document", _PLACE)
    text = ChatTemplate(tokenizer.wrapper).render(
        Generate(request.request, 0, "", request.model, messages, GenerationParams(), 0)
    )
    head, found, tail = text.rpartition(_PLACE)
    if not found:
        raise TemplateFailed("the chat template leaves out the document")
    return head, tail
