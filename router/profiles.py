"""Profiles of the settings: request defaults that clients select with `MODEL:PROFILE`.

A profile has sampling defaults, chat template arguments and a context limit. A parameter of the request overrides the
profile's default.
"""

from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from router.admission.request_limits import MAX_TOKENS, MAX_TOP_K, TEMPLATE_VARIABLES
from wire.frames import GenerationParams

TemplateValue = bool | int | float | str
RESERVED = "latest"
"""Name that no profile may have, because Ollama clients append it to model names."""
PENALTIES = ("presence_penalty", "frequency_penalty", "repetition_penalty")
"""Fields of `GenerationParams` whose value does not show whether the request set them: see `set_penalties`."""
SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", *PENALTIES)
"""Sampling parameters that a profile may set."""


class ProfileSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """Section `router.profiles.NAME`: request defaults. A field that is None sets no default."""

    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOP_K)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    chat_template_kwargs: dict[str, TemplateValue] = msgspec.field(default_factory=dict[str, TemplateValue])
    """Chat template arguments, as `chat_template_kwargs` in the body of a chat request."""
    context_limit: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    """Maximum total tokens of prompt and answer; None for the context length of the model."""

    def apply_to_params(
        self, params: GenerationParams, set_penalties: frozenset[str], *, default_limit: bool
    ) -> GenerationParams:
        """Return a copy of `params` with the profile's defaults for parameters that the request does not set.

        `set_penalties` has the names of the penalties that the request sets. `default_limit` means that `max_tokens` is
        the dialect's default and not the client's value. The profile then overrides it.
        """
        defaults: dict[str, object] = {}
        for name in (*SAMPLING_DEFAULTS, "max_tokens"):
            value = getattr(self, name)
            is_set = name in set_penalties if name in PENALTIES else getattr(params, name) is not None
            if name == "max_tokens" and default_limit:
                is_set = False
            if value is not None and not is_set:
                defaults[name] = value
        return replace(params, **defaults)

    def apply_to_template(self, template: str) -> str:
        """Merge the profile's template variables into those of a request, and return them as JSON.

        `template` is the JSON object of the request, or empty if there is none. The request's value of a variable
        overrides the profile's value.
        """
        if not self.chat_template_kwargs:
            return template
        own: dict[str, object] = msgspec.json.decode(template) if template else {}
        return msgspec.json.encode({**self.chat_template_kwargs, **own}).decode()


def find_profile_fault(profiles: Mapping[str, ProfileSettings]) -> str:
    """Return the first fault in the profiles as one sentence, or an empty string if they are valid."""
    folded: dict[str, str] = {}
    for name, profile in profiles.items():
        if not name.strip() or ":" in name or name.casefold() == RESERVED:
            return f"a profile cannot have the name {name!r}"
        if name.casefold() in folded:
            return f"the profiles {folded[name.casefold()]} and {name} differ only in case"
        folded[name.casefold()] = name
        strange = sorted(profile.chat_template_kwargs.keys() - TEMPLATE_VARIABLES)
        if strange:
            return f"the profile {name} sets {strange[0]!r}, which is not a template variable that may be set"
        most, limit = profile.max_tokens, profile.context_limit
        if most is not None and limit is not None and most >= limit:
            return (
                f"the profile {name} has max_tokens {most}, which leaves no room for a prompt in context_limit {limit}"
            )
    return ""
