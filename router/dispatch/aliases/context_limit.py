"""Context limit of a profile: the maximum number of tokens of prompt and answer together."""

from router.dispatch.request import RequestSpec
from wire.refusals import RefusalCode, Refused


def refuse_beyond_limit(spec: RequestSpec, prompt_tokens: int | None) -> Refused | None:
    """Return the refusal of a request beyond the context limit of its profile; None within it.

    `prompt_tokens` is the exact number of prompt tokens; None if no node has counted them. An answer without
    `max_tokens` needs room for one token, because the node ends the answer at the limit.
    """
    answer = spec.params.max_tokens or 1
    if not spec.context_limit or prompt_tokens is None or prompt_tokens + answer <= spec.context_limit:
        return None
    return Refused(
        RefusalCode.CONTEXT,
        f"the prompt has {prompt_tokens} tokens and the answer up to {answer}, together {prompt_tokens + answer}; the "
        f"context limit of the profile {spec.profile} is {spec.context_limit}: shorten the prompt or lower max_tokens",
    )
