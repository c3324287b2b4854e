"""Schema of the bodies of `/v1/rerank` and `/v2/rerank`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

from pydantic import Discriminator, Field, Tag

from router.admission.request_limits import MAX_INPUTS, MAX_QUERY_CHARS, MAX_TOKENS
from router.dialects.shared.common_fields import WHOLE, Named, StrictPart, Text
from router.dialects.shared.field_table import FieldTable

DEFAULT_MAX_TOKENS = 4096
"""Default number of tokens after which `/v2/rerank` truncates a document, as in Cohere's API."""
_DOCUMENTS = f"1 to {MAX_INPUTS} documents, none of them empty: texts, or objects with a field text"
_TOP_N = "number of results; default: all documents"
NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType({"rank_fields": (None, ["text"])})
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "documents": _DOCUMENTS,
        "top_n": _TOP_N,
        "return_documents": "default true: each result has the text of its document",
        "truncate": "true cuts a document that is too long for the model; otherwise the request is refused",
        "max_tokens_per_doc": "cuts each document at this number of tokens",
        "rank_fields": "documents have the field text only",
    }
)
COHERE_IGNORED: Mapping[str, str] = MappingProxyType({"priority": "requests are ordered by API key and by length"})
COHERE_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "documents": _DOCUMENTS,
        "top_n": _TOP_N,
        "max_tokens_per_doc": f"cuts each document at this number of tokens; default {DEFAULT_MAX_TOKENS}",
    }
)


class DocumentPart(StrictPart):
    """Document given as an object with its text."""

    text: Text


Document = Annotated[
    Annotated[Text, Tag("text_part")] | Annotated[DocumentPart, Tag("document_part")],
    Discriminator(lambda value: "text_part" if isinstance(value, str) else "document_part"),
]
MaxTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE]


class RerankFields(StrictPart):
    """Common fields of the bodies of `/v1/rerank` and `/v2/rerank`."""

    model: Named
    query: Annotated[str, Field(min_length=1, max_length=MAX_QUERY_CHARS)]
    documents: Annotated[list[Document], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
    top_n: Annotated[int, Field(ge=1), WHOLE] | None = None
    max_tokens_per_doc: MaxTokens | None = None

    def list_texts(self) -> tuple[str, ...]:
        """Return the texts of the documents, in order."""
        return tuple(document if isinstance(document, str) else document.text for document in self.documents)


class RerankBody(RerankFields):
    """Request body of `/v1/rerank`."""

    return_documents: bool | None = None
    truncate: bool | None = None


class CohereRerankBody(RerankFields):
    """Request body of `/v2/rerank`."""


RERANK = FieldTable(RerankBody, {}, NEUTRAL, INSTEAD)
COHERE_RERANK = FieldTable(CohereRerankBody, COHERE_IGNORED, {}, COHERE_INSTEAD)
