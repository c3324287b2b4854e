"""Builder of a Lark grammar for a request's calls: rules and terminals, with the JSON schemas that they use.

A mark ends an unquoted value, such as `</parameter>`. llguidance matches a terminal as one lexeme, and takes the
longest match. If a mark is ordinary text, value and mark are therefore one terminal, and the value cannot contain the
mark. A mark that is a special token of the model follows the terminal of the value, because no text can contain it.
"""

import json
from dataclasses import dataclass, field
from typing import Final

from node.engine.grammar.tool_arguments import MarkExclusion, TextArgument
from node.engine.grammar.tool_spec import PREFIX, Json, ToolCallFormat, UnsupportedSchema

MAX_SCHEMAS_CHARS: Final = 1 << 18
"""Maximum characters of all schemas of one grammar together; shared definitions are repeated in each schema."""
MAX_RULES: Final = 3000
"""Maximum number of rules of one grammar; a parameter of a tool takes one to three."""
BLANKS: Final = "[\\s\\x1c-\\x1f]"
"""Regular expression of one blank that Python's `strip` removes."""
_SLASH: Final = "\\/"


@dataclass(slots=True)
class LarkBuilder:
    """Builder of one Lark grammar: collects rules and JSON schemas. Equal rules share a name, as do equal schemas."""

    call_format: ToolCallFormat
    """Format of the model's calls."""
    rules: dict[str, str] = field(default_factory=dict[str, str])
    """Names of the rules, by the text `name: body` with which they were added."""
    schemas: dict[str, Json] = field(default_factory=dict[str, Json])
    """Entries of llguidance's list of grammars (`name` and `json_schema`), by the JSON text of their schema."""
    size: int = 0
    """Characters of all schemas together."""

    def render_literal(self, text: str) -> str:
        """Return the Lark expression that matches `text`, with the special tokens of the model as tokens."""
        return self.call_format.render_literal(text)[0]

    def add_schema(self, schema: Json) -> str:
        """Add a JSON schema. Return the Lark reference to a value of that schema, such as `@json_0`.

        Raise `UnsupportedSchema` if all added schemas together have more than `MAX_SCHEMAS_CHARS` characters.
        """
        written = json.dumps(schema)
        if written not in self.schemas:
            self.size += len(written)
            if self.size > MAX_SCHEMAS_CHARS:
                raise UnsupportedSchema(f"{PREFIX}its schemas have more than {MAX_SCHEMAS_CHARS} characters in total")
            self.schemas[written] = {"name": f"json_{len(self.schemas)}", "json_schema": schema}
        return f"@{self.schemas[written]['name']}"

    def add_rule(self, body: str, name: str = "part") -> str:
        """Add a rule or, if `name` is in capitals, a terminal. Return its complete name, which begins with `name`.
        Equal rules get the same name. Raise `UnsupportedSchema` for more than `MAX_RULES` rules in total."""
        key = f"{name}: {body}"
        if key not in self.rules and len(self.rules) >= MAX_RULES:
            raise UnsupportedSchema(f"{PREFIX}its tools have too many or too large parameters")
        return self.rules.setdefault(key, f"{name}_{len(self.rules)}")

    def add_text(
        self, argument: TextArgument, end: str, guard: MarkExclusion, *, null: bool, section: bool = False
    ) -> str:
        """Return the Lark expression for unquoted text under the constraints `argument`, with the mark `end` after it.
        The text contains no mark of `guard`, except in `argument.choices`, which are not checked.

        `null`: the parser reads the word null as null, which is therefore excluded unless `argument` allows null.
        `section`: the text is in a CDATA section, whose end is therefore excluded. Rules are added as needed. Raise
        `UnsupportedSchema` for more than `MAX_RULES` rules in total.
        """
        if argument.choices:
            chosen = [json.dumps(choice) for choice in (*argument.choices, *(["null"] if argument.nullable else []))]
            return f"({' | '.join(chosen)}) {self.render_literal(end)}"
        masks = [f"/{guard.body.replace('/', _SLASH)}/"]
        if null and not argument.nullable:
            masks.append(f"~/{BLANKS}*((?i:null){BLANKS}*){'?' if argument.filled else ''}/")
        elif argument.filled:
            masks.append(f"~/{BLANKS}*/")
        if section:
            masks.append("~/(?s:.*)]]>(?s:.*)/")
        body = self.add_rule(" & ".join(masks), "BODY")
        marked, token = self.call_format.render_literal(end)
        return f"{body} {marked}" if token else self.add_rule(f"{body} {json.dumps(end)}", "TEXT")

    def render_rules(self) -> str:
        """Return all rules and terminals as Lark text, one per line."""
        return "".join(f"{name}: {key.partition(': ')[2]}\n" for key, name in self.rules.items())

    def list_schemas(self) -> list[Json]:
        """Return all schemas with their names, for llguidance's list of grammars."""
        return list(self.schemas.values())
