"""Read from the files of a model how it computes the score of a document for a query. No code is run.

A cross-encoder computes scores with a classifier (`encoder_files`).

A decoder answers yes or no. sentence-transformers stores the token of yes, and usually that of no, in `1_LogitScore`.
The prompt is a chat template with the roles `query` and `document`. The published files of Qwen3-Reranker have neither.
Macpool therefore contains its tokens and its prompt (https://huggingface.co/Qwen/Qwen3-Reranker-0.6B).
"""

from pathlib import Path
from typing import cast

from node.models.embedding_files import EmbeddingFilesError, read_max_tokens, read_object
from node.models.embedding_layout import AnswerTokens, EmbeddingLayout, EncoderShape, Pooling
from node.models.encoder_files import is_cross_encoder, read_classifier_pooling
from node.models.template_files import read_template
from node.models.weight_files import Config

LOGIT_SCORE = "1_LogitScore/config.json"
"""File with the two tokens of a score."""
QWEN = "qwen3-reranker"
"""Lower-case part of the names of a family of rerankers. Their files do not define the score."""
_QWEN_TYPE = "qwen3"
_QWEN_TOKENS = (9693, 2152)
"""Tokens `yes` and `no` of Qwen3."""
DECODERS = frozenset({"qwen2", "qwen3", "llama", "mistral"})
"""Values of `model_type` of decoders whose logits are simply the product of the last state and the output layer."""


def is_reranker(folder: Path, name: str, config: Config) -> bool:
    """Return whether a model scores documents: by its files, or by the name of a known family."""
    known = QWEN in name.lower() and config.get("model_type") == _QWEN_TYPE
    return known or is_cross_encoder(config) or (folder / LOGIT_SCORE).exists()


def read_rerank_layout(folder: Path, config: Config, encoder: EncoderShape | None = None) -> EmbeddingLayout:
    """Read from the files in the folder of a model how it scores documents.

    `config` is the parsed config.json. `encoder` is the shape of an encoder; None for any other model. Raise
    `EmbeddingFilesError` for files that Macpool does not support, `OSError` for unreadable ones.
    """
    kind = str(config.get("model_type"))
    if encoder is not None:
        if not encoder.has_classifier:
            raise EmbeddingFilesError("have no classifier, which a score of an encoder needs")
        return EmbeddingLayout(
            poolings=(read_classifier_pooling(config),),
            normalize=False,
            max_tokens=read_max_tokens(folder),
            encoder=encoder,
        )
    if kind not in DECODERS:
        raise EmbeddingFilesError(f"are those of the type {kind[:80]}: known are {', '.join(sorted(DECODERS))}")
    return EmbeddingLayout(
        poolings=(Pooling.LAST,),
        normalize=False,
        max_tokens=read_max_tokens(folder),
        answers=_read_answers(folder, kind),
    )


def _read_answers(folder: Path, kind: str) -> AnswerTokens:
    """Return the tokens of a score by the files, or those of Qwen3-Reranker without files."""
    has_template = _has_template(folder)
    if (folder / LOGIT_SCORE).exists():
        config = read_object(folder, LOGIT_SCORE)
        true, false = config.get("true_token_id"), config.get("false_token_id")
        if not _is_token(true) or not (false is None or _is_token(false)):
            raise EmbeddingFilesError(f"have no token ids in {LOGIT_SCORE}: true_token_id is {str(true)[:40]}")
    else:
        true, false = _QWEN_TOKENS
    if not has_template and kind != _QWEN_TYPE:
        raise EmbeddingFilesError("have no chat template with the roles query and document")
    return AnswerTokens(cast("int", true), cast("int | None", false), has_template)


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _has_template(folder: Path) -> bool:
    """Return whether the chat template has roles for a query and a document."""
    text = read_template(folder)
    return all(f'"{role}"' in text or f"'{role}'" in text for role in ("query", "document"))
