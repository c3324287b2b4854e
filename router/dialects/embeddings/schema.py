"""Schema of the bodies of `/v1/embeddings`, `/api/embed` and `/api/embeddings`."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag

from router.admission.request_limits import MAX_INPUTS, MAX_NAME_CHARS, MAX_PROMPT_IDS, MAX_TOKENS
from router.dialects.shared.common_fields import KEEP, WHOLE, Named, StrictPart, Text, TokenIds, get_input_tag
from router.dialects.shared.field_table import FieldTable

_NODE = "the vectors of a model depend on its files only"
_USER = "requests are counted by API key"
HARMLESS: Mapping[str, str] = MappingProxyType({"user": _USER})
OLLAMA_HARMLESS: Mapping[str, str] = MappingProxyType({"keep_alive": KEEP, "options": _NODE})
NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType({})
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "input": f"a text, token ids, or up to {MAX_INPUTS} of either, none of them empty",
        "encoding_format": "float (default) or base64: numbers in single precision, little endian",
        "dimensions": "only for models whose files or family (Qwen3-Embedding) allow shorter vectors",
        "truncate": "true cuts a text that is longer than the model allows; otherwise it is refused",
        "prompt_name": "name of a prompt of the model that precedes each text, such as `query`",
    }
)
OLLAMA_INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "input": f"a text, or up to {MAX_INPUTS} texts; an empty one of them is read as a space; an empty text or list "
        "loads the model",
        "dimensions": INSTEAD["dimensions"],
        "truncate": "default true: a text that is longer than the model allows is cut",
        "model": "a `:latest` at the end is ignored",
    }
)

Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]
ManyIds = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_INPUTS)]

Input = Annotated[
    Annotated[Text, Tag("text_part")]
    | Annotated[Texts, Tag("texts_part")]
    | Annotated[TokenIds, Tag("ids_part")]
    | Annotated[ManyIds, Tag("many_part")],
    Discriminator(get_input_tag),
]
OllamaTexts = Annotated[list[str], Field(fail_fast=True, max_length=MAX_INPUTS)]
OllamaInput = Annotated[
    Annotated[str, Tag("text_part")] | Annotated[OllamaTexts, Tag("texts_part")],
    Discriminator(lambda value: "texts_part" if isinstance(value, list) else "text_part"),
]
Dimensions = Annotated[int, Field(ge=1, le=MAX_TOKENS), WHOLE]


class EmbeddingsBody(StrictPart):
    """Request body of `/v1/embeddings`."""

    model: Named
    input: Input
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Dimensions | None = None
    truncate: bool | None = None
    prompt_name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None


class OllamaEmbedBody(StrictPart):
    """Request body of `/api/embed`. An empty input only loads the model."""

    model: Named
    input: OllamaInput
    truncate: bool | None = None
    dimensions: Dimensions | None = None


class OllamaEmbeddingsBody(StrictPart):
    """Request body of `/api/embeddings`, the older route for one text. An empty prompt only loads the model."""

    model: Named
    prompt: str


EMBEDDINGS = FieldTable(EmbeddingsBody, HARMLESS, NEUTRAL, INSTEAD, MAX_PROMPT_IDS)
OLLAMA_EMBED = FieldTable(OllamaEmbedBody, OLLAMA_HARMLESS, NEUTRAL, OLLAMA_INSTEAD)
OLLAMA_EMBEDDINGS = FieldTable(OllamaEmbeddingsBody, OLLAMA_HARMLESS, NEUTRAL, OLLAMA_INSTEAD)
