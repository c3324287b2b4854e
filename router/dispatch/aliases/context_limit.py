"""Context limit of a profile: the maximum number of tokens of prompt and answer together."""

from router.dispatch.request import RequestSpec
from wire.refusals import RefusalCode, Refused


def refuse_beyond_limit(spec: RequestSpec, prompt_tokens: int | None) -> Refused | None:
    """Return the refusal of a request beyond the context limit of its profile; None within it.

    `prompt_tokens` is the exact number of prompt tokens; None if no node has counted them. The answer needs room for
    one token, because the node ends it at the limit, also if `max_tokens` is higher.
    """
    if not spec.context_limit or prompt_tokens is None or prompt_tokens < spec.context_limit:
        return None
    return Refused(
        RefusalCode.CONTEXT,
        f"the prompt has {prompt_tokens} tokens; the context limit of the profile {spec.profile} is "
        f"{spec.context_limit} with the answer: shorten the prompt",
    )
