"""Settings: precedence, origins, refusals with the nearest key."""

from typing import Annotated, Literal

import msgspec
import pytest

from host.settings_loader import (
    InvalidSetting,
    Section,
    SettingsError,
    build_setting_rows,
    find_changed_settings,
    find_invalid_settings,
    from_environment,
    from_pairs,
    from_tree,
    list_settings,
    resolve_layers,
    split_key,
)


class Inner(Section, frozen=True, kw_only=True):
    cap: Annotated[str, msgspec.Meta(description="the most")] = "auto"
    steps: Annotated[int, msgspec.Meta(ge=1, description="how many")] = 3


class Bounded(Section, frozen=True, kw_only=True):
    mode: Annotated[Literal["auto", "on", "off"], msgspec.Meta(description="the mode")] = "auto"
    share: Annotated[float, msgspec.Meta(gt=0.0, le=1.0)] = 1.0
    short: Annotated[str, msgspec.Meta(max_length=2)] = ""
    names: Annotated[tuple[str, ...], msgspec.Meta(max_length=1)] = ()
    size: int | str = 0


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
        ("memory.steps=0", r"setting memory.steps \(--set\): it must be an integer of at least 1$"),
        ("memory.steps=many", r"setting memory.steps \(--set\): it must be an integer, not a text$"),
        ("quiet=7", r"setting quiet \(--set\): it must be true or false, not a text$"),
        ("quiet", "key=value"),
        ("=1", "key=value"),
        (" =1", "key=value, not ' =1'"),
    ],
)
def test_what_is_wrong_is_named_with_its_origin(pair: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        resolve_layers(Outer, [("--set", from_pairs([pair]))])


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("mode", "maybe", "'maybe' is not one of: auto, on, off"),
        ("mode", 1, "it must be a text, not an integer"),
        ("share", 1.5, "it must be a number of at most 1.0"),
        ("share", 0.0, "it must be a number of more than 0.0"),
        ("short", "abc", "it must have at most 2 characters"),
        ("names", ["a", "b"], "it must have at most 1 entries"),
        ("names", 1, "it must be a list, not an integer"),
        ("size", 1.5, "it must be an integer or a text, not a number"),
    ],
)
def test_an_invalid_value_is_explained_in_plain_words(name: str, value: object, text: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve_layers(Bounded, [("config.toml", {name: value})])
    assert str(caught.value) == f"setting {name} (config.toml): {text}"


def test_sections_of_the_other_process_are_skipped_by_name() -> None:
    assert resolve_layers(Outer, [("f", {"router.policy": "balanced"})], others={"router"}).value == Outer()


def test_every_leaf_is_described() -> None:
    assert [(s.key, s.default, s.description) for s in list_settings(Outer)] == [
        ("memory.cap", "auto", "the most"),
        ("memory.steps", 3, "how many"),
        ("quiet", False, "say less"),
    ]


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: int
    inner: dict[str, bool] = msgspec.field(default_factory=dict[str, bool])


class Tables(Section, frozen=True, kw_only=True):
    lists: Annotated[dict[str, tuple[str, ...]], msgspec.Meta(description="lists")] = msgspec.field(
        default_factory=dict[str, tuple[str, ...]]
    )
    sizes: Annotated[dict[str, Entry], msgspec.Meta(description="sizes")] = msgspec.field(
        default_factory=dict[str, Entry]
    )

    def __post_init__(self) -> None:
        for name, values in self.lists.items():
            if "missing" in values and "missing" not in self.sizes:
                raise ValueError(f"{name} needs an entry that is missing")


TREE = {"lists": {"a": ["x", "y"], "b.1:2": ["z"]}, "sizes": {"big": {"size": 3, "inner": {"on": True}}}}


def test_a_table_has_named_entries_from_every_layer() -> None:
    layers = [
        ("config.toml", from_tree(TREE)),
        ("environment", from_environment({"MACPOOL_LISTS__A": "p,q"})),
        ("--set", from_pairs(['lists."c.d"=r', "sizes.small.size=4"])),
    ]
    resolved = resolve_layers(Tables, layers)
    assert resolved.value.lists == {"a": ("p", "q"), "b.1:2": ("z",), "c.d": ("r",)}
    assert resolved.value.sizes == {"big": Entry(3, {"on": True}), "small": Entry(4)}
    rows = {row["key"]: row for row in build_setting_rows(resolved)}
    assert rows["sizes"]["value"] == {"big": {"size": 3, "inner": {"on": True}}, "small": {"size": 4, "inner": {}}}
    assert rows["sizes"]["origin"] == "config.toml"
    texts = resolve_layers(Tables, [("--set", from_pairs(["lists.a=", "lists.b=x, ,y"]))])
    assert texts.value.lists == {"a": (), "b": ("x", "y")}


def test_a_key_is_split_like_a_key_of_toml() -> None:
    assert split_key('a."b.c".d') == ["a", "b.c", "d"]
    assert split_key("a.b") == ["a", "b"]
    assert split_key("a..b") == ["a", "", "b"]
    assert split_key('a."b') == ["a", '"b']
    assert split_key('a."\\x"') == ["a", '"\\x"']


def test_entries_of_tables_are_checked_together() -> None:
    flat = from_tree({"lists": {"a": ["missing"], "b": ["x"]}, "sizes": {"missing": {"size": 1}}})
    assert find_invalid_settings(Tables, flat) == []
    flat = from_tree({"lists": {"a": ["missing"], "b.c": 1}, "sizes": {"big": {"sice": 1}}})
    assert find_invalid_settings(Tables, flat) == [
        InvalidSetting("sizes.big", "Object contains unknown field `sice`", meaning="sizes"),
        InvalidSetting("lists.a", "a needs an entry that is missing", meaning="lists"),
        InvalidSetting('lists."b.c"', "it must be a list, not an integer", meaning="lists"),
    ]


def test_a_value_in_the_place_of_a_table_is_refused() -> None:
    with pytest.raises(SettingsError, match="it must be a table, not a text"):
        resolve_layers(Tables, [("file", {"lists": "x"})])
    with pytest.raises(SettingsError, match="big is a value, not a table"):
        resolve_layers(Tables, [("file", {"sizes.big": 1, "sizes.big.size": 1})])


def test_changed_tables_are_found() -> None:
    rows = msgspec.json.decode(
        msgspec.json.encode(build_setting_rows(resolve_layers(Tables, [("f", from_tree(TREE))])))
    )
    assert find_changed_settings(rows, Tables, from_tree(TREE)) == []
    changed = find_changed_settings(rows, Tables, from_tree({**TREE, "lists": {"a": ["x"]}}))
    assert [one.key for one in changed] == ["lists"]
