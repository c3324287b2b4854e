"""Tokenization of texts for embeddings without a model: cut texts, prompts, and refusals with their reasons."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import tokenizers
from tokenizers import models as tokenizer_models
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from node.engine.embedding.pairs import EncoderPairs, PromptPairs
from node.engine.embedding.preparer import EmbeddingPreparer, tokenize_text
from node.engine.process.interface import CallRecording
from node.engine.requests.prepared import PreparedEmbedding
from node.engine.requests.preparer import RequestPreparer
from node.engine.text import tokenizer_loader
from node.engine.text.tokenizer import Tokenizer
from node.engine.text.tokenizer_errors import TemplateFailed, TooLong
from node.models.catalogue import ModelCatalogue
from node.models.embedding_layout import AnswerTokens, EmbeddingLayout, EncoderShape
from tests.support.engine import vocabulary
from wire.frames import Embed
from wire.models.kind import ModelKind
from wire.refusals import RefusalCode, Refused

MOST = 8
BEGIN, END = 1, 2


class Letters:
    """A tokenizer with a token for each letter, and tokens that it adds around every plain text."""

    def __init__(self, before: tuple[int, ...] = (BEGIN,), after: tuple[int, ...] = (END,)) -> None:
        self._before, self._after = before, after
        self.limits: list[int] = []

    def encode(self, text: str, *, plain: bool, max_tokens: int = 0) -> tuple[int, ...]:
        self.limits.append(max_tokens)
        ids = tuple(map(ord, text))
        return (*self._before, *ids, *self._after) if plain else ids


def letters(*ids: int) -> str:
    """Return tokens as letters, with the added tokens as `<` and `>`."""
    return "".join({BEGIN: "<", END: ">"}.get(token, chr(token)) for token in ids)


# texts


@pytest.mark.parametrize(
    ("before", "after", "most", "cut"),
    [
        ((BEGIN,), (END,), 8, "<abcdef>"),
        ((BEGIN,), (END,), 7, "<abcde>"),
        ((BEGIN,), (END,), 3, "<a>"),
        ((BEGIN,), (END,), 2, "<>"),
        ((BEGIN,), (END,), 1, "<"),
        ((BEGIN,), (), 5, "<abcd"),
        ((), (END,), 5, "abcd>"),
        ((), (), 5, "abcde"),
        ((BEGIN, BEGIN), (END,), 5, "<<ab>"),
    ],
)
def test_the_end_of_a_text_is_cut_and_the_added_tokens_stay(
    before: tuple[int, ...], after: tuple[int, ...], most: int, cut: str
):
    tokenizer = Letters(before, after)
    assert letters(*tokenize_text(cast("Tokenizer", tokenizer), "abcdef", most, truncate=True)) == cut
    assert set(tokenizer.limits) == {0}, "a text that is cut may be of any length"


def test_a_text_that_is_not_cut_is_whole():
    tokenizer = Letters()
    assert letters(*tokenize_text(cast("Tokenizer", tokenizer), "abcdef", 3, truncate=False)) == "<abcdef>"
    assert tokenizer.limits == [3]


# requests


class Models:
    """The models and tokenizers of a node: one model, with its tokenizer or a failure."""

    def __init__(self, layout: EmbeddingLayout | None, tokenizer: object) -> None:
        self._layout, self._tokenizer = layout, tokenizer
        self.asked: list[tuple[str, ModelKind]] = []
        self.recorded: list[tuple[str, int]] = []
        self.recording = False

    def find(self, name: str) -> object:
        return None if self._layout is None else SimpleNamespace(name=name, layout=self._layout)

    def find_tokenizer(self, name: str, kind: ModelKind) -> object:
        assert self.recording
        self.asked.append((name, kind))
        if isinstance(self._tokenizer, Exception):
            raise self._tokenizer
        return self._tokenizer

    @contextmanager
    def record_tokenization(self, model: str, request: int) -> Iterator[None]:
        self.recorded.append((model, request))
        self.recording = True
        yield
        self.recording = False


def prepare(
    models: Models | None = None, *texts: str, ids: tuple[tuple[int, ...], ...] = (), **fields: Any
) -> PreparedEmbedding:
    models = models or Models(EmbeddingLayout(), Letters())
    preparer = EmbeddingPreparer(
        cast("ModelCatalogue", models),
        cast("RequestPreparer", models),
        lambda found: MOST if found.name == "m" else 0,
        cast("CallRecording", models),
    )
    return preparer.prepare(Embed(5, 1, "r", "m", texts, ids, **fields))


def test_texts_are_tokenized_with_the_prompt_and_recorded():
    prompts = {"query": "Q:", "document": "D:"}
    models = Models(EmbeddingLayout(prompts=prompts, default_prompt="document"), Letters())
    prepared = prepare(models, "ab", "c", ids=((7, 8),))
    assert prepared.refused is None
    assert [letters(*ids) for ids in prepared.inputs] == ["\x07\x08", "<D:ab>", "<D:c>"]
    assert (prepared.segments, models.asked, models.recorded) == ((), [("m", ModelKind.EMBED)], [("m", 5)])
    assert not models.recording
    (ids,) = prepare(models, "ab", prompt="query").inputs
    assert letters(*ids) == "<Q:ab>"


def test_texts_and_ids_are_cut_on_request_only():
    prepared = prepare(None, "abcdefgh", ids=(tuple(range(10, 20)),), truncate=True)
    assert [letters(*ids) for ids in prepared.inputs] == [letters(*range(10, 18)), "<abcdef>"]
    assert prepare(None, "abcdef").refused is None, "the longest text"


@pytest.mark.parametrize(
    ("texts", "ids", "fields", "code", "words"),
    [
        ((), (), {}, RefusalCode.INVALID, "the request has no text: send at least one"),
        (("a",), ((),), {}, RefusalCode.INVALID, "input 0 has no tokens: send a text"),
        (
            ("a", "abcdefg"),
            (),
            {},
            RefusalCode.CONTEXT,
            "input 1 has 9 tokens, the longest text for m has 8: shorten the text, or set truncate",
        ),
        (
            ("a",),
            (),
            {"prompt": "p" * 100},
            RefusalCode.INVALID,
            f"m has no prompt '{'p' * 80}'; its prompts are: document, query",
        ),
    ],
)
def test_an_improper_request_is_refused_with_the_reason(
    texts: tuple[str, ...], ids: tuple[tuple[int, ...], ...], fields: dict[str, Any], code: RefusalCode, words: str
):
    models = Models(EmbeddingLayout(prompts={"query": "", "document": ""}), Letters())
    assert prepare(models, *texts, ids=ids, **fields).refused == Refused(code, words)


def test_a_model_without_prompts_has_none():
    refused = prepare(None, "a", prompt="query").refused
    assert refused == Refused(RefusalCode.INVALID, "m has no prompt 'query'; its prompts are: none")


@pytest.mark.parametrize(
    ("failure", "code", "words"),
    [
        (Refused(RefusalCode.NO_MODEL, "no tokenizer"), RefusalCode.NO_MODEL, "no tokenizer"),
        (TemplateFailed("no template"), RefusalCode.TEMPLATE, "no template"),
        (ValueError("secret"), RefusalCode.TEMPLATE, "a text could not be tokenized: ValueError"),
        (
            TooLong("a text is too long"),
            RefusalCode.CONTEXT,
            "a text is too long; the longest text for m has 8: shorten the text, or set truncate",
        ),
    ],
)
def test_a_failure_of_the_tokenizer_refuses_the_request(failure: object, code: RefusalCode, words: str):
    models = Models(EmbeddingLayout(), failure)
    assert prepare(models, "a", query="q").refused == Refused(code, words)
    assert models.asked == [("m", ModelKind.RERANK)]


def test_a_model_that_is_gone_is_refused():
    refused = prepare(Models(None, Letters()), "a").refused
    assert refused == Refused(RefusalCode.NO_MODEL, "this node has no model m")
    refused = prepare(Models(None, TooLong("too long")), "a").refused
    assert refused is not None
    assert "has 0: shorten" in refused.message


# pairs of a query and a document


def make_pairs(most: int, **fields: Any) -> tuple[PromptPairs, str, str]:
    """Return the pairs of a request with the query `q`, and the texts before and after a document."""
    request = Embed(5, 1, "r", "m", ("a",), query="q", **fields)
    tokenizer = cast("Tokenizer", Letters())
    answers = AnswerTokens(1, 0, has_template=False)
    whole = letters(*PromptPairs(tokenizer, answers, request, 10**6).tokenize("DOCUMENT").ids)
    head, _, tail = whole.partition("DOCUMENT")
    return PromptPairs(tokenizer, answers, request, most), head, tail


def test_a_document_is_between_the_query_and_the_end_of_the_prompt():
    pairs, head, tail = make_pairs(10**6)
    assert head.endswith("<Query>: q\n<Document>: ")
    assert tail.startswith("<|im_end|>")
    assert letters(*pairs.tokenize("abc").ids) == f"{head}abc{tail}"


@pytest.mark.parametrize(
    ("spare", "fields", "cut"),
    [
        (3, {}, "abcdef"),
        (3, {"truncate": True}, "abc"),
        (9, {"truncate": True}, "abcdef"),
        (9, {"max_tokens": 2}, "ab"),
        (3, {"max_tokens": 4}, "abcd"),
        (3, {"max_tokens": 4, "truncate": True}, "abc"),
        (3, {"max_tokens": 2, "truncate": True}, "ab"),
        (1, {"truncate": True}, "a"),
    ],
)
def test_a_document_is_cut_to_its_maximum_and_to_the_room(spare: int, fields: dict[str, Any], cut: str):
    _, head, tail = make_pairs(0)
    pairs, _, _ = make_pairs(len(head) + len(tail) + spare, **fields)
    assert letters(*pairs.tokenize("abcdef").ids) == f"{head}{cut}{tail}"


def test_a_query_without_room_for_a_document_is_too_long():
    _, head, tail = make_pairs(0)
    size = len(head) + len(tail)
    with pytest.raises(TooLong, match=f"the query has {size} tokens with the prompt of the model"):
        make_pairs(size, truncate=True)[0].tokenize("a")


def test_the_template_of_a_model_renders_query_and_document(tmp_path: Path):
    template = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}!"
    folder = vocabulary.configure(vocabulary.byte_level(tmp_path / "a"), chat_template=template)
    request, answers = Embed(5, 1, "r", "m", ("a",), query="what"), AnswerTokens(1, 0, has_template=True)
    tokenizer = tokenizer_loader.load(folder)
    ids = PromptPairs(tokenizer, answers, request, 100).tokenize("this").ids
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"[query]what[document]this!"
    folder = vocabulary.configure(vocabulary.byte_level(tmp_path / "b"), chat_template="{{ messages[0].content }}")
    with pytest.raises(TemplateFailed, match="the chat template leaves out the document"):
        PromptPairs(tokenizer_loader.load(folder), answers, request, 100)


@pytest.fixture(scope="module")
def encoder() -> Tokenizer:
    """Return a tokenizer with a token for each of the words 0 to 9, and [CLS] 10 and [SEP] 11 around the texts."""
    words = {str(number): number for number in range(10)} | {"[CLS]": 10, "[SEP]": 11}
    rust = tokenizers.Tokenizer(tokenizer_models.WordLevel(words))
    rust.pre_tokenizer = Whitespace()
    rust.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 10), ("[SEP]", 11)],
    )
    return cast("Tokenizer", SimpleNamespace(rust=rust))


@pytest.mark.parametrize(
    ("most", "fields", "ids"),
    [
        (20, {}, (10, 1, 2, 11, 3, 4, 5, 6, 11)),
        (5, {}, (10, 1, 2, 11, 3, 4, 5, 6, 11)),
        (20, {"truncate": True}, (10, 1, 2, 11, 3, 4, 5, 6, 11)),
        (9, {"truncate": True}, (10, 1, 2, 11, 3, 4, 5, 6, 11)),
        (7, {"truncate": True}, (10, 1, 2, 11, 3, 4, 11)),
        (6, {"truncate": True}, (10, 1, 2, 11, 3, 11)),
        (5, {"max_tokens": 3}, (10, 1, 2, 11, 3, 4, 5, 11)),
        (5, {"max_tokens": 9}, (10, 1, 2, 11, 3, 4, 5, 6, 11)),
        (20, {"max_tokens": 1, "truncate": True}, (10, 1, 2, 11, 3, 11)),
        (7, {"max_tokens": 3, "truncate": True}, (10, 1, 2, 11, 3, 4, 11)),
    ],
)
def test_a_pair_is_cut_at_the_end_of_its_document(
    encoder: Tokenizer, most: int, fields: dict[str, Any], ids: tuple[int, ...]
):
    pairs = EncoderPairs(encoder, Embed(5, 1, "r", "m", ("a",), query="1 2", **fields), most)
    assert pairs.tokenize("3 4 5 6") == (ids, 4)


def test_a_query_without_room_for_a_token_of_the_document_is_too_long(encoder: Tokenizer):
    pairs = EncoderPairs(encoder, Embed(5, 1, "r", "m", ("a",), query="1 2", truncate=True), 5)
    with pytest.raises(TooLong, match="the query has 5 tokens"):
        pairs.tokenize("3 4")
    whole = EncoderPairs(encoder, Embed(5, 1, "r", "m", ("a",), query="1 2"), 5)
    assert whole.tokenize("").ids == (10, 1, 2, 11, 11)


def test_a_tokenizer_that_joins_no_pairs_is_refused():
    slow = cast("Tokenizer", SimpleNamespace(rust=None))
    with pytest.raises(TemplateFailed, match=r"its folder needs a tokenizer\.json"):
        EncoderPairs(slow, Embed(5, 1, "r", "m", ("a",), query="1"), 5)


def test_a_request_for_scores_has_pairs_and_those_of_an_encoder_their_segments(encoder: Tokenizer):
    layout = EmbeddingLayout(encoder=cast("EncoderShape", object()))
    prepared = prepare(Models(layout, encoder), "3", "4 5", query="1 2")
    assert prepared.inputs == ((10, 1, 2, 11, 3, 11), (10, 1, 2, 11, 4, 5, 11))
    assert prepared.segments == (4, 4)
    answers = EmbeddingLayout(answers=AnswerTokens(1, 0, has_template=False))
    refused = prepare(Models(answers, Letters()), "a", query="q").refused
    assert refused is not None
    assert refused.message.startswith("the query has ")
