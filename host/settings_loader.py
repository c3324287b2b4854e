"""Resolve settings from a file, the environment and the command line, with the origin of each value.

Pure: the caller reads files and environment. Precedence: TOML file < MACPOOL_* environment < --set. Unknown keys are
errors. A settings type is a tree of msgspec structs. The key of a setting is its dotted path (`memory.cap`), and its
name in the environment is MACPOOL_MEMORY__CAP. Coordinator and node read the same file, and each skips the sections of
the other by name.

A table is a setting of named entries, such as `[router.aliases]`. The key of an entry is the key of its table, a dot
and the name of the entry. A name with characters other than letters, digits, `_` and `-` is in quotes, as in TOML.
"""

import difflib
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

import msgspec

PREFIX = "MACPOOL_"
OUTSIDE = frozenset({"MACPOOL_STATE", "MACPOOL_URL", "MACPOOL_KEY_FILE"})
"""Environment variables that stand for command-line options and are not settings."""

_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "a table",
    "null": "nothing",
}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_ENUM = re.compile(r"Invalid enum value (.+)", re.DOTALL)
_KIND = re.compile(r"Expected `([a-z| ]+)`(?:, got `([a-z]+)`)?")
_BOUND = re.compile(r"Expected `([a-z]+)` (>=|<=|>|<) (\S+)")
_LENGTH = re.compile(r"Expected `([a-z]+)` of length (>=|<=) (\d+)")
_BARE_NAME = re.compile(r"[A-Za-z0-9_-]+")
_KEY_PART = re.compile(r'"((?:[^"\\]|\\.)*)"(?:\.|$)|([^.]*)(?:\.|$)')

GIVEN = frozenset({"environment", "--set", "--models"})
"""Origins that a change of the file does not affect."""

Flat = Mapping[str, object]
"""Values by dotted key."""
T = TypeVar("T", bound=msgspec.Struct)


class SettingsError(ValueError):
    """Raised for an unknown setting or an invalid value. The text names the setting, option or file, and the fault.

    For an unknown setting, the text also names the origin, and a similar known key if there is one.
    """


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base class of settings sections, such as `[memory]` of the file. All fields have a default and a description."""


@dataclass(frozen=True, slots=True)
class Setting:
    """Description of one setting of a settings type."""

    key: str
    """Dotted path, such as `memory.cap`."""
    default: object
    """Default; an empty dictionary for a table of named entries."""
    description: str
    """Meaning of the setting, as in docs/settings.md."""
    entry_default: object = None
    """For a table whose entries are lists, an empty tuple; else None."""


@dataclass(frozen=True, slots=True)
class ResolvedSettings(Generic[T]):
    """Resolved settings, and the origin of each value that is not a default."""

    value: T
    origins: Mapping[str, str]
    """Origin by key: the path of the file, `environment`, `--set` or `--models`."""


def list_settings(kind: type[msgspec.Struct], prefix: str = "") -> list[Setting]:
    """Return all settings of a settings type, with defaults and descriptions. `prefix` precedes each key."""
    settings: list[Setting] = []
    hints = get_type_hints(kind, include_extras=True)
    for field in msgspec.structs.fields(kind):
        key = prefix + field.name
        hint = hints[field.name]
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            settings += list_settings(hint, key + ".")
            continue
        default: object = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
        settings.append(Setting(key, default, _find_description(hint), _find_entry_default(hint)))
    return settings


def _find_entry_default(hint: Any) -> object:
    """Return an empty tuple for the type of a table whose entries are lists, None for any other type."""
    kind = get_args(hint)[0] if get_origin(hint) is Annotated else hint
    return () if get_origin(kind) is dict and get_origin(get_args(kind)[1]) is tuple else None


def _find_description(hint: Any) -> str:
    if get_origin(hint) is Annotated:
        for extra in get_args(hint)[1:]:
            if isinstance(extra, msgspec.Meta) and extra.description:
                return extra.description
    return ""


def from_tree(tree: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Flatten a parsed TOML file to values by dotted key. `prefix` precedes each key."""
    flat: dict[str, object] = {}
    for name, value in tree.items():
        part = name if _BARE_NAME.fullmatch(name) else json.dumps(name, ensure_ascii=False)
        if isinstance(value, dict):
            flat |= from_tree(cast("dict[str, object]", value), f"{prefix}{part}.")
        else:
            flat[prefix + part] = value
    return flat


def split_key(key: str) -> list[str]:
    """Split a dotted key into its names. A name in quotes may contain dots.

    A key with invalid quotes is split at every dot.
    """
    names: list[str] = []
    at = 0
    while at < len(key):
        part = _KEY_PART.match(key, at)
        if part is None or part.end() == at:
            return key.split(".")
        try:
            names.append(part[2] if part[1] is None else json.loads(f'"{part[1]}"'))
        except ValueError:
            return key.split(".")
        at = part.end()
    return names


def from_environment(environ: Mapping[str, str]) -> dict[str, object]:
    """Return the values of MACPOOL_SECTION__KEY variables by key in lower case (`section.key`), except OUTSIDE."""
    return {
        name[len(PREFIX) :].lower().replace("__", "."): value
        for name, value in environ.items()
        if name.startswith(PREFIX) and name not in OUTSIDE
    }


def from_pairs(pairs: Iterable[str]) -> dict[str, object]:
    """Parse `key=value` texts of --set to texts by key. Raise SettingsError for a text without `=` or key."""
    flat: dict[str, object] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        key = key.strip()
        if not equals or not key:
            raise SettingsError(f"--set takes key=value, not {pair!r}")
        flat[key] = value
    return flat


def resolve_layers(
    kind: type[T], layers: Sequence[tuple[str, Flat]], others: Collection[str] = ()
) -> ResolvedSettings[T]:
    """Merge layers of settings into an object of the type `kind`, and return the object with the origins of its values.

    `layers` are pairs of origin and values by key, lowest precedence first. Keys and sections in `others` belong to
    another process and are skipped. Raise SettingsError for an unknown key, or a value that does not fit its type.
    """
    known = {setting.key: setting for setting in list_settings(kind)}
    merged: dict[str, object] = {}
    origins: dict[str, str] = {}
    for origin, flat in layers:
        for key, value in flat.items():
            table = _find_table(key, known)
            if key in known:
                merged[key], origins[key] = _split_list(value, known[key].default), origin
            elif table is not None:
                merged[key], origins[key] = _split_list(value, table.entry_default), origin
            elif key not in others and key.split(".")[0] not in others:
                raise SettingsError(_describe_unknown_key(key, origin, [*known, *others]))
    return ResolvedSettings(_convert_settings(kind, merged, origins), origins)


@dataclass(frozen=True, slots=True)
class InvalidSetting:
    """Unknown key or invalid value of a layer, as `find_invalid_settings` returns it."""

    key: str
    text: str
    """Description of the error."""
    near: str = ""
    """Most similar known key; empty if the key is known or none is similar."""
    meaning: str = ""
    """Description of the setting; empty if the key is unknown."""


def find_invalid_settings(
    kind: type[T], flat: Flat, others: Collection[str] = (), rule: Callable[[T], None] | None = None
) -> list[InvalidSetting]:
    """Return all invalid settings of a layer, each checked separately.

    The entries of tables are checked together, because an entry may refer to another one. `InvalidSetting.key` is then
    the key of the whole entry. `rule(settings)` raises SettingsError for values that types cannot restrict; None for no
    such rule. Entries of tables are not passed to `rule`. Keys and sections in `others` belong to another process and
    are skipped.
    """
    known = {setting.key: setting for setting in list_settings(kind)}
    invalid = _find_invalid_entries(kind, flat, known)
    for key, value in flat.items():
        if key not in known:
            if _find_table(key, known) is not None:
                continue
            if key not in others and key.split(".")[0] not in others:
                near = difflib.get_close_matches(key, [*known, *others], 1, 0.5)
                invalid.append(InvalidSetting(key, "unknown setting", near[0] if near else ""))
            continue
        try:
            settings = _convert_settings(kind, {key: _split_list(value, known[key].default)}, {})
            if rule is not None:
                rule(settings)
        except SettingsError as error:
            text = str(error).removeprefix(f"setting {key} (value): ").removeprefix(f"setting {key}: ")
            invalid.append(InvalidSetting(key, text, meaning=known[key].description))
    return invalid


def _find_table(key: str, known: Mapping[str, Setting]) -> Setting | None:
    """Return the table to whose entries a key belongs; None if it belongs to none."""
    parts = key.split(".")
    for count in range(len(parts) - 1, 0, -1):
        setting = known.get(".".join(parts[:count]))
        if setting is not None:
            return setting if isinstance(setting.default, dict) else None
    return None


def _find_invalid_entries(kind: type[T], flat: Flat, known: Mapping[str, Setting]) -> list[InvalidSetting]:
    """Return the invalid entries of tables. Entries are added one by one, tables in reverse alphabetical order."""
    entries: dict[tuple[str, str], dict[str, object]] = {}
    for key, value in flat.items():
        table = None if key in known else _find_table(key, known)
        if table is not None:
            name = split_key(key[len(table.key) + 1 :])[0]
            entries.setdefault((table.key, name), {})[key] = _split_list(value, table.entry_default)
    invalid: list[InvalidSetting] = []
    valid: dict[str, object] = {}
    for (table_key, name), values in sorted(entries.items(), key=lambda entry: entry[0][0], reverse=True):
        try:
            _convert_settings(kind, valid | values, {})
            valid |= values
        except SettingsError as error:
            part = name if _BARE_NAME.fullmatch(name) else json.dumps(name, ensure_ascii=False)
            text = re.sub(r"^setting \S+ \(value\): ", "", str(error))
            invalid.append(InvalidSetting(f"{table_key}.{part}", text, meaning=known[table_key].description))
    return invalid


def build_setting_rows(resolved: ResolvedSettings[T]) -> tuple[dict[str, object], ...]:
    """Return all settings in force as dictionaries with `key`, `value`, `origin` and `description`.

    The origin of a default is `default`. A table has the origin of its first entry.
    """
    rows: list[dict[str, object]] = []
    for setting in list_settings(type(resolved.value)):
        value: object = resolved.value
        for step in setting.key.split("."):
            value = getattr(value, step)
        origin = resolved.origins.get(setting.key, "default")
        if isinstance(value, dict):
            value = msgspec.to_builtins(value)
            entries = (key for key in resolved.origins if key.startswith(setting.key + "."))
            origin = next((resolved.origins[key] for key in entries), origin)
        rows.append({"key": setting.key, "value": value, "origin": origin, "description": setting.description})
    return tuple(rows)


@dataclass(frozen=True, slots=True)
class SettingDrift:
    """Setting whose value in a running process differs from the value after a restart."""

    key: str
    running: object
    """Value in the running process."""
    now: object
    """Value by the file, or the default."""


def find_changed_settings(
    running: Iterable[Mapping[str, object]], kind: type[T], file: Flat, others: Collection[str] = ()
) -> list[SettingDrift]:
    """Return the settings of a running process that a restart with this file would change.

    `running` are rows of `build_setting_rows`, `file` the values of the file by key. Keys and sections in `others`
    belong to another process and are skipped. Settings with an origin in GIVEN do not change. Raise SettingsError for
    an unknown key or an invalid value in the file.
    """
    later = {row["key"]: row["value"] for row in build_setting_rows(resolve_layers(kind, [("file", file)], others))}
    return [
        SettingDrift(key, row["value"], later[key])
        for row in running
        if row["origin"] not in GIVEN
        and (key := str(row["key"])) in later
        and _restore_tuples(row["value"]) != later[key]
    ]


def _restore_tuples(value: object) -> object:
    """Convert lists from JSON to the tuples that settings use, also in tables."""
    if isinstance(value, dict):
        return {name: _restore_tuples(item) for name, item in cast("dict[str, object]", value).items()}
    return tuple(cast("list[object]", value)) if isinstance(value, list) else value


def _split_list(value: object, default: object) -> object:
    """Split `a,b` if the setting is a list, because the environment and --set have only texts."""
    if isinstance(default, tuple) and isinstance(value, str):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    return value


def _describe_unknown_key(key: str, origin: str, known: Collection[str]) -> str:
    near = difflib.get_close_matches(key, known, 1, 0.5)
    return f"unknown setting {key} ({origin})" + (f": did you mean {near[0]}?" if near else "")


def _convert_settings(kind: type[T], merged: Flat, origins: Mapping[str, str]) -> T:
    tree: dict[str, Any] = {}
    for key, value in merged.items():
        *path, leaf = split_key(key)
        branch = tree
        for step in path:
            inner: object = branch.setdefault(step, {})
            if not isinstance(inner, dict):
                raise SettingsError(f"setting {key} ({origins.get(key, 'value')}): {step} is a value, not a table")
            branch = cast("dict[str, Any]", inner)
        branch[leaf] = value
    try:
        return msgspec.convert(tree, kind, strict=False)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$.")
        key = where.rstrip("`")
        reason = _explain_validation_error(text, _list_values(kind, key))
        raise SettingsError(f"setting {key or '?'} ({origins.get(key, 'value')}): {reason}") from None


def _list_values(kind: type[msgspec.Struct], key: str) -> list[str]:
    """Return the allowed values of a setting whose type is an enumeration; an empty list for any other setting."""
    hint: Any = kind
    for part in split_key(key):
        hint = get_type_hints(hint).get(part) if isinstance(hint, type) else None
    return [str(value) for value in get_args(hint)] if get_origin(hint) is Literal else []


def _explain_validation_error(text: str, values: Sequence[str] = ()) -> str:
    """Return a validation error of msgspec, without its path, in plain words; other texts unchanged. `values` are the
    allowed values of the setting if it is an enumeration."""
    if match := _ENUM.fullmatch(text):
        return f"{match[1]} is not one of: {', '.join(values)}"
    if match := _BOUND.fullmatch(text):
        return f"it must be {_KINDS.get(match[1], match[1])} of {_BOUNDS[match[2]]} {match[3]}"
    if match := _LENGTH.fullmatch(text):
        unit = {"str": "characters", "array": "entries"}.get(match[1], "entries")
        return f"it must have {_BOUNDS[match[2]]} {match[3]} {unit}"
    if match := _KIND.fullmatch(text):
        wanted = " or ".join(_KINDS.get(kind, kind) for kind in match[1].split(" | "))
        return f"it must be {wanted}" + (f", not {_KINDS.get(match[2], match[2])}" if match[2] else "")
    return text
