"""Repairs of tool calls that models often write incompletely. mlx-lm's parsers take them for text, or lose arguments.

A block is the text of one or more tool calls between the model's markers (docs/glossary.md).

- Qwen3-Coder: A call without `<tool_call>` before it, often with a lone `</tool_call>` after it (`NAKED`). Several
  functions in one block.
- GLM: A value without `<arg_value>` before it.
"""

import re
from typing import Final

from node.engine.text.tool_call_parser import Parse

NAKED: Final = {"qwen3_coder": ("<function=", "</function>")}
"""Markers of a call without the markers of its block, by the name of the parser."""
_FUNCTION = re.compile(r"<function=.*?</function>", re.DOTALL)
_NO_VALUE = re.compile(r"</arg_key>(?!\s*<arg_value>)")


def wrap_parser(name: str, parse: Parse) -> Parse:
    """Return a parser that repairs each block and passes it to `parse`. Return `parse` itself if this module has no
    repair for it.

    `name` is the name of `parse` in mlx-lm.
    """

    def parse_functions(block: str, tools: list[object]) -> object:
        functions = _FUNCTION.findall(block)
        return parse(block, tools) if len(functions) < 2 else [parse(function, tools) for function in functions]

    def parse_values(block: str, tools: list[object]) -> object:
        return parse(_NO_VALUE.sub("</arg_key><arg_value>", block), tools)

    return {"qwen3_coder": parse_functions, "glm47": parse_values}.get(name, parse)
