"""Names of clients: aliases, profiles, models, and the keys that may use them."""

import pytest

from router.admission.model_names import ModelNames, ModelTarget
from router.admission.rate_limits import NO_LIMITS, KeyLimits
from router.placement.cluster_view import ClusterView
from router.placement.sanitize_report import build_node_view
from router.profiles import ProfileSettings
from router.settings import RouterSettings
from router.upstreams import UpstreamSettings
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.frames import Report
from wire.identity import NodeId
from wire.refusals import Refused
from wire.report import EngineState

SETTINGS = RouterSettings(
    aliases={"coder": ("BIG", "small", "missing"), "gpt:4": ("small",), "Tiny": ("tiny", "small")},
    profiles={"Fast": ProfileSettings(temperature=0.1), "long": ProfileSettings(context_limit=9)},
)
NAMES = ModelNames(SETTINGS)


def view(*models: str) -> ClusterView:
    report = Report(0, a_memory(), EngineState("x", "ready"), tuple(a_model(name) for name in models))
    return ClusterView((build_node_view(report, node=NodeId("n"), name="n", state="ready", reported_at=1.0),))


VIEW = view("big", "small", "tiny", "qwen3:8b", "qwen/coder", "other")


def resolve(name: str, limits: KeyLimits = NO_LIMITS) -> ModelTarget | Refused:
    return NAMES.resolve(name, VIEW, limits)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("big", ModelTarget(("big",), "big")),
        ("BIG", ModelTarget(("big",), "big")),
        ("openai/big", ModelTarget(("big",), "big")),
        ("coder", ModelTarget(("big", "small", "missing"), "coder", "coder")),
        ("CODER", ModelTarget(("big", "small", "missing"), "coder", "coder")),
        ("openai/coder", ModelTarget(("big", "small", "missing"), "coder", "coder")),
        ("Qwen/Coder", ModelTarget(("qwen/coder",), "qwen/coder")),
        ("Tiny", ModelTarget(("tiny", "small"), "Tiny", "Tiny")),
        ("tiny", ModelTarget(("tiny",), "tiny")),
        ("gpt:4", ModelTarget(("small",), "gpt:4", "gpt:4")),
        ("qwen3:8b", ModelTarget(("qwen3:8b",), "qwen3:8b")),
        ("qwen3:8b:fast", ModelTarget(("qwen3:8b",), "qwen3:8b", profile="Fast")),
        ("big:LONG", ModelTarget(("big",), "big", profile="long")),
        ("coder:fast", ModelTarget(("big", "small", "missing"), "coder", "coder", "Fast")),
        ("gpt:4:fast", ModelTarget(("small",), "gpt:4", "gpt:4", "Fast")),
        ("nothing", ModelTarget(("nothing",), "nothing")),
        ("nothing:fast", ModelTarget(("nothing:fast",), "nothing:fast")),
        (":fast", ModelTarget((":fast",), ":fast")),
        ("", ModelTarget(("",), "")),
    ],
)
def test_a_name_is_resolved(name: str, target: ModelTarget):
    assert resolve(name) == target


@pytest.mark.parametrize("name", ["big:slow", "coder:slow", "qwen3:8b:slow"])
def test_an_unknown_profile_names_the_known_ones(name: str):
    refused = resolve(name)
    assert isinstance(refused, Refused)
    assert (refused.status, refused.message) == (
        404,
        f"there is no profile 'slow' for {name.removesuffix(':slow')}; the profiles are Fast, long",
    )


def test_without_profiles_a_colon_is_part_of_the_name():
    assert ModelNames(RouterSettings()).resolve("big:slow", VIEW, NO_LIMITS) == ModelTarget(("big:slow",), "big:slow")


def test_a_key_that_may_use_an_alias_may_use_its_candidates_through_it():
    assert resolve("coder", KeyLimits(models=("cod*",))) == ModelTarget(("big", "small", "missing"), "coder", "coder")


def test_a_key_without_the_alias_may_use_the_candidates_that_it_may_use_by_name():
    assert resolve("coder", KeyLimits(models=("small",))) == ModelTarget(("small",), "small", "coder")
    refused = resolve("coder", KeyLimits(models=("other",)))
    assert isinstance(refused, Refused)
    assert (refused.status, refused.message) == (403, "this API key may not use the model 'coder', only other")


def test_only_names_of_models_are_plain():
    assert NAMES.is_plain("big", VIEW)
    assert not NAMES.is_plain("coder", VIEW)
    assert not NAMES.is_plain("BIG", VIEW)
    assert not ModelNames(RouterSettings(aliases={"big": ("big", "small")})).is_plain("big", VIEW)


def test_visible_aliases_are_those_that_the_key_may_use():
    everything = NAMES.list_visible(VIEW, None)
    assert everything.list_aliases() == ["Tiny", "coder", "gpt:4"]
    model = everything.find_model("openai/coder")
    assert model is not None
    assert model.name == "coder"
    limited = NAMES.list_visible(VIEW, KeyLimits(models=("big",)))
    assert limited.aliases == {"coder": ("big",)}
    assert limited.find_alias("gpt:4") is None
    through = NAMES.list_visible(VIEW, KeyLimits(models=("coder",)))
    found = through.find_alias_model("coder")
    assert found is not None
    assert found.name == "big", "its models are not in the list of the key, and it may use them through the alias"
    assert through.view.get_models() == {}
    assert (through.is_loaded("big"), through.is_loaded("missing")) == (True, False)
    assert NAMES.list_visible(view(), None).find_model("coder") is None


def test_visible_aliases_have_their_upstream():
    names = ModelNames(
        RouterSettings(
            aliases={"coder": ("big", "upstream:cloud"), "writer": ("big",)},
            upstreams={"cloud": UpstreamSettings(url="https://cloud.test/v1", model="far")},
        )
    )
    visible = names.list_visible(ClusterView(), None)
    assert (visible.aliases, visible.upstreams) == (
        {"coder": ("big",), "writer": ("big",)},
        {"coder": "cloud", "writer": ""},
    )


def test_only_other_names_than_those_of_models_may_mean_an_upstream():
    upstreams = {"home": UpstreamSettings(url="https://models.example/v1", model="far")}
    names = ModelNames(RouterSettings(aliases={"coder": ("big", "upstream:home")}, upstreams=upstreams))
    assert [names.may_mean_upstream(name, VIEW) for name in ("coder", "CODER", "nothing", "big")] == [True] * 3 + [
        False
    ]
    assert not any(NAMES.may_mean_upstream(name, VIEW) for name in ("coder", "nothing", "big"))


def test_a_profile_is_returned_by_its_exact_name():
    assert NAMES.get_profile("Fast") == SETTINGS.profiles["Fast"]
    with pytest.raises(KeyError):
        NAMES.get_profile("fast")
