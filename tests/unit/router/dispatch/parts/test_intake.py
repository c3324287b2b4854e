"""Requests as they are sent, after their intake."""

import pytest
from msgspec.structs import replace

from router.dispatch.request import RequestSpec
from router.placement.candidate import ResourceDemand
from router.profiles import ProfileSettings
from tests.support.cluster.manual_pool import A, Cluster
from wire.frames import NO_REPETITION_PENALTY, Admitted, GenerationParams, Message

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


@pytest.mark.parametrize(("default_limit", "sent"), [(True, 9), (False, 16)])
async def test_a_profile_replaces_the_limit_of_the_dialect_but_not_that_of_the_client(default_limit: bool, sent: int):
    cluster = Cluster(A, profiles={"brief": ProfileSettings(max_tokens=9)})
    demand = ResourceDemand("tiny:brief", 100, max_tokens=16)
    params = GenerationParams(max_tokens=16)
    cluster.dispatcher.submit(replace(CHAT, demand=demand, params=params, default_limit=default_limit))
    frame = cluster.generates()[-1][1]
    assert (frame.params.max_tokens, frame.expected) == (sent, sent)
    cluster.dispatcher.shutdown()
    cluster.settled()


LONG = replace(CHAT, demand=ResourceDemand("tiny", 8000), messages=(Message("user", "x" * 8000),))


@pytest.mark.parametrize(
    ("spec", "shares"),
    [
        (LONG, True),
        (replace(LONG, tools="[1]"), False),
        (replace(LONG, template='{"think":true}'), False),
        (replace(LONG, key="other"), False),
    ],
)
async def test_only_the_same_prompt_of_the_same_key_is_cached(two: Cluster, spec: RequestSpec, shares: bool):
    first = two.dispatcher.submit(LONG)
    where, _ = two.last()
    two.say(lambda number: Admitted(number, 2000, 0, b"hash"))
    two.finish()
    second = two.dispatcher.submit(spec)
    assert dict(second.cached_shares) == ({where: 1.0} if shares else {})
    for request in (first, second):
        two.dispatcher.close(request)


async def test_a_session_is_remembered_for_a_short_prompt_and_not_for_one_of_token_ids(two: Cluster):
    first = two.dispatcher.submit(replace(CHAT, session="s"))
    where, _ = two.last()
    two.say(lambda number: Admitted(number, 25, 0, b"hash"))
    two.finish()
    others = (replace(CHAT, session="s", messages=(Message("user", "ho"),)), replace(CHAT, session="t"))
    ids = replace(CHAT, messages=(), ids=(1, 2), session="s")
    again, short, of_ids = (two.dispatcher.submit(spec) for spec in (*others, ids))
    assert [dict(request.cached_shares) for request in (again, short, of_ids)] == [{where: 1.0}, {where: 1.0}, {}]
    for request in (first, again, short, of_ids):
        two.dispatcher.close(request)


async def test_the_text_of_a_completion_is_found_in_the_cache_of_its_node(two: Cluster):
    first = replace(LONG, messages=(), text="x" * 8000)
    requests = [two.dispatcher.submit(first)]
    where, _ = two.last()
    two.say(lambda number: Admitted(number, 2000, 0, b"hash"))
    two.finish()
    for text, shares in (("x" * 8000, {where: 1.0}), ("y" * 8000, {})):
        requests.append(two.dispatcher.submit(replace(first, text=text)))
        assert dict(requests[-1].cached_shares) == shares
    for request in requests:
        two.dispatcher.close(request)
