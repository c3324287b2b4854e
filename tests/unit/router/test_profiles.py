"""Profiles: their defaults, and the parameters of a request that override them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.profiles import PENALTIES, SAMPLING_DEFAULTS, ProfileSettings, find_profile_fault
from wire.frames import GenerationParams

FULL = ProfileSettings(
    temperature=0.2,
    top_p=0.9,
    top_k=40,
    min_p=0.1,
    max_tokens=500,
    presence_penalty=0.5,
    frequency_penalty=0.25,
    repetition_penalty=1.1,
)
NONE: frozenset[str] = frozenset()


def test_profile_sets_parameters_that_the_request_omits():
    found = FULL.apply_to_params(GenerationParams(seed=7), NONE, default_limit=False)
    assert found == GenerationParams(500, 0.2, 0.9, 7, top_k=40, min_p=0.1, presence_penalty=0.5,
                                     frequency_penalty=0.25, repetition_penalty=1.1)  # fmt: skip


def test_every_field_of_a_profile_is_applied():
    others = {"max_tokens", "chat_template_kwargs", "context_limit"}
    assert {*SAMPLING_DEFAULTS, *others} == set(ProfileSettings.__struct_fields__)


def test_the_request_wins_also_with_a_value_that_is_the_default():
    own = GenerationParams(9, 0.0, 1.0, top_k=0, min_p=0.0)
    assert FULL.apply_to_params(own, frozenset(PENALTIES), default_limit=False) == own


def test_profile_overrides_the_default_limit_of_a_dialect():
    own = GenerationParams(16)
    assert FULL.apply_to_params(own, NONE, default_limit=True).max_tokens == 500
    assert ProfileSettings(top_p=0.5).apply_to_params(own, NONE, default_limit=True).max_tokens == 16
    assert FULL.apply_to_params(own, NONE, default_limit=False).max_tokens == 16


@given(st.builds(GenerationParams, max_tokens=st.none() | st.integers(1, 9), temperature=st.none() | st.floats(0, 2)))
def test_an_empty_profile_changes_nothing(params: GenerationParams):
    assert ProfileSettings().apply_to_params(params, NONE, default_limit=False) == params
    assert ProfileSettings().apply_to_template("x") == "x"


def test_template_arguments_of_the_request_win():
    profile = ProfileSettings(chat_template_kwargs={"enable_thinking": False, "language": "de"})
    assert json.loads(profile.apply_to_template("")) == {"enable_thinking": False, "language": "de"}
    assert json.loads(profile.apply_to_template('{"language":"fr"}')) == {"enable_thinking": False, "language": "fr"}


@pytest.mark.parametrize(
    ("profiles", "fault"),
    [
        ({"a:b": ProfileSettings()}, "a profile cannot have the name 'a:b'"),
        ({"Latest": ProfileSettings()}, "a profile cannot have the name 'Latest'"),
        ({"Fast": ProfileSettings(), "fast": ProfileSettings()}, "the profiles Fast and fast differ only in case"),
        (
            {"fast": ProfileSettings(chat_template_kwargs={"tokenize": False})},
            "the profile fast sets 'tokenize', which is not a template variable that may be set",
        ),
        (
            {"fast": ProfileSettings(max_tokens=100, context_limit=100)},
            "the profile fast has max_tokens 100, which leaves no room for a prompt in context_limit 100",
        ),
        ({"fast": ProfileSettings(max_tokens=99, context_limit=100)}, ""),
    ],
)
def test_a_fault_is_one_sentence(profiles: dict[str, ProfileSettings], fault: str):
    assert find_profile_fault(profiles) == fault


@pytest.mark.parametrize(
    "profile",
    [
        ProfileSettings(),
        ProfileSettings(max_tokens=100),
        ProfileSettings(context_limit=100),
        ProfileSettings(chat_template_kwargs={"enable_thinking": False}),
    ],
)
def test_a_profile_may_have_any_part(profile: ProfileSettings):
    assert find_profile_fault({"fast": profile}) == ""
