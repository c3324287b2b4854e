"""Two models of one name are never mixed: in placement, in resumed answers, in cached prompts."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.dialects.openai import models as openai
from router.dispatch.active_request import ActiveRequest
from router.dispatch.request import RequestFailure, RequestSpec
from router.placement.candidate import Placement, ResourceDemand
from router.placement.cluster_view import ClusterView, NodeView
from router.placement.model_load import LoadPlacement
from tests.support.cluster.loopback_cluster import a_model
from tests.support.cluster.manual_pool import A, B, C, Cluster, taken
from tests.support.requests import list_visible
from tests.unit.router.placement.test_recovery import lose, models, say
from wire.frames import Admitted, GenerationParams, Message
from wire.identity import NodeId
from wire.models.version import ModelVersion, VersionGrade
from wire.report import EngineState, Model

LONG = "a sentence that is long enough to be worth remembering where it was read. " * 40


def node(name: str, fingerprint: str, state: str = "ready", **model: Any) -> NodeView:
    return NodeView(
        NodeId(name),
        name,
        state,
        engine=EngineState(state="ready"),
        models={"tiny": a_model(fingerprint=fingerprint, **model)},
    )


def identity(*nodes: NodeView) -> str:
    return ClusterView(nodes).identify("tiny").version.fingerprint


def version(*nodes: NodeView) -> ModelVersion:
    return ClusterView(nodes).identify("tiny").version


def test_identify_separates_models_with_equal_samples_and_different_content():
    three = node("a", "x", content="1"), node("b", "x", content="2"), node("c", "x", content="2")
    assert version(*three) == ("x", "2")
    assert ClusterView(three).conflicts == ["tiny"]
    assert dict(ClusterView(three).identify("tiny").holders) == {("x", "1"): 1, ("x", "2"): 2}


def test_identify_counts_unhashed_files_for_the_version_with_the_same_samples():
    found = node("a", "x"), node("b", "x", content="1"), node("c", "y", content="2")
    assert dict(ClusterView(found).identify("tiny").holders) == {("x", "1"): 2, ("y", "2"): 1}
    assert version(*found) == ("x", "1")
    assert ClusterView(found[:2]).conflicts == [], "files that are not hashed yet are no conflict"
    more = node("d", "x"), *found[:2]
    assert dict(ClusterView(more).identify("tiny").holders) == {("x", "1"): 3}, "most are not hashed yet"
    assert version(node("a", "x"), node("b", "x")) == ("x", "")


def test_compare_needs_equal_content_or_equal_samples_where_a_file_is_not_hashed():
    hashed = ModelVersion("x", "1")
    assert hashed.compare(ModelVersion("x", "1")) is VersionGrade.CONTENT
    assert hashed.compare(ModelVersion("x")) is ModelVersion("x").compare(hashed) is VersionGrade.SAMPLED
    assert hashed.compare(ModelVersion("x", "2")) is VersionGrade.DIFFERS
    assert hashed.compare(ModelVersion("y")) is VersionGrade.DIFFERS


def test_the_model_that_most_members_hold_is_served():
    three = node("a", "x"), node("b", "y"), node("c", "y")
    assert identity(*three) == "y"
    assert identity(three[0], three[1]) == "x", "of equals the smallest"
    assert identity(node("a", "x"), node("b", "y", cause="broken")) == "x"
    assert identity(node("a", "x"), node("b", "y"), node("c", "y", "left")) == "x", "a node that left does not count"
    assert identity(node("a", "x"), node("b", "y", cause="broken"), node("c", "y", cause="broken")) == "x"
    assert identity() == ""
    assert identity(node("a", ""), node("b", "y"), node("c", "")) == "y", (
        "one without a fingerprint is no model to name"
    )


def test_sleep_changes_nothing_until_no_node_can_serve_it():
    asleep = replace(node("b", "y"), state="asleep")
    assert identity(node("a", "x"), asleep, node("c", "y")) == "y"
    assert identity(node("a", "x"), asleep, replace(node("c", "y"), state="lost")) == "x"
    assert identity(node("a", "x"), asleep, replace(node("c", "y"), cordoned=True)) == "x"
    assert identity(node("a", "x", "lost"), replace(node("b", "y"), draining=True)) == "x", (
        "without a ready node a name is still chosen"
    )
    assert identity(node("a", "x", "suspect"), node("b", "y")) == "x", "a silence of seconds is no reason"


@given(st.lists(st.tuples(st.sampled_from("xyz"), st.sampled_from(["ready", "asleep"])), min_size=1, max_size=5))
def test_the_choice_does_not_depend_on_the_order_and_some_node_has_it(held: list[tuple[str, str]]):
    nodes = [node(str(at), *one) for at, one in enumerate(held)]
    chosen = {ClusterView(tuple(order)).identify("tiny").version.fingerprint for order in itertools.permutations(nodes)}
    assert len(chosen) == 1
    assert chosen < {one for one, _ in held} | {""}
    able = {one for one, state in held if state == "ready"}
    assert not able or chosen <= able


def test_the_served_version_of_a_model_is_selected_although_another_node_is_first():
    view = ClusterView((node("a", "x"), node("b", "y"), node("c", "y")))
    for models_by_name in (view.get_models(), view.get_served_models(), view.get_loaded_models()):
        assert models_by_name["tiny"].fingerprint == "y"


def test_a_model_that_no_node_can_load_is_known_but_not_served():
    view = ClusterView((node("a", "x", cause="truncated", loaded=False),))
    assert (list(view.get_models()), list(view.get_served_models()), list(view.get_loaded_models())) == (
        ["tiny"],
        [],
        [],
    )


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("qwen/Model-X", "qwen/Model-X"),
        ("QWEN/model-x", "qwen/Model-X"),
        ("openrouter/qwen/model-x", "qwen/Model-X"),
        ("a/b/tiny", "tiny"),
        ("a/b/c/tiny", "tiny"),
        ("a/b/c/d/tiny", "a/b/c/d/tiny"),
        ("model-x", "model-x"),
    ],
)
def test_a_name_is_found_regardless_of_case_and_of_up_to_three_provider_parts(asked: str, found: str):
    models = {name: a_model(name) for name in ("qwen/Model-X", "tiny")}
    assert ClusterView((replace(node("a", "x"), models=models),)).resolve_name(asked) == found


def test_of_names_that_differ_in_case_the_first_in_order_is_found():
    models = {name: a_model(name) for name in ("tiny", "TINY", "Tiny")}
    view = ClusterView((replace(node("a", "x"), models=models),))
    assert [view.resolve_name(name) for name in ("tiny", "tINY")] == ["tiny", "TINY"]


@pytest.fixture
async def three():
    cluster = Cluster(A, B, C)
    models(cluster, b=a_model(fingerprint="another", prefill_speed=9000.0))
    yield cluster
    cluster.dispatcher.shutdown()
    cluster.settled()


@pytest.fixture
async def two():
    cluster = Cluster(A, B)
    yield cluster
    cluster.dispatcher.shutdown()
    cluster.settled()


async def test_new_requests_go_to_one_model_only(three: Cluster):
    tickets = [three.submit() for _ in range(20)]
    assert {node for node, _ in three.generates()} == {A, C}, "however fast the other one is"
    placement = three.dispatcher.placer.preview(ResourceDemand("tiny", prompt_bytes=64))
    assert isinstance(placement, Placement)
    (other,) = (one for one in placement.candidates if one.node == B)
    assert other.why == "has another model tiny: fingerprint another, not fingerprint tiny-1"
    for ticket in tickets:
        three.dispatcher.close(ticket)


async def test_requests_and_resumed_answers_keep_to_one_content_of_equal_samples():
    three = Cluster(A, B, C)
    models(three, a=a_model(content="1"), b=a_model(content="2", prefill_speed=9000.0), c=a_model(content="1"))
    ticket = three.submit()
    say(three, 1)
    taken(ticket)
    lose(three)
    assert {node for node, _ in three.generates()} == {A, C}
    assert [frame.content for _, frame in three.generates()] == ["", "1"]
    placement = three.dispatcher.placer.preview(ResourceDemand("tiny", prompt_bytes=64))
    assert isinstance(placement, Placement)
    (other,) = (one for one in placement.candidates if one.node == B)
    assert other.why == (
        "has another model tiny: fingerprint tiny-1 and content 2, not fingerprint tiny-1 and content 1"
    )
    three.dispatcher.close(ticket)
    three.dispatcher.shutdown()


async def test_load_order_uses_the_served_version():
    three = Cluster(A, B, C)
    models(
        three,
        a=a_model(loaded=False),
        b=a_model(fingerprint="another", loaded=False, load_seconds=0.0),
        c=a_model(loaded=False),
    )
    for _ in range(10):
        choice = three.dispatcher.placer.choose_load_node("tiny", {})
        assert isinstance(choice, LoadPlacement)
        assert choice.node != B
    three.dispatcher.shutdown()


async def test_stream_does_not_resume_with_another_version(three: Cluster):
    ticket = three.submit()
    say(three, 1)
    taken(ticket)
    lose(three)
    assert {node for node, _ in three.generates()} == {A, C}, "once more with its own"
    say(three, 2)
    taken(ticket)
    lose(three)
    assert isinstance(ticket.outcome, RequestFailure)
    assert ticket.outcome.code == "node_lost"
    assert "a different model with the name tiny (`cluster models`)" in ticket.outcome.message
    assert B not in {node for node, _ in three.generates()}


async def test_prefixes_are_separate_for_each_version(two: Cluster):
    def ask() -> ActiveRequest:
        job = RequestSpec(
            ResourceDemand("tiny", len(LONG)), "k", "r", (Message("user", LONG),), GenerationParams(), 0, stream=True
        )
        return two.dispatcher.submit(job)

    first = ask()
    where = two.last()[0]
    two.say(lambda number: Admitted(number, 400, 0, b"kept"))
    two.finish()
    second = ask()
    assert dict(second.cached_shares) == {where: 1.0}
    two.models = (a_model(fingerprint="new"),)
    two.report()
    third = ask()
    assert dict(third.cached_shares) == {}, "the node has read it with another model"
    for ticket in (first, second, third):
        two.dispatcher.close(ticket)


def test_the_list_of_models_shows_the_one_that_is_served():
    nodes = node("a", "x", context=1000), node("b", "x", context=1000), node("c", "y", context=99)
    view = ClusterView(nodes)
    assert b'"max_input_tokens":1000' in openai.list_anthropic_models(list_visible(view), 0)
    assert view.get_served_models()["tiny"].fingerprint == view.get_models()["tiny"].fingerprint == "x"
    assert view.get_loaded_models()["tiny"].fingerprint == "x"
    only: dict[str, Model] = ClusterView((node("c", "y"),)).get_served_models()
    assert only["tiny"].fingerprint == "y"
