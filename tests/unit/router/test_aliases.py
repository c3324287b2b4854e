"""Aliases as a graph: faults of the settings, and the candidates of an alias."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.aliases import MAX_ALIASES, MAX_CANDIDATES, find_alias_fault, is_upstream, list_candidates

NAMES = st.sampled_from(["a", "B", "c", "D", "e", "big", "small", "tiny"])
TABLES = st.dictionaries(NAMES, st.lists(st.one_of(NAMES, NAMES.map(str.swapcase)), min_size=1, max_size=4).map(tuple))


@pytest.mark.parametrize(
    ("aliases", "fault"),
    [
        ({"a": ("b",), "b": ("c",), "c": ("a",)}, "the aliases form a cycle: a -> b -> c -> a"),
        ({"x": ("a",), "a": ("m", "B"), "b": ("A",)}, "the aliases form a cycle: a -> b -> a"),
        ({"a": ()}, "the alias a has no candidates: name its models"),
        ({"a": ("m", " ")}, "the alias a has an empty candidate: name its models"),
        ({"Coder": ("m",), "coder": ("m",)}, "the aliases Coder and coder differ only in case"),
        ({" ": ("m",)}, "an alias cannot have the name ' '"),
        ({"upstream:x": ("m",)}, "an alias cannot have the name 'upstream:x'"),
        ({"a": ("m", "upstream:x")}, "the alias a names the upstream 'x', which router.upstreams does not have"),
        (
            {"a": ("m", "upstream:home", "n")},
            "the alias a has upstream:home before n: an upstream can only be the last one",
        ),
        (
            {"a": ("b", "n"), "b": ("m", "upstream:home")},
            "the alias a has upstream:home before n: an upstream can only be the last one",
        ),
        ({"a": ("upstream:home",)}, "the alias a has only upstream:home: name a model before it"),
    ],
)
def test_a_fault_is_one_sentence(aliases: dict[str, tuple[str, ...]], fault: str):
    assert find_alias_fault(aliases, {"home"}) == fault


def test_an_alias_may_name_aliases_models_and_the_model_of_its_own_name():
    aliases = {"coder": ("Big", "fast"), "fast": ("small", "big", "upstream:home"), "big": ("big", "tiny")}
    assert find_alias_fault(aliases, {"home"}) == ""
    assert list_candidates(aliases, "coder") == ("big", "tiny", "small", "upstream:home")
    assert list_candidates(aliases, "big") == ("big", "tiny")
    assert list_candidates({"Model": ("MODEL", "b")}, "Model") == ("MODEL", "b")


def test_numbers_of_aliases_and_candidates_are_bounded():
    many = {f"a{number}": ("m",) for number in range(MAX_ALIASES + 1)}
    assert find_alias_fault(many) == f"there are {MAX_ALIASES + 1} aliases, at most {MAX_ALIASES} are allowed"
    names = tuple(f"m{number}" for number in range(MAX_CANDIDATES + 1))
    assert "has 33 candidates, at most 32" in find_alias_fault({"a": names})
    chain = {f"a{number}": (f"a{number + 1}",) for number in range(MAX_ALIASES)}
    assert find_alias_fault(chain) == ""
    doubled = {f"a{number}": (f"a{number + 1}", f"A{number + 1}") for number in range(MAX_ALIASES)}
    assert list_candidates(doubled, "a0") == (f"a{MAX_ALIASES}",), "in a time that does not grow with the paths"


@given(TABLES)
def test_aliases_either_have_a_fault_or_end_in_models(aliases: dict[str, tuple[str, ...]]):
    fault = find_alias_fault(aliases)
    folded = {name.casefold() for name in aliases}
    if fault:
        assert "cycle" in fault or "differ only in case" in fault
        return
    for alias in aliases:
        found = list_candidates(aliases, alias)
        assert found
        assert len({one.casefold() for one in found}) == len(found)
        assert not any(is_upstream(one) for one in found)
        for one in found:
            owners = [name for name, candidates in aliases.items() if one in candidates]
            assert one.casefold() not in folded or any(name.casefold() == one.casefold() for name in owners)


@given(TABLES)
def test_a_cycle_that_is_named_exists(aliases: dict[str, tuple[str, ...]]):
    fault = find_alias_fault(aliases)
    if "cycle" not in fault:
        return
    path = fault.removeprefix("the aliases form a cycle: ").split(" -> ")
    assert path[0] == path[-1]
    assert len(path) > 2, "the own name of an alias is a model"
    for alias, candidate in itertools.pairwise(path):
        assert candidate.casefold() in {one.casefold() for one in aliases[alias]}
