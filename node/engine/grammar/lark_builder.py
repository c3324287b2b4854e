"""The grammar of a request's calls while it is written: rules and terminals in Lark, and the JSON schemas beside them.

A terminal is one lexeme, and llguidance takes the longest. So text that a mark ends is written together with the mark
as one lexeme, where the mark is text too, and the text cannot contain it; where it is a token of the model's own, no
text can be mistaken for it.
"""

import json
from dataclasses import dataclass, field
from typing import Final

from node.engine.grammar.tool_arguments import Guard, Text
from node.engine.grammar.tool_spec import PREFIX, Calling, Json, Unfit

LONGEST: Final = 1 << 18
"""Characters of all schemas together: the definitions that several of them need are written into each."""
MOST_RULES: Final = 3000
"""One to three for a parameter."""
BLANKS: Final = "[\\s\\x1c-\\x1f]"
"""What Python's `strip` takes off."""
_SLASH: Final = "\\/"


@dataclass(slots=True)
class Sheet:
    """Collects what forms write. Whatever is written twice gets one name."""

    calling: Calling
    rules: dict[str, str] = field(default_factory=dict[str, str])
    schemas: dict[str, Json] = field(default_factory=dict[str, Json])
    size: int = 0

    def mark(self, text: str) -> str:
        """Write text with the model's own tokens in it."""
        return self.calling.mark(text)[0]

    def json(self, schema: Json) -> str:
        """Add JSON of a schema."""
        written = json.dumps(schema)
        if written not in self.schemas:
            self.size += len(written)
            if self.size > LONGEST:
                raise Unfit(f"{PREFIX}its schemas have more than {LONGEST} characters together")
            self.schemas[written] = {"name": f"json_{len(self.schemas)}", "json_schema": schema}
        return f"@{self.schemas[written]['name']}"

    def rule(self, body: str, name: str = "part") -> str:
        """Add a rule or, for a name in capitals, a terminal; give what it is called."""
        key = f"{name}: {body}"
        if len(self.rules) > MOST_RULES:
            raise Unfit(f"{PREFIX}its tools have too many parameters together, or too much within them")
        return self.rules.setdefault(key, f"{name}_{len(self.rules)}")

    def text(self, asked: Text, end: str, guard: Guard, *, null: bool, section: bool = False) -> str:
        """Write text and its end, without the marks of the guard. With `null` the word null is no text; in a `section`
        what ends one is none either."""
        if asked.choices:
            chosen = [json.dumps(one) for one in (*asked.choices, *(["null"] if asked.nullable else []))]
            return f"({' | '.join(chosen)}) {self.mark(end)}"
        masks = [f"/{guard.body.replace('/', _SLASH)}/"]
        if null and not asked.nullable:
            masks.append(f"~/{BLANKS}*((?i:null){BLANKS}*){'?' if asked.filled else ''}/")
        elif asked.filled:
            masks.append(f"~/{BLANKS}*/")
        if section:
            masks.append("~/(?s:.*)]]>(?s:.*)/")
        body = self.rule(" & ".join(masks), "BODY")
        marked, token = self.calling.mark(end)
        return f"{body} {marked}" if token else self.rule(f"{body} {json.dumps(end)}", "TEXT")

    def written(self) -> str:
        """Give all rules."""
        return "".join(f"{name}: {key.partition(': ')[2]}\n" for key, name in self.rules.items())

    def parts(self) -> list[Json]:
        """Give all schemas."""
        return list(self.schemas.values())
