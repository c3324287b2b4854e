"""Tokens of a query and a document, from which a model computes the score of the document."""

from collections.abc import Sequence
from typing import Final

from node.engine.text.chat_template import ChatTemplate
from node.engine.text.tokenizer import Tokenizer
from node.engine.text.tokenizer_errors import TemplateFailed, TooLong
from node.models.embedding_layout import AnswerTokens
from wire.frames import Embed, Generate, GenerationParams, Message

_PLACE: Final = "\ue000document\ue000"
"""Text in the place of the document while the prompt is rendered."""
_QWEN_HEAD: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n<Query>: "
)
_QWEN_MIDDLE: Final = "\n<Document>: "
_QWEN_TAIL: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class PromptPairs:
    """Prompts of a decoder for the documents of one request, which differ in the document only.

    `most`: maximum tokens of a prompt. Raise `TemplateFailed` if the chat template cannot be rendered.
    """

    def __init__(self, tokenizer: Tokenizer, answers: AnswerTokens, request: Embed, most: int) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._most = most
        self._head, tail = _render(tokenizer, answers, request)
        self._head_tokens = len(tokenizer.encode(self._head, plain=False))
        self._tail = tokenizer.encode(tail, plain=False)

    def tokenize(self, document: str) -> tuple[int, ...]:
        """Return the tokens of the prompt for a document, which is cut as the request demands.

        Raise `TooLong` for a document that is clearly longer than the model allows, or a query without room for any
        document.
        """
        truncate, room = self._request.truncate, self._most - len(self._tail)
        if self._head_tokens >= room:
            raise TooLong(f"the query has {self._head_tokens + len(self._tail)} tokens with the prompt of the model")
        body: Sequence[int] = self._tokenizer.encode(
            self._head + document, plain=False, max_tokens=0 if truncate else room
        )
        if self._request.max_tokens:
            body = body[: self._head_tokens + self._request.max_tokens]
        return (*(body[:room] if truncate else body), *self._tail)


def _render(tokenizer: Tokenizer, answers: AnswerTokens, request: Embed) -> tuple[str, str]:
    """Return the texts of a prompt before and after the document."""
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
