"""Rewrite of JSON schemas of clients for llguidance.

llguidance refuses keywords that it does not implement, even where they constrain nothing. A rewritten schema allows the
same values as the original. Only the schema of a tool that is not strict loses constraints that cannot be enforced.
"""

import re
from typing import Final, cast

Json = dict[str, object]

FORMATS: Final = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)
"""Formats of texts that llguidance enforces. Other formats are left out, because `format` is only an annotation."""
UUID_FORMATS: Final = frozenset(f"uuid{version}" for version in range(1, 9))
"""Pydantic's formats of UUIDs of one version, which become the format `uuid`."""
PATTERNS: Final = {
    # Pydantic's Decimal: a number with at least one digit
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(?:\d+\.?\d*|\.\d+)$",
    # Zod's email: no dot at the ends of the name, and no two dots in a row
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$": (
        r"^(?:[A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    ),
}
"""Patterns with assertions that libraries generate, each with an equivalent pattern without assertions."""
_SINGLE: Final = frozenset(
    {"additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "then"}
)
_LISTS: Final = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_MAPS: Final = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})
_TRUE: Final[tuple[object, ...]] = (True, {}, {"type": "string"})
"""Schemas that every name of a property follows."""
_UNENFORCED: Final = frozenset({"else", "if", "not", "then", "uniqueItems"})
"""Keywords that llguidance refuses. OpenAI's strict mode does not support them either."""
_ANNOTATIONS: Final = frozenset(
    {"$comment", "default", "deprecated", "description", "examples", "nullable", "readOnly", "title", "writeOnly"}
)
"""Keywords that constrain nothing. Clients put them next to `allOf` with one reference."""
_ESCAPED: Final = re.compile(r"\\[^bBk1-9]")
_ASSERTION: Final = re.compile(r"\(\?<?[=!]|\\[bBk1-9]")
"""Assertion or backreference, in a pattern without other escapes."""


def rewrite_schema(schema: Json, *, strict: bool) -> Json:
    """Return a schema without keywords that constrain nothing, and with equivalent patterns in place of `PATTERNS`.

    A tuple in the form of draft 7 gets the form of draft 2020-12. An `allOf` with one schema is replaced by that
    schema, unless other keywords could constrain the same value. Formats outside `FORMATS` and `UUID_FORMATS` are left
    out. Without `strict`, patterns and keywords that llguidance cannot enforce are left out as well. `schema` must have
    at most `MAX_JSON_DEPTH` levels.
    """
    rewritten: Json = {}
    for key, value in schema.items():
        if key == "pattern" and isinstance(value, str):
            if strict or not _ASSERTION.search(_ESCAPED.sub("", PATTERNS.get(value, value))):
                rewritten[key] = PATTERNS.get(value, value)
        elif key == "format" and isinstance(value, str):
            known = "uuid" if value in UUID_FORMATS else value
            if known in FORMATS:
                rewritten[key] = known
        elif not _is_always_met(key, value) and (strict or key not in _UNENFORCED):
            rewritten[key] = _rewrite_part(key, value, strict=strict)
    return _replace_single_part(_rewrite_tuple(rewritten))


def _rewrite_tuple(schema: Json) -> Json:
    """Return a schema with the list `items` as `prefixItems`, and `additionalItems` as `items`."""
    items = schema.get("items")
    if not isinstance(items, list) or "prefixItems" in schema:
        return schema
    rest = {"items": schema["additionalItems"]} if "additionalItems" in schema else {}
    others = {key: value for key, value in schema.items() if key not in ("items", "additionalItems")}
    return {**others, "prefixItems": cast("list[object]", items), **rest}


def _replace_single_part(schema: Json) -> Json:
    """Return a schema with the only part of its `allOf` in place of `allOf`, as Pydantic 1 writes references.

    A schema with other keywords that could constrain the same value stays.
    """
    parts = schema.get("allOf")
    if not isinstance(parts, list) or len(cast("list[object]", parts)) != 1 or not isinstance(parts[0], dict):
        return schema
    part, others = cast("Json", parts[0]), {key: value for key, value in schema.items() if key != "allOf"}
    if others.keys() - _ANNOTATIONS - {"type", "$defs", "definitions"} or (others.keys() & part.keys()) - _ANNOTATIONS:
        return schema
    return {**part, **others}


def _is_always_met(key: str, value: object) -> bool:
    return (key == "propertyNames" and value in _TRUE) or (key == "uniqueItems" and value is False)


def _rewrite_part(key: str, value: object, *, strict: bool) -> object:
    """Return the value of a keyword with all schemas in it rewritten. Other values, such as constants, stay."""
    if key in _LISTS and isinstance(value, list):
        return [_rewrite_any(part, strict=strict) for part in cast("list[object]", value)]
    if key in _MAPS and isinstance(value, dict):
        return {name: _rewrite_any(part, strict=strict) for name, part in cast("Json", value).items()}
    return _rewrite_any(value, strict=strict) if key in _SINGLE else value


def _rewrite_any(schema: object, *, strict: bool) -> object:
    return rewrite_schema(cast("Json", schema), strict=strict) if isinstance(schema, dict) else schema
