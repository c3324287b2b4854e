"""Context limit of a profile: the maximum number of tokens of prompt and answer together."""

from router.dispatch.request import RequestSpec
from wire.refusals import RefusalCode, Refused


def refuse_beyond_limit(spec: RequestSpec, prompt_tokens: int | None) -> Refused | None:
    """Return the refusal of a request whose prompt exceeds the context limit of its profile; None if it fits.

    `prompt_tokens` is the exact number of prompt tokens; None if no node has counted them, which refuses nothing. The
    prompt must leave room for one token of the answer. More is not needed, because the node ends the answer at the
    limit, even if `max_tokens` allows more.
    """
    if not spec.context_limit or prompt_tokens is None or prompt_tokens < spec.context_limit:
        return None
    return Refused(
        RefusalCode.CONTEXT,
        f"the prompt has {prompt_tokens} tokens; the context limit of the profile {spec.profile} is "
        f"{spec.context_limit} with the answer: shorten the prompt",
    )
