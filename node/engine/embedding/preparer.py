"""Preparation of requests for embeddings and scores: tokenize all texts, or refuse the request.

`requests.preparer` does the same for chats.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import structlog

from node.engine.embedding.pairs import EncoderPairs, PromptPairs, TokenizedPair
from node.engine.models.model_descriptor import ModelDescriptor
from node.engine.process.interface import CallRecording
from node.engine.requests.prepared import PreparedEmbedding
from node.engine.requests.preparer import RequestPreparer
from node.engine.text.tokenizer import Tokenizer
from node.engine.text.tokenizer_errors import TemplateFailed, TooLong
from node.models.catalogue import ModelCatalogue
from node.models.embedding_layout import EmbeddingLayout
from wire.frames import Embed
from wire.models.kind import ModelKind
from wire.refusals import RefusalCode, Refused

log = structlog.get_logger("engine.prompts")


class EmbeddingPreparer:
    """Tokenization of requests for embeddings and scores. `tokenizers` loads and caches the tokenizers.

    `context(found)` returns the maximum tokens of a text for a model. `recorder` records native calls; None: they are
    not recorded.
    """

    def __init__(
        self,
        catalogue: ModelCatalogue,
        tokenizers: RequestPreparer,
        context: Callable[[ModelDescriptor], int],
        recorder: CallRecording | None = None,
    ) -> None:
        self._catalogue = catalogue
        self._tokenizers = tokenizers
        self._context = context
        self._recorder = recorder

    def prepare(self, request: Embed) -> PreparedEmbedding:
        """Tokenize the texts of a request. Return the prepared request, whose `refused` is set if it is refused. Never
        raise, because an exception would end the calling thread."""
        try:
            with self._record(request):
                return self._prepare(request)
        except TooLong as error:
            found = self._catalogue.find(request.model)
            most = 0 if found is None else self._context(found)
            text = f"{error}; the longest text for {request.model} has {most}: shorten the text, or set truncate"
            return _refuse(request, RefusalCode.CONTEXT, text)
        except TemplateFailed as error:
            return _refuse(request, RefusalCode.TEMPLATE, str(error))
        except Exception as error:
            log.exception("prepare", request=request.request, request_id=request.request_id)
            return _refuse(request, RefusalCode.TEMPLATE, f"a text could not be tokenized: {type(error).__name__}")

    def _record(self, request: Embed) -> AbstractContextManager[None]:
        if self._recorder is None:
            return nullcontext()
        return self._recorder.record_tokenization(request.model, request.request)

    def _prepare(self, request: Embed) -> PreparedEmbedding:
        kind = ModelKind.RERANK if request.query else ModelKind.EMBED
        tokenizer = self._tokenizers.find_tokenizer(request.model, kind)
        if isinstance(tokenizer, Refused):
            return PreparedEmbedding(request, refused=tokenizer)
        found = self._catalogue.find(request.model)
        layout = None if found is None else found.layout
        if found is None or layout is None:
            return _refuse(request, RefusalCode.NO_MODEL, f"this node has no model {request.model}")
        refused = _refuse_prompt(request, layout)
        if refused is not None:
            return PreparedEmbedding(request, refused=refused)
        most = self._context(found)
        pairs = list(_tokenize(tokenizer, request, layout, most))
        inputs = tuple(pair.ids for pair in pairs)
        if not inputs:
            return _refuse(request, RefusalCode.INVALID, "the request has no text: send at least one")
        for place, ids in enumerate(inputs):
            if not ids:
                return _refuse(request, RefusalCode.INVALID, f"input {place} has no tokens: send a text")
            if len(ids) > most:
                text = (
                    f"input {place} has {len(ids)} tokens, the longest text for {request.model} has {most}: "
                    "shorten the text, or set truncate"
                )
                return _refuse(request, RefusalCode.CONTEXT, text)
        segments = tuple(pair.segment for pair in pairs) if layout.encoder is not None else ()
        return PreparedEmbedding(request, inputs, segments=segments)


def _tokenize(tokenizer: Tokenizer, request: Embed, layout: EmbeddingLayout, most: int) -> Iterator[TokenizedPair]:
    """Yield the tokens of each text of a request, of at most `most` tokens with `truncate`. The texts of a request for
    scores are pairs with its query."""
    if layout.answers is not None:
        yield from map(PromptPairs(tokenizer, layout.answers, request, most).tokenize, request.texts)
    elif request.query:
        yield from map(EncoderPairs(tokenizer, request, most).tokenize, request.texts)
    else:
        prompt, cuts = layout.prompts.get(request.prompt or layout.default_prompt, ""), request.truncate
        yield from (TokenizedPair(ids[:most] if cuts else ids) for ids in request.ids)
        yield from (
            TokenizedPair(tokenize_text(tokenizer, prompt + text, most, truncate=cuts)) for text in request.texts
        )


def tokenize_text(tokenizer: Tokenizer, text: str, most: int, *, truncate: bool) -> tuple[int, ...]:
    """Return the tokens of a text, including the tokens that the tokenizer adds to every text.

    With `truncate`, return at most `most` tokens: the end of the text is cut, the added tokens stay. Without
    `truncate`, raise `TooLong` for a very long text with more tokens (`Tokenizer.encode`). Other texts are returned
    whole. Raise `TokenizerPanic` if the native tokenizer panics.
    """
    ids = tokenizer.encode(text, plain=True, max_tokens=0 if truncate else most)
    if len(ids) <= most or not truncate:
        return ids
    bare = tokenizer.encode(text, plain=False)
    added = len(ids) - len(bare)
    first = next((at for at in range(added + 1) if ids[at : at + len(bare)] == bare), 0)
    kept = max(0, most - added)
    return (*ids[: first + kept], *ids[first + len(bare) :])[:most]


def _refuse_prompt(request: Embed, layout: EmbeddingLayout) -> Refused | None:
    """Refuse a prompt that the model does not have."""
    if not request.prompt or request.prompt in layout.prompts:
        return None
    names = ", ".join(sorted(layout.prompts)) or "none"
    return Refused(
        RefusalCode.INVALID, f"{request.model} has no prompt {request.prompt[:80]!r}; its prompts are: {names}"
    )


def _refuse(request: Embed, code: RefusalCode, message: str) -> PreparedEmbedding:
    return PreparedEmbedding(request, refused=Refused(code, message))
