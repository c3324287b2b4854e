"""Settings: precedence, origins, refusals with the nearest key."""

from typing import Annotated

import msgspec
import pytest

from host.settings_loader import (
    Section,
    SettingsError,
    from_environment,
    from_pairs,
    from_tree,
    list_settings,
    resolve_layers,
)


class Inner(Section, frozen=True, kw_only=True):
    cap: Annotated[str, msgspec.Meta(description="the most")] = "auto"
    steps: Annotated[int, msgspec.Meta(ge=1, description="how many")] = 3


class Outer(Section, frozen=True, kw_only=True):
    memory: Inner = Inner()
    quiet: Annotated[bool, msgspec.Meta(description="say less")] = False


def test_file_is_weaker_than_environment_is_weaker_than_flag() -> None:
    layers = [
        ("config.toml", from_tree({"memory": {"cap": "1GiB", "steps": 1}, "quiet": True})),
        ("environment", from_environment({"MACPOOL_MEMORY__CAP": "2GiB", "MACPOOL_STATE": "/x", "HOME": "/"})),
        ("--set", from_pairs(["memory.cap=3GiB"])),
    ]
    resolved = resolve_layers(Outer, layers)
    assert resolved.value == Outer(memory=Inner(cap="3GiB", steps=1), quiet=True)
    assert resolved.origins == {"memory.cap": "--set", "memory.steps": "config.toml", "quiet": "config.toml"}


def test_texts_become_numbers_and_booleans() -> None:
    assert resolve_layers(Outer, [("--set", from_pairs(["memory.steps=7", "quiet=true"]))]).value == Outer(
        memory=Inner(steps=7), quiet=True
    )


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ("memory.capp=1", r"unknown setting memory.capp \(--set\): did you mean memory.cap\?"),
        ("zzz=1", r"unknown setting zzz \(--set\)$"),
        ("memory.steps=0", r"setting memory.steps \(--set\): Expected `int` >= 1"),
        ("memory.steps=many", r"setting memory.steps \(--set\)"),
        ("quiet", "key=value"),
        ("=1", "key=value"),
    ],
)
def test_what_is_wrong_is_named_with_its_origin(pair: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        resolve_layers(Outer, [("--set", from_pairs([pair]))])


def test_sections_of_the_other_process_are_skipped_by_name() -> None:
    assert resolve_layers(Outer, [("f", {"router.policy": "balanced"})], others={"router"}).value == Outer()


def test_every_leaf_is_described() -> None:
    assert [(s.key, s.default, s.description) for s in list_settings(Outer)] == [
        ("memory.cap", "auto", "the most"),
        ("memory.steps", 3, "how many"),
        ("quiet", False, "say less"),
    ]
