"""Tool formats with arguments in brackets: keywords of a Python call, or an object with unquoted keys.

Gemma encloses text in its own marks. Schemas are therefore rendered as rules here, except schemas of numbers, true,
false and null:

    value ─┬─ number, true, false, null      JSON, from the schema by llguidance
           ├─ <mark>text<mark>
           └─ {key:value,…}  [value,…]       where the parser reads more than one level
"""

import json
import keyword
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from node.engine.grammar.lark_builder import LarkBuilder
from node.engine.grammar.tool_arguments import (
    Argument,
    MarkExclusion,
    TextArgument,
    find_definition,
    list_arguments,
    list_strings,
    list_types,
)
from node.engine.grammar.tool_spec import MAX_JSON_DEPTH, PREFIX, Json, ToolSpec, UnsupportedSchema

KEY: Final = re.compile(r"\w+", re.ASCII)
"""Pattern of a key or name that is written without quotes."""
SCALARS: Final = ("integer", "number", "boolean", "null")
"""Types of values that llguidance renders from their schema."""
BOUNDS: Final = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
"""Keywords that bound a number."""
KINDS: Final = ("string", *SCALARS, "array", "object")
"""All types of values."""
UNRENDERED_KEYWORDS: Final = frozenset(
    {
        "allOf",
        "not",
        "if",
        "patternProperties",
        "uniqueItems",
        "contains",
        "pattern",
        "format",
        "minProperties",
        "maxProperties",
        "propertyNames",
        "dependentRequired",
        "dependentSchemas",
        "dependencies",
        "unevaluatedProperties",
        "unevaluatedItems",
    }
)
"""Keywords of schemas that cannot be rendered as rules. A strict tool must not use them; otherwise they are ignored."""


def render_keyword_call(builder: LarkBuilder, tool: ToolSpec) -> str:
    """Return the Lark expression for a call of `tool` in Python notation, and add the rules that it uses to `builder`.

    The values are JSON, because mlx-lm's parser also reads true, false and null. Raise `UnsupportedSchema` for names or
    schemas that the format cannot represent.
    """
    for name in (tool.name, *(argument.name for argument in list_arguments(tool))):
        if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
            raise UnsupportedSchema(
                f"{PREFIX}{name[:40]!r} is not a Python name, and this model writes calls as Python"
            )
    parts = [
        (f"{json.dumps(argument.name + '=')} {_render_literal(builder, argument)}", argument.is_required)
        for argument in list_arguments(tool)
    ]
    return f'{json.dumps(tool.name + "(")} {join_members(builder, parts)} ")"'


def _render_literal(builder: LarkBuilder, argument: Argument) -> str:
    value = builder.add_schema(argument.schema)
    free = list_types(argument.schema) == ["boolean"] and not {"enum", "const"} & argument.schema.keys()
    return f'("True" | "False" | {value})' if free else value


def join_members(builder: LarkBuilder, parts: Sequence[tuple[str, bool]]) -> str:
    """Add rules for `parts` in this order, separated by commas. Return the name of the rule for the whole list.

    Each part is a Lark expression, and whether the part is required. The answer may omit other parts. Raise
    `UnsupportedSchema` for too many rules.
    """
    first = more = builder.add_rule('""')
    for part, needed in reversed(parts):
        first = builder.add_rule(f"{part} {more}" if needed else f"{part} {more} | {first}")
        more = builder.add_rule(f'"," BLANK? {part} {more}' if needed else f'("," BLANK? {part})? {more}')
    return first


def render_braced_call(builder: LarkBuilder, tool: ToolSpec, quote: str, *, nested: bool) -> str:
    """Return the Lark expression for a call of `tool` in Gemma's notation, and add the rules that it uses to `builder`.

    `quote` is the quotation mark around strings. `nested`: mlx-lm's parser of the format reads nested objects and
    lists. Raise `UnsupportedSchema` for names or schemas that the format cannot represent.
    """
    if not KEY.fullmatch(tool.name) and not (nested and KEY.fullmatch(tool.name.replace("-", "_"))):
        raise UnsupportedSchema(f"{PREFIX}the tool {tool.name} has a name that this model's format cannot represent")
    rules = GemmaArgumentRules(builder, tool, quote, nested)
    parts = [
        (rules.render_member(argument.name, argument.schema), argument.is_required) for argument in list_arguments(tool)
    ]
    return f'{json.dumps(f"call:{tool.name}{{")} {rules.join_members(parts)} "}}"'


@dataclass(slots=True)
class GemmaArgumentRules:
    """Builder of the rules of one tool's arguments in Gemma's notation."""

    builder: LarkBuilder
    """Builder of the whole grammar, which collects the rules."""
    tool: ToolSpec
    """Tool whose arguments are rendered."""
    quote: str
    """Quotation mark of the model's format, before and after a string."""
    nested: bool
    """Whether mlx-lm's parser of the format reads nested objects and lists."""
    references: dict[str, str] = field(default_factory=dict[str, str])
    """Names of the rules for references in schemas, by reference. The rule for any value has the key `anything`."""
    level: int = 0
    """Current depth of references."""

    @property
    def guard(self) -> MarkExclusion:
        """Exclusion of the marks at which the parser would end a value or the call, for text of the arguments."""
        return MarkExclusion((self.quote, self.builder.call_format.markers[1], "\0", *(() if self.nested else ("}",))))

    def render_member(self, name: str, schema: Json) -> str:
        """Return the Lark expression for the key `name` and a value with the schema `schema`. Raise `UnsupportedSchema`
        for a name or schema that the format cannot represent. For a tool that is not strict, `UNRENDERED_KEYWORDS` are
        ignored."""
        if not KEY.fullmatch(name):
            raise UnsupportedSchema(
                f"{PREFIX}the parameter {name[:40]!r} has a name that this model's format cannot represent"
            )
        return f"{json.dumps(name + ':')} {self.render_value(schema, schema)}"

    def join_members(self, parts: Sequence[tuple[str, bool]]) -> str:
        """Add rules for keys with values, separated by commas without blanks, because a key must directly follow a
        bracket or a comma. Return the name of the rule for the whole list.

        Each of `parts` is the expression for a key and its value (`render_member`), and whether the key is required.
        Raise `UnsupportedSchema` for too many rules.
        """
        first = more = self.builder.add_rule('""')
        for part, needed in reversed(parts):
            first = self.builder.add_rule(f"{part} {more}" if needed else f"{part} {more} | {first}")
            more = self.builder.add_rule(f'"," {part} {more}' if needed else f'("," {part})? {more}')
        return first

    def render_value(self, found: object, document: Json) -> str:
        """Return the Lark expression for a value with the schema `found`.

        `found` is a part of `document`, the schema that contains the definitions. Raise `UnsupportedSchema` for a
        schema that the format cannot represent. For a tool that is not strict, `UNRENDERED_KEYWORDS` are ignored.
        """
        schema: Json = cast("Json", found) if isinstance(found, dict) else {}
        if not isinstance(found, dict) and found is not True:
            raise UnsupportedSchema(f"{PREFIX}a parameter of {self.tool.name} has no schema")
        unwritten = sorted(UNRENDERED_KEYWORDS & schema.keys())
        if unwritten and self.tool.strict:
            raise UnsupportedSchema(
                f"{PREFIX}{self.tool.name} uses {', '.join(unwritten)}, which cannot be enforced in this model's format"
            )
        if "$ref" in schema:
            return self._render_reference(schema["$ref"], document)
        options = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(options, list):
            return self._join_options([self.render_value(option, document) for option in cast("list[object]", options)])
        if "enum" in schema or "const" in schema:
            chosen = cast("list[object]", schema["enum"] if "enum" in schema else [schema["const"]])
            return self._join_options([self._render_constant(value) for value in chosen])
        allowed = list_types(schema) or [kind for kind in KINDS if self.nested or kind not in ("array", "object")]
        return self._join_options([self._render_type(kind, schema, document) for kind in allowed])

    def _join_options(self, options: Sequence[str]) -> str:
        if not options:
            raise UnsupportedSchema(f"{PREFIX}it allows no text")
        return f"({' | '.join(dict.fromkeys(options))})"

    def _render_reference(self, reference: object, document: Json) -> str:
        key = str(reference)
        if key not in self.references:
            found = find_definition(document, reference)
            if found is None:
                raise UnsupportedSchema(f"{PREFIX}the reference {key[:80]} has no target")
            self.references[key] = f"referred_{len(self.references)}_{len(self.builder.rules)}"
            self.level += 1
            if self.level > MAX_JSON_DEPTH:
                raise UnsupportedSchema(f"{PREFIX}its references are nested deeper than {MAX_JSON_DEPTH} levels")
            body = self.render_value(found, document)
            self.level -= 1
            self.builder.rules[f"{self.references[key]}: {body}"] = self.references[key]
        return self.references[key]

    def _render_type(self, kind: str, schema: Json, document: Json) -> str:
        if kind == "string":
            return self._render_string(schema)
        if kind in SCALARS:
            bounds = {key: bound for key, bound in schema.items() if key in BOUNDS}
            return self.builder.add_schema({**bounds, "type": kind, "x-guidance": self.tool.schema["x-guidance"]})
        if kind not in KINDS:
            raise UnsupportedSchema(f"{PREFIX}unknown type {kind[:40]}")
        if not self.nested:
            raise UnsupportedSchema(
                f"{PREFIX}a parameter of {self.tool.name} is an {kind}, and this model's format supports only texts, "
                "numbers, true, false and null"
            )
        return self._render_array(schema, document) if kind == "array" else self._render_object(schema, document)

    def _render_string(self, schema: Json) -> str:
        least, most = schema.get("minLength", 0), schema.get("maxLength")
        if self.tool.strict and (least not in (0, 1) or most is not None):
            raise UnsupportedSchema(
                f"{PREFIX}{self.tool.name} limits the length of a text, which cannot be enforced in this model's format"
            )
        text = self.builder.add_text(TextArgument(filled=least == 1), self.quote, self.guard, null=False)
        return f"{self.builder.render_literal(self.quote)} {text}"

    def _render_constant(self, value: object) -> str:
        if isinstance(value, str):
            if not self.guard.is_free_of_marks(value):
                raise UnsupportedSchema(f"{PREFIX}it has a value that contains a marker of this model's format")
            quote = self.builder.render_literal(self.quote)
            return f"{quote} {json.dumps(value) if value else ''} {quote}"
        if isinstance(value, dict | list):
            raise UnsupportedSchema(
                f"{PREFIX}it has an object or a list as a fixed value, which cannot be enforced in this model's format"
            )
        return json.dumps(json.dumps(value))

    def _render_array(self, schema: Json, document: Json) -> str:
        first = [self.render_value(part, document) for part in cast("list[object]", schema.get("prefixItems", []))]
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if schema.get("items") is False and isinstance(most, int | None):
            most = len(first) if most is None else min(most, len(first))
        if (
            not isinstance(least, int)
            or not isinstance(most, int | None)
            or (most is not None and most < max(least, 0))
        ):
            raise UnsupportedSchema(f"{PREFIX}a list cannot have {least} to {most} items")
        if most is not None and most <= len(first):
            return f'"[" {self._join_items(first[:most], least, "")} "]"'
        item = (
            self.builder.add_rule(self.render_value(schema["items"], document))
            if "items" in schema
            else self._render_anything()
        )
        first = first or [item]
        times = f"{{{max(least - len(first), 0)},{'' if most is None else most - len(first)}}}"
        rest = f'("," {item}){times}'
        return f'"[" {self._join_items(first, least, rest)} "]"'

    def _join_items(self, items: Sequence[str], least: int, rest: str) -> str:
        """Return Lark's expression for a list of these items and `rest`, of which the first `least` are required."""
        for at in reversed(range(len(items))):
            comma = '"," ' if at else ""
            listed = self.builder.add_rule(f"{comma}{items[at]} {rest}")
            rest = listed if at < least else f"{listed}?"
        return rest

    def _render_object(self, schema: Json, document: Json) -> str:
        properties = cast("Json", schema.get("properties") or {})
        needed = list_strings(schema.get("required"))
        known = {**properties, **{name: True for name in needed if name not in properties}}
        if not known:
            return self._render_mapping(schema.get("additionalProperties", True), document)
        parts: list[tuple[str, bool]] = []
        for name, member_schema in known.items():
            if not KEY.fullmatch(name):
                raise UnsupportedSchema(f"{PREFIX}the key {name[:40]!r} cannot be represented in this model's format")
            parts.append((f"{json.dumps(name + ':')} {self.render_value(member_schema, document)}", name in needed))
        return f'"{{" {self.join_members(parts)} "}}"'

    def _render_mapping(self, values: object, document: Json) -> str:
        """Return Lark's expression for an object without named keys."""
        if values is False:
            return '"{}"'
        value = (
            self._render_anything() if values is True else self.builder.add_rule(self.render_value(values, document))
        )
        pair = self.builder.add_rule(f"{self.builder.add_rule('/[A-Za-z_][A-Za-z0-9_]*:/', 'KEY')} {value}")
        return f'"{{" ({pair} ("," {pair})*)? "}}"'

    def _render_anything(self) -> str:
        """Return the name of the rule for any value."""
        if "anything" not in self.references:
            self.references["anything"] = f"anything_{len(self.builder.rules)}"
            body = self._join_options([self._render_type(kind, {}, {}) for kind in KINDS])
            self.builder.rules[f"{self.references['anything']}: {body}"] = self.references["anything"]
        return self.references["anything"]
