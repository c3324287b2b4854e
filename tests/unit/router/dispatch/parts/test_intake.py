"""Requests as they are sent, after their intake."""

import pytest
from msgspec.structs import replace

from router.dispatch.request import RequestSpec
from router.placement.candidate import ResourceDemand
from router.profiles import ProfileSettings
from tests.support.cluster.manual_pool import A, Cluster
from wire.frames import NO_REPETITION_PENALTY, GenerationParams, Message

CHAT = RequestSpec(ResourceDemand("tiny", 100), "k", "r", (Message("user", "hi"),), GenerationParams(), 0, True)


@pytest.mark.parametrize(("seed", "sent"), [(7, 7), (0, 0), (None, 1 << 52)])
async def test_the_seed_of_a_client_is_kept_and_a_missing_one_is_drawn(one: Cluster, seed: int | None, sent: int):
    one.dispatcher.submit(replace(CHAT, params=GenerationParams(seed=seed)))
    assert one.generates()[-1][1].params.seed == sent
    one.finish()


@pytest.mark.parametrize(
    ("penalty", "is_set", "of_profile", "sent"),
    [
        (1.0, False, None, 1.0),
        (1.0, True, None, NO_REPETITION_PENALTY),
        (1.0, True, 1.2, NO_REPETITION_PENALTY),
        (1.0, False, 1.0, NO_REPETITION_PENALTY),
        (1.1, True, None, 1.1),
    ],
)
async def test_a_penalty_that_is_set_to_1_turns_that_of_the_model_off(
    penalty: float, is_set: bool, of_profile: float | None, sent: float
):
    cluster = Cluster(A, profiles={"brief": ProfileSettings(repetition_penalty=of_profile)})
    model = "tiny" if of_profile is None else "tiny:brief"
    names = frozenset({"repetition_penalty"} if is_set else ())
    params = GenerationParams(repetition_penalty=penalty)
    cluster.dispatcher.submit(replace(CHAT, demand=ResourceDemand(model, 100), params=params, set_penalties=names))
    assert cluster.generates()[-1][1].params.repetition_penalty == sent
    cluster.dispatcher.shutdown()
    cluster.settled()


@pytest.mark.parametrize(
    ("spec", "template"),
    [
        (CHAT, '{"enable_thinking":false}'),
        (replace(CHAT, messages=(), text="once"), ""),
        (replace(CHAT, messages=(), ids=(1, 2)), ""),
    ],
)
async def test_the_template_of_a_profile_is_for_conversations_only(spec: RequestSpec, template: str):
    profile = ProfileSettings(max_tokens=9, chat_template_kwargs={"enable_thinking": False})
    cluster = Cluster(A, profiles={"brief": profile})
    cluster.dispatcher.submit(replace(spec, demand=ResourceDemand("tiny:brief", 100)))
    frame = cluster.generates()[-1][1]
    assert (frame.model, frame.params.max_tokens, frame.template) == ("tiny", 9, template)
    cluster.dispatcher.shutdown()
    cluster.settled()
