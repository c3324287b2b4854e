"""Compare a value with a JSON schema. Covers the keywords that the tests use, independent of the code that enforces
them."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
_KNOWN = {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "items",
    "minItems",
    "maxItems",
    "minimum",
    "maximum",
    "maxLength",
    "enum",
    "const",
    "title",
    "description",
}


def violations(value: Any, schema: Mapping[str, Any]) -> list[str]:
    """Return the violations, empty for a valid value; raise ValueError for a keyword that this module does not know."""
    if strange := schema.keys() - _KNOWN:
        raise ValueError(f"unknown keywords: {strange}")
    kind = schema.get("type")
    if kind and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return [f"{value!r} is no {kind}"]
    found = [f"{value!r} is not in {schema['enum']}"] if "enum" in schema and value not in schema["enum"] else []
    if "const" in schema and value != schema["const"]:
        found.append(f"{value!r} is not {schema['const']!r}")
    return [*found, *_bounds(value, schema), *_parts(value, schema)]


def _bounds(value: Any, schema: Mapping[str, Any]) -> Sequence[str]:
    size = value if isinstance(value, int | float) else len(cast("str", value)) if isinstance(value, str | list) else 0
    return [
        f"{value!r}: {name} {schema[name]}"
        for name in ("minimum", "maximum", "minItems", "maxItems", "maxLength")
        if name in schema and (size < schema[name] if name.startswith("min") else size > schema[name])
    ]


def _parts(value: Any, schema: Mapping[str, Any]) -> list[str]:
    if isinstance(value, list):
        return [one for item in cast("list[Any]", value) for one in violations(item, schema.get("items", {}))]
    if not isinstance(value, dict):
        return []
    found, properties = cast("dict[str, Any]", value), cast("dict[str, Any]", schema.get("properties", {}))
    wrong = [f"{name} is missing" for name in schema.get("required", ()) if name not in found]
    if schema.get("additionalProperties") is False:
        wrong += [f"{name} is too much" for name in found.keys() - properties.keys()]
    both = found.keys() & properties.keys()
    return [*wrong, *(one for name in both for one in violations(found[name], properties[name]))]
