"""Requests as they are sent, after their intake."""

import pytest
from msgspec.structs import replace

from router.dispatch.request import RequestSpec
from router.placement.candidate import ResourceDemand
from router.profiles import ProfileSettings
from tests.support.cluster.manual_pool import A, Cluster
from wire.frames import GenerationParams, Message

CHAT = RequestSpec(ResourceDemand("tiny", 100), "k", "r", (Message("user", "hi"),), GenerationParams(), 0, True)


@pytest.mark.parametrize(("seed", "sent"), [(7, 7), (0, 0), (None, 1 << 52)])
async def test_the_seed_of_a_client_is_kept_and_a_missing_one_is_drawn(one: Cluster, seed: int | None, sent: int):
    one.dispatcher.submit(replace(CHAT, params=GenerationParams(seed=seed)))
    assert one.generates()[-1][1].params.seed == sent
    one.finish()


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
