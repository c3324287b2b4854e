"""Counts of prompts: the choice of the node, and a node that cannot answer."""

import asyncio

import pytest
from msgspec.structs import replace

from router.admission.rate_limits import KeyLimits
from router.dispatch import count_tokens
from router.dispatch.count_tokens import count_prompt_tokens
from router.dispatch.node_commands import MAX_COUNTS_PER_KEY
from router.errors import Problem
from router.profiles import ProfileSettings
from router.settings import RouterSettings
from tests.support.cluster.loopback_cluster import LoopbackCluster, LoopbackNode, a_model
from tests.support.cluster.manual_pool import turn
from wire.capacity.fairness import WeightedKey
from wire.frames import CountTokens, Frame, Message
from wire.identity import NodeId
from wire.refusals import RefusalCode, Refused

ASKED = CountTokens(0, "tiny", (Message("user", "x" * 40),), 0)


def counted(node: LoopbackNode) -> int:
    return sum(isinstance(frame, CountTokens) for frame in node.heard)


async def test_count_prefers_a_node_with_the_model_loaded():
    cold = LoopbackNode("a", models=(a_model(loaded=False),))
    warm = LoopbackNode("b")
    cluster = LoopbackCluster(cold, warm)
    assert await count_prompt_tokens(cluster.dispatcher, ASKED, "k") == 11
    assert (counted(cold), counted(warm)) == (0, 1)


async def test_count_prefers_the_node_with_fewer_requests():
    busy, idle = LoopbackNode("a"), LoopbackNode("b")
    cluster = LoopbackCluster(busy, idle)
    cluster.dispatcher.ledger.reserve(busy.id, 1, 1, 1)
    assert await count_prompt_tokens(cluster.dispatcher, ASKED, "k") == 11
    assert (counted(busy), counted(idle)) == (0, 1)


async def test_a_node_that_cannot_load_it_is_followed_by_the_next():
    broken = LoopbackNode("a", refusal=Refused(RefusalCode.LOAD_FAILED, "its files are broken"))
    cold = LoopbackNode("b", models=(a_model(loaded=False),))
    cluster = LoopbackCluster(broken, cold)
    assert await count_prompt_tokens(cluster.dispatcher, ASKED, "k") == 11
    assert (counted(broken), counted(cold)) == (1, 1)


async def test_count_of_an_invalid_prompt_is_tried_once():
    nodes = [LoopbackNode(name, refusal=Refused(RefusalCode.TEMPLATE, "no such role")) for name in ("a", "b")]
    found = await count_prompt_tokens(LoopbackCluster(*nodes).dispatcher, ASKED, "k")
    assert isinstance(found, Problem)
    assert (found.status, found.code) == (400, "template_failed")
    assert sum(map(counted, nodes)) == 1


@pytest.mark.parametrize(
    ("code", "asked"),
    [(RefusalCode.OVER_SHARE, 1), (RefusalCode.INVALID, 1), (RefusalCode.NO_ROOM, 2), (RefusalCode.NO_MODEL, 2)],
)
async def test_only_a_refusal_of_a_single_node_is_followed_by_the_next_node(code: RefusalCode, asked: int):
    nodes = [LoopbackNode(name, refusal=Refused(code, "no")) for name in ("a", "b")]
    found = await count_prompt_tokens(LoopbackCluster(*nodes).dispatcher, ASKED, "k")
    assert isinstance(found, Problem)
    assert (found.code, sum(map(counted, nodes))) == (code.value, asked)


async def test_a_count_has_the_weight_of_its_key_and_a_refusal_names_the_first_node():
    node = LoopbackNode("a")
    cluster = LoopbackCluster(node)
    cluster.limits = {"k": KeyLimits(priority="high")}.get
    assert await count_prompt_tokens(cluster.dispatcher, ASKED, "k") == 11
    (frame,) = (frame for frame in node.heard if isinstance(frame, CountTokens))
    assert frame.weighted_key == WeightedKey("k", 16)
    lost = LoopbackCluster(LoopbackNode("first", state="lost"), LoopbackNode("second", state="asleep"))
    found = await count_prompt_tokens(lost.dispatcher, ASKED, "k")
    assert isinstance(found, Problem)
    assert found.message.startswith("first is lost")


async def test_count_skips_cordoned_and_lost_nodes():
    node = LoopbackNode("a", state="lost")
    found = await count_prompt_tokens(LoopbackCluster(node).dispatcher, ASKED, "k")
    assert isinstance(found, Problem)
    assert (found.status, found.retry_after) == (503, 2.0)
    assert counted(node) == 0


async def test_a_model_that_no_node_has_is_a_404():
    cluster = LoopbackCluster(LoopbackNode("a", models=(a_model(loaded=False, cause="no"),)))
    found = await count_prompt_tokens(cluster.dispatcher, ASKED, "k")
    assert isinstance(found, Problem)
    assert (found.status, found.code) == (404, "model_not_found")


async def test_an_unknown_profile_is_refused_before_the_quota():
    node = LoopbackNode("a")
    settings = RouterSettings(profiles={"brief": ProfileSettings(max_tokens=9)})
    cluster = LoopbackCluster(node, settings=settings)
    cluster.limits = {"k": KeyLimits(requests_per_minute=1)}.get
    for _ in range(2):
        found = await count_prompt_tokens(cluster.dispatcher, replace(ASKED, model="tiny:long"), "k")
        assert isinstance(found, Problem)
        assert (found.status, found.code) == (404, "model_not_found")
        assert found.message == "there is no profile 'long' for tiny; the profiles are brief"
    assert await count_prompt_tokens(cluster.dispatcher, replace(ASKED, model="tiny:brief"), "k") == 11


async def test_unknown_model_is_refused_with_similar_names_as_a_chat():
    cluster = LoopbackCluster(LoopbackNode("a"))
    for limits, ending in ((KeyLimits(), "; the nearest names are tiny"), (KeyLimits(models=("tinx",)), "")):
        cluster.limits = {"k": limits}.get
        found = await count_prompt_tokens(cluster.dispatcher, replace(ASKED, model="tinx"), "k")
        assert isinstance(found, Problem)
        assert (found.status, found.code) == (404, "model_not_found")
        assert found.message == f"no node serves the model 'tinx'{ending}"


async def test_model_that_computes_vectors_is_refused_as_by_a_chat():
    node = LoopbackNode("a", models=(a_model(features=("embed",)),))
    found = await count_prompt_tokens(LoopbackCluster(node).dispatcher, ASKED, "k")
    assert isinstance(found, Problem)
    assert (found.status, found.code) == (400, RefusalCode.UNSUPPORTED.value)
    assert found.message == "the model tiny computes embeddings only: use /v1/embeddings, or another model"
    assert counted(node) == 0


class Lost(LoopbackCluster):
    """Every node is lost when it gets a frame."""

    def send(self, node_id: NodeId, frame: Frame) -> bool:
        self.dispatcher.handle_lost_node(node_id, "cut")
        return True


class Silent(LoopbackCluster):
    """No node answers."""

    def send(self, node_id: NodeId, frame: Frame) -> bool:
        return True


async def test_a_node_that_is_lost_while_it_counts_is_a_failure():
    cluster = Lost(LoopbackNode("a"))
    found = await count_prompt_tokens(cluster.dispatcher, ASKED, "k")
    assert isinstance(found, Problem)
    assert (found.status, found.code) == (502, "node_lost")


async def test_count_is_sent_with_the_key():
    node = LoopbackNode("a")
    await count_prompt_tokens(LoopbackCluster(node).dispatcher, ASKED, "k")
    assert [frame.weighted_key.name for frame in node.heard if isinstance(frame, CountTokens)] == ["k"]


async def test_one_key_does_not_take_all_counts():
    node = LoopbackNode("a")
    cluster = Silent(node)
    counts = [
        asyncio.ensure_future(count_prompt_tokens(cluster.dispatcher, ASKED, "k"))
        for _ in range(MAX_COUNTS_PER_KEY + 1)
    ]
    other = asyncio.ensure_future(count_prompt_tokens(cluster.dispatcher, ASKED, "other"))
    await asyncio.sleep(0.01)
    found = [one.result() for one in counts if one.done()]
    assert [(one.status, one.code) for one in found if isinstance(one, Problem)] == [(429, "over_share")]
    assert not other.done()
    cluster.dispatcher.handle_lost_node(node.id, "cut")
    await asyncio.gather(*counts, other)
    assert cluster.dispatcher.quotas.count_open("k") == 0


async def test_a_count_is_charged_its_prompt_only_and_refunded():
    cluster = LoopbackCluster(LoopbackNode("a"))
    cluster.limits = {"k": KeyLimits(tokens_per_minute=50, concurrency=1)}.get
    for _ in range(3):
        assert await count_prompt_tokens(cluster.dispatcher, ASKED, "k") == 11
    (rate,) = cluster.dispatcher.quotas.list_rates("k", cluster.dispatcher.get_time())
    assert (rate.unit, rate.remaining) == ("tokens", 50)
    node = LoopbackNode("a")
    silent = Silent(node)
    silent.limits = cluster.limits
    counting = asyncio.create_task(count_prompt_tokens(silent.dispatcher, ASKED, "k"))
    await turn()
    (rate,) = silent.dispatcher.quotas.list_rates("k", silent.dispatcher.get_time())
    assert 50 - 20 <= rate.remaining < 50, "the prompt of 40 bytes and no answer"
    silent.dispatcher.handle_lost_node(node.id, "cut")
    await counting
    (rate,) = silent.dispatcher.quotas.list_rates("k", silent.dispatcher.get_time())
    assert rate.remaining == 50


async def test_a_count_beyond_the_requests_of_its_key_is_refused():
    node = LoopbackNode("a")
    cluster = LoopbackCluster(node)
    cluster.limits = {"k": KeyLimits(requests_per_minute=1)}.get
    assert await count_prompt_tokens(cluster.dispatcher, ASKED, "k") == 11
    found = await count_prompt_tokens(cluster.dispatcher, ASKED, "k")
    assert isinstance(found, Problem)
    assert (found.status, found.code) == (429, RefusalCode.RATE_LIMITED)
    assert counted(node) == 1


async def test_an_alias_is_counted_with_its_first_model_that_a_node_has():
    settings = RouterSettings(aliases={"coder": ("nowhere", "tiny"), "lonely": ("nowhere", "nothing")})
    node = LoopbackNode("a", labels=frozenset({"lab"}))
    cluster = LoopbackCluster(node, LoopbackNode("b"), settings=settings)
    cluster.limits = {"k": KeyLimits(models=("coder", "lonely"), labels=("lab",))}.get
    assert await count_prompt_tokens(cluster.dispatcher, replace(ASKED, model="coder"), "k") == 11
    assert [frame.model for frame in node.heard if isinstance(frame, CountTokens)] == ["tiny"]
    found = await count_prompt_tokens(cluster.dispatcher, replace(ASKED, model="lonely"), "k")
    assert isinstance(found, Problem)
    assert (found.status, found.message) == (404, "no node serves the model 'nowhere'")


async def test_a_key_bound_to_labels_is_counted_on_these_nodes_only():
    node = LoopbackNode("a")
    cluster = LoopbackCluster(node)
    cluster.limits = {"k": KeyLimits(labels=("lab",))}.get
    found = await count_prompt_tokens(cluster.dispatcher, ASKED, "k")
    assert isinstance(found, Problem)
    assert (found.status, found.code) == (403, RefusalCode.NOT_ALLOWED)
    assert counted(node) == 0


async def test_a_node_that_counts_too_long_is_a_refusal_to_retry(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(count_tokens, "COUNT_TIMEOUT_SECONDS", 0.001)
    cluster = Silent(LoopbackNode("a"))
    found = await count_prompt_tokens(cluster.dispatcher, ASKED, "k")
    assert isinstance(found, Problem)
    assert (found.status, found.code, found.retry_after) == (503, RefusalCode.NOT_READY, 2.0)
    assert cluster.dispatcher.quotas.count_open("k") == 0


async def test_a_profile_of_the_model_applies_to_its_count():
    settings = RouterSettings(profiles={"brief": ProfileSettings(chat_template_kwargs={"enable_thinking": False})})
    node = LoopbackNode("a")
    cluster = LoopbackCluster(node, settings=settings)
    for model in ("tiny", "tiny:brief"):
        assert await count_prompt_tokens(cluster.dispatcher, replace(ASKED, model=model), "k") == 11
    assert [(frame.model, frame.template) for frame in node.heard if isinstance(frame, CountTokens)] == [
        ("tiny", ""),
        ("tiny", '{"enable_thinking":false}'),
    ]
