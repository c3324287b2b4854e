"""Schema of the body of `/v1/completions`, whose prompts have no roles and do not use the model's template."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

from pydantic import Discriminator, Field, Tag

from router.admission.request_limits import MAX_PROMPT_IDS, MAX_PROMPTS, MAX_TOP_LOGPROBS
from router.dialects.shared.common_fields import (
    OTHER_SERVERS,
    RANDOM_SEED_NOTE,
    SESSION_NOTE,
    WHOLE,
    Named,
    Text,
    TokenIds,
    TokenLimit,
    get_input_tag,
)
from router.dialects.shared.field_table import FieldTable
from router.dialects.shared.formats import FORMS, FormattedBody

HARMLESS: Mapping[str, str] = OTHER_SERVERS
NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType({"suffix": (None, "")})
INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        **FORMS,
        "prompt_cache_key": SESSION_NOTE,
        "user": SESSION_NOTE,
        "session_id": SESSION_NOTE,
        "chat_id": SESSION_NOTE,
        "repeat_penalty": "same as repetition_penalty",
        "suffix": "models here do not fill in the middle of a text: put the model's own FIM tokens into the prompt",
        "best_of": "only the value of n: all answers are returned",
        "echo": "only for a text prompt without logprobs: token ids are decoded only by the node, and the log "
        "probabilities of a prompt are not computed",
        "prompt": f"a text, token ids, or up to {MAX_PROMPTS} of either; choices are numbered prompt × n",
        "max_tokens": "default 16, as in OpenAI's API; -1: up to engine.mlx.max_tokens of the node",
        "max_completion_tokens": "overrides max_tokens",
        "seed": RANDOM_SEED_NOTE,
        "logprobs": f"0 to {MAX_TOP_LOGPROBS} alternatives",
    }
)

Texts = Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]
ManyIds = Annotated[list[TokenIds], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS)]

Prompt = Annotated[
    Annotated[Text, Tag("text_part")]
    | Annotated[Texts, Tag("texts_part")]
    | Annotated[TokenIds, Tag("ids_part")]
    | Annotated[ManyIds, Tag("many_part")],
    Discriminator(get_input_tag),
]


class CompletionBody(FormattedBody):
    """Request body of `/v1/completions`."""

    model: Named
    prompt: Prompt
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    best_of: Annotated[int, WHOLE] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS), WHOLE] | None = None


COMPLETION = FieldTable(CompletionBody, HARMLESS, NEUTRAL, INSTEAD, MAX_PROMPT_IDS)
