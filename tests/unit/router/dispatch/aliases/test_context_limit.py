"""Requests at the context limit of a profile."""

import pytest

from router.dispatch.aliases.context_limit import refuse_beyond_limit
from router.dispatch.request import RequestSpec
from router.placement.candidate import ResourceDemand
from wire.frames import GenerationParams
from wire.refusals import RefusalCode


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "limit", "fits"),
    [
        (39, None, 40, True),
        (40, None, 40, False),
        (39, 10, 40, True),
        (40, 10, 40, False),
        (None, 50, 40, True),
        (10**6, 10**6, 0, True),
    ],
)
def test_a_prompt_leaves_room_for_a_token_in_the_limit(
    prompt: int | None, max_tokens: int | None, limit: int, fits: bool
):
    params = GenerationParams(max_tokens=max_tokens)
    spec = RequestSpec(ResourceDemand("tiny"), "k", "r", (), params, 0, True, profile="short", context_limit=limit)
    refused = refuse_beyond_limit(spec, prompt)
    assert (refused is None) is fits
    if refused is not None:
        assert refused.code is RefusalCode.CONTEXT
        assert refused.message.startswith(f"the prompt has {prompt} tokens; the context limit of the profile short is")
