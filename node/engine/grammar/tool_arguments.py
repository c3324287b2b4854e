"""Arguments of a tool one by one, for formats that do not write them as one JSON object.

Such formats have two kinds of values: unquoted text up to a mark such as `</parameter>`, and JSON. The kind of an
argument follows from its schema. The parser gets the same kinds (`render_parser_tools`):

    text    a string without constraints in its schema, except a choice of values or not being empty
    JSON    all other values, including strings with a pattern or a format, in quotes

Text cannot contain the marks that end it. Strings within JSON cannot either, because parsers search for marks
everywhere. Schemas are changed accordingly (`MarkExclusion`). An object that names keys then allows no other keys.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, cast

from node.engine.grammar.tool_spec import PREFIX, Json, ToolSpec, UnsupportedSchema

UNENFORCED_KEYWORDS: Final = frozenset(
    {
        "anyOf",
        "oneOf",
        "allOf",
        "not",
        "if",
        "patternProperties",
        "minProperties",
        "maxProperties",
        "propertyNames",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "enum",
        "const",
    }
)
"""Keywords that a strict tool must not use at the top level of its parameters: each parameter is written separately."""
CONSTRAINT_KEYWORDS: Final = frozenset(
    {
        "pattern",
        "format",
        "minLength",
        "maxLength",
        "anyOf",
        "oneOf",
        "allOf",
        "not",
        "if",
        "$ref",
    }
)
"""Keywords that constrain a string in a way that unquoted text cannot follow; `minLength` only above 1."""
LIST_KEYWORDS: Final = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "enum"})
NESTING_KEYWORDS: Final = LIST_KEYWORDS | {
    "properties",
    "patternProperties",
    "$defs",
    "definitions",
    "items",
    "additionalProperties",
}
"""Keywords whose values contain other schemas or constants. The values of `LIST_KEYWORDS` are lists."""
ANY: Final = "any-value"
ANYTHING: Final[Json] = {"$ref": f"#/$defs/{ANY}"}
"""Reference to the schema of any value without the marks of a `MarkExclusion`, which adds it to `$defs` as `ANY`."""
REFERENCE: Final = re.compile(r"#/(\$defs|definitions)/([^/]+)")
SHARED: Final = frozenset({"$defs", "definitions"})
MAX_DEFINITION_CHARS: Final = 1 << 19
"""Maximum product of the characters of a tool's shared definitions and the number of arguments that need them."""
MAX_ARGUMENTS: Final = 1000
"""Maximum number of arguments of a tool."""
MAX_REFERENCE_STEPS: Final = 8
"""Maximum number of consecutive references, or of references and choices, that are followed: they can be circular."""


@dataclass(frozen=True, slots=True)
class TextArgument:
    """Constraints on an argument that is unquoted text."""

    choices: tuple[str, ...] = ()
    """Allowed values; empty: any."""
    filled: bool = False
    """Whether the text must not be blank."""
    nullable: bool = False
    """Whether null is allowed."""


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a tool, with its schema."""

    name: str
    """Name of the argument."""
    is_required: bool
    """Whether the argument is required."""
    schema: Json
    """Complete schema, with the definitions that it refers to and llguidance's options."""

    def find_text_constraints(self, *, nullable: bool) -> TextArgument | None:
        """Return the constraints of this argument if it is written as unquoted text; None if it is written as JSON.

        `nullable`: whether the parser reads the word null as null. If not, an argument that may be null is JSON.
        Raise `UnsupportedSchema` if the references of its schema are circular or too deep.
        """
        found = _find_text_constraints(_resolve_reference(self.schema))
        return None if found is None or (found.nullable and not nullable) else found


def check_schema(schema: object) -> None:
    """Raise `UnsupportedSchema` if a schema, or a schema nested in it, has the wrong JSON type."""
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        raise UnsupportedSchema(f"{PREFIX}a schema must be an object, true or false")
    found = cast("Json", schema)
    for key in NESTING_KEYWORDS & found.keys():
        part = found[key]
        if isinstance(part, bool) and key in ("items", "additionalProperties"):
            continue
        if not isinstance(part, list if key in LIST_KEYWORDS else dict):
            raise UnsupportedSchema(f"{PREFIX}{key} must be {'a list' if key in LIST_KEYWORDS else 'an object'}")
        if key in ("items", "additionalProperties"):
            check_schema(cast("object", part))
        elif key != "enum":
            parts = cast("list[object]", part) if isinstance(part, list) else list(cast("Json", part).values())
            for nested in parts:
                check_schema(nested)


def list_arguments(tool: ToolSpec) -> list[Argument]:
    """Return the named arguments of a tool. A required argument that has no schema may have any value.

    Raise `UnsupportedSchema` if the schema of the tool is invalid or too large. Raise it also if the tool is strict and
    uses keywords that cannot be enforced.
    """
    root = _resolve_reference(tool.schema)
    if unheld := sorted(UNENFORCED_KEYWORDS & root.keys()) if tool.strict else []:
        raise UnsupportedSchema(f"{PREFIX}the parameters of {tool.name} use {', '.join(unheld)} {HERE}")
    properties = root.get("properties", {})
    if isinstance(properties, dict) and len(cast("Json", properties)) > MAX_ARGUMENTS:
        raise UnsupportedSchema(f"{PREFIX}{tool.name} has more than {MAX_ARGUMENTS} parameters")
    if root.get("type", "object") != "object" or not isinstance(properties, dict):
        raise UnsupportedSchema(f"{PREFIX}the parameters of {tool.name} must be an object")
    needed = list_strings(root.get("required"))
    known = {**dict.fromkeys(needed, True), **cast("dict[str, object]", properties)}
    named = list(cast("dict[str, object]", properties)) + [name for name in needed if name not in properties]
    made = [Argument(name, name in needed, _build_document(known[name], root, tool)) for name in named]
    shared = len(json.dumps([root.get("$defs"), root.get("definitions")]))
    if shared * sum(not SHARED.isdisjoint(argument.schema) for argument in made) > MAX_DEFINITION_CHARS:
        raise UnsupportedSchema(
            f"{PREFIX}the definitions that the parameters of {tool.name} share are too long in total"
        )
    return made


HERE: Final = "at their top level, which cannot be enforced in this model's call format"


def list_strings(found: object) -> list[str]:
    """Return the strings in the list `found` without duplicates, in order; an empty list if `found` is not a list."""
    listed = cast("list[object]", found) if isinstance(found, list) else []
    return list(dict.fromkeys(text for text in listed if isinstance(text, str)))


def _build_document(schema: object, root: Json, tool: ToolSpec) -> Json:
    made = dict(cast("Json", schema)) if isinstance(schema, dict) else {} if schema is True else None
    if made is None:
        raise UnsupportedSchema(f"{PREFIX}a parameter of {tool.name} has no schema")
    for key in SHARED:
        if isinstance(root.get(key), dict) and '"$ref"' in json.dumps(made):
            made[key] = root[key]
    return {**made, "x-guidance": tool.schema.get("x-guidance")}


def _resolve_reference(schema: Json) -> Json:
    """Return the schema with its reference to a definition resolved. Keywords next to the reference take precedence."""
    for _ in range(MAX_REFERENCE_STEPS):
        found = find_definition(schema, schema.get("$ref"))
        if found is None:
            return schema
        schema = {**found, **{key: value for key, value in schema.items() if key != "$ref"}}
    raise UnsupportedSchema(f"{PREFIX}its references are circular or too deep")


def find_definition(document: Json, reference: object) -> Json | None:
    """Return the definition in `document` to which a `$ref` refers; None if `reference` refers to none."""
    match = REFERENCE.fullmatch(reference) if isinstance(reference, str) else None
    if match is None:
        return None
    definitions = document.get(match[1])
    found = cast("Json", definitions).get(match[2]) if isinstance(definitions, dict) else None
    return cast("Json", found) if isinstance(found, dict) else None


def _find_text_constraints(schema: Json) -> TextArgument | None:
    options = schema.get("anyOf", schema.get("oneOf"))
    if isinstance(options, list) and CONSTRAINT_KEYWORDS & schema.keys() <= {"anyOf", "oneOf"} and "type" not in schema:
        return _find_nullable_text(cast("list[object]", options), schema)
    types = set(list_types(schema)) if "type" in schema else None
    found = cast("list[object]", schema.get("enum", [schema["const"]] if "const" in schema else []))
    plain = all(isinstance(value, str) and _is_plain(value) for value in found if value is not None)
    least = schema.get("minLength", 0)
    if CONSTRAINT_KEYWORDS & schema.keys() - {"minLength"} or least not in (0, 1) or not plain:
        return None
    if types is None and not any(isinstance(value, str) for value in found):
        return None
    if types is not None and (not types <= {"string", "null"} or "string" not in types):
        return None
    nullable = "null" in types if types is not None and not found else None in found
    choices = tuple(value for value in found if isinstance(value, str))
    return None if found and not choices else TextArgument(choices, least == 1, nullable)


def _find_nullable_text(options: list[object], schema: Json) -> TextArgument | None:
    """Return the text form of a choice between text and null; None for other choices."""
    others = [option for option in options if option != {"type": "null"}]
    if len(others) != 1 or not isinstance(others[0], dict):
        return None
    definitions = {key: schema[key] for key in SHARED & schema.keys()}
    found = _find_text_constraints(_resolve_reference({**cast("Json", others[0]), **definitions}))
    return replace(found, nullable=True) if found is not None and len(options) == 2 else found


def _is_plain(text: str) -> bool:
    """Return whether text is not empty, has no blanks at its ends, and is not read as null."""
    return bool(text) and text == text.strip() and text.lower() != "null"


def list_types(schema: Json) -> list[str]:
    """Return the types that a schema names; empty if it has no `type`."""
    named = schema.get("type")
    return [named] if isinstance(named, str) else list_strings(named)


def render_parser_tools(tools: Sequence[ToolSpec], *, nullable: bool) -> str:
    """Return the tools as JSON, with types by which a parser distinguishes text (`string`) from JSON (`object`).

    `nullable`: the parser reads the word null as null. Raise `UnsupportedSchema` for a schema that cannot be enforced.
    """
    functions = [{"name": tool.name, "parameters": _build_parser_schema(tool, nullable)} for tool in tools]
    return json.dumps([{"type": "function", "function": function} for function in functions])


def _build_parser_schema(tool: ToolSpec, nullable: bool) -> Json:
    types: dict[str, str] = {}
    for argument in list_arguments(tool):
        types[argument.name] = "object" if argument.find_text_constraints(nullable=nullable) is None else "string"
    return {"type": "object", "properties": {name: {"type": kind} for name, kind in types.items()}}


def list_tool_variants(tools: list[object]) -> tuple[list[object], ...]:
    """Return the tools of a request in a form for parsers, and the original form if it differs. Never raise.

    Parsers read only `type`. If the type is a choice with null, a list or a reference, parsers read a number as text.
    In the first form, a parameter with a single known type besides null therefore has this type as its `type`.
    """
    plain = [_simplify_tool(cast("Json", tool)) if isinstance(tool, dict) else tool for tool in tools]
    return (tools,) if plain == tools else (plain, tools)


def _simplify_tool(tool: Json) -> Json:
    function = tool.get("function")
    parameters = cast("Json", function).get("parameters") if isinstance(function, dict) else None
    properties = cast("Json", parameters).get("properties") if isinstance(parameters, dict) else None
    if not isinstance(properties, dict):
        return tool
    root = cast("Json", parameters)
    plain = {name: _simplify_schema(part_schema, root) for name, part_schema in cast("Json", properties).items()}
    return {**tool, "function": {**cast("Json", function), "parameters": {**root, "properties": plain}}}


def _simplify_schema(schema: object, root: Json) -> object:
    if not isinstance(schema, dict) or isinstance(cast("Json", schema).get("type"), str):
        return cast("object", schema)
    types = _find_types(cast("Json", schema), root, MAX_REFERENCE_STEPS) - {"null"}
    known = len(types) == 1 and types != {"?"}
    return {**cast("Json", schema), "type": types.pop()} if known else cast("object", schema)


def _find_types(schema: object, root: Json, steps: int) -> set[str]:
    """Return the types of a schema, within `steps` references and choices. A question mark stands for unknown types."""
    if not isinstance(schema, dict) or not steps:
        return {"?"}
    found = cast("Json", schema)
    if named := list_types(found):
        return set(named)
    if "$ref" in found:
        return _find_types(find_definition(root, found["$ref"]), root, steps - 1)
    options = found.get("anyOf", found.get("oneOf", found.get("allOf")))
    if isinstance(options, list):
        return {kind for option in cast("list[object]", options) for kind in _find_types(option, root, steps - 1)}
    listed = found.get("enum")
    texts = isinstance(listed, list) and all(isinstance(text, str | None) for text in cast("list[object]", listed))
    return {"string"} if texts and listed else {"?"}


@dataclass(frozen=True)
class MarkExclusion:
    """Exclusion of marks, which a parser takes for the end of a value, from unquoted text and strings of a schema.

    Each of `marks` is a single character, or starts with `<` and contains no other `<`.
    """

    marks: tuple[str, ...]

    @cached_property
    def body(self) -> str:
        """Regular expression of text without the marks: no `<` is followed by the rest of a mark."""
        # Complements and intersections are shorter, but llguidance takes far longer for them.
        signs = "".join(re.escape(mark) for mark in self.marks if len(mark) == 1)
        if "<" in self.marks:
            return f"[^{signs}]*"
        tails = [mark[1:] for mark in self.marks if len(mark) > 1]
        return f"[^<{signs}]*(<{_build_other_text(tails, signs)})*"

    @property
    def pattern(self) -> str:
        """Regular expression `body` with anchors at both ends, for the keyword `pattern` of a JSON schema."""
        return f"^{self.body}$"

    def exclude_from_schema(self, schema: Json) -> Json:
        """Return a copy of a JSON schema that allows no value with a mark (see the module's docstring). Raise
        `UnsupportedSchema` if a fixed value or a named key contains a mark, or for `patternProperties`."""
        made = self._exclude_from_node(schema)
        definitions = cast("Json", made.get("$defs", {}))
        return {**made, "$defs": {**definitions, ANY: self._build_any_schema()}}

    def is_free_of_marks(self, text: str) -> bool:
        """Return whether a text contains no mark."""
        return not any(mark in text for mark in self.marks)

    def _build_any_schema(self) -> Json:
        within: Json = {"patternProperties": {self.pattern: ANYTHING}, "additionalProperties": False}
        return {
            "anyOf": [
                {"type": ["null", "boolean", "number"]},
                {"type": "string", "pattern": self.pattern},
                {"type": "array", "items": ANYTHING},
                {"type": "object", **within},
            ]
        }

    def _exclude_from_value(self, found: object) -> object:
        if found is True:
            return ANYTHING
        return self._exclude_from_node(cast("Json", found)) if isinstance(found, dict) else found

    def _exclude_from_node(self, schema: Json) -> Json:
        made = {key: self._exclude_from_part(key, value) for key, value in schema.items()}
        if not self.is_free_of_marks(json.dumps([schema.get("enum"), schema.get("const")], ensure_ascii=False)):
            raise UnsupportedSchema(f"{PREFIX}it has a value that contains a marker of this model's format")
        if {"$ref", "enum", "const"} & schema.keys() or (
            {"anyOf", "oneOf", "allOf"} & schema.keys() and not list_types(schema)
        ):
            return made
        types = list_types(schema) or ["string", "array", "object"]
        if "string" in types:
            added: Json = {"pattern": self.pattern}
            made |= added if "pattern" not in made else {"allOf": [*cast("list[Json]", made.get("allOf", [])), added]}
        if "array" in types:
            made.setdefault("items", ANYTHING)
        if "object" in types:
            self._close_object(made)
        return made

    def _exclude_from_part(self, key: str, value: object) -> object:
        if key in ("properties", "$defs", "definitions") and isinstance(value, dict):
            return {name: self._exclude_from_value(nested) for name, nested in cast("Json", value).items()}
        if key in ("anyOf", "oneOf", "allOf", "prefixItems") and isinstance(value, list):
            return [self._exclude_from_value(nested) for nested in cast("list[object]", value)]
        return self._exclude_from_value(value) if key in ("items", "additionalProperties") else value

    def _close_object(self, made: Json) -> None:
        """Restrict an object to its named keys or, without any, to keys without a mark."""
        if "patternProperties" in made:
            raise UnsupportedSchema(f"{PREFIX}patternProperties cannot be enforced in this model's format")
        more = made.get("additionalProperties", ANYTHING)
        properties = dict(cast("Json", made["properties"])) if isinstance(made.get("properties"), dict) else {}
        for name in list_strings(made.get("required")):
            properties.setdefault(name, ANYTHING)
        if not all(map(self.is_free_of_marks, properties)):
            raise UnsupportedSchema(f"{PREFIX}it has a key that contains a marker of this model's format")
        if properties:
            made["properties"] = properties
        elif more is not False:
            made["patternProperties"] = {self.pattern: more}
        made["additionalProperties"] = False


def _build_other_text(tails: list[str], signs: str) -> str:
    """Return the expression of text without `<` and the signs that starts with none of the tails."""
    heads: dict[str, list[str]] = {}
    for tail in tails:
        heads.setdefault(tail[0], []).append(tail[1:])
    apart = "".join(map(re.escape, heads))
    going = [re.escape(head) + _build_other_text(rest, signs) for head, rest in heads.items() if "" not in rest]
    return "(" + "|".join([f"[^<{signs}{apart}][^<{signs}]*", *going]) + ")?"
