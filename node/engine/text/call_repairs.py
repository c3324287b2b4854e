"""Repairs of incomplete tool calls, which models often write and mlx-lm's parsers take for text or parse in part.

A block is the text of one or more tool calls between the model's markers (docs/glossary.md).

- Qwen3-Coder: A call without `<tool_call>` before it, often with a lone `</tool_call>` after it (`NAKED`). Several
  functions in one block.
- GLM: A value without `<arg_value>` before it.

The patterns of the parsers search the rest of a block once for each marker that has no end. A block of some kilobytes
could therefore block the engine for seconds. The parsers of Qwen3-Coder, GLM and Gemma get only complete functions,
arguments and calls, which this module finds in one pass.
"""

import re
from collections.abc import Iterator
from typing import Final

from node.engine.text.tool_call_parser import Parse

NAKED: Final = {"qwen3_coder": ("<function=", "</function>")}
"""Markers of a call without the markers of its block, by the name of the parser."""
_FUNCTION_MARK = re.compile("<function=|</function>|<parameter=|</parameter>")
CALL_ENDS: Final = {
    "gemma4": "}",
    "kimi_k2": "<|tool_call_end|>",
    "kimi_k3": "<|close|>call<|sep|>",
    "minimax_m2": "</parameter>\n</invoke>",
    "muse_spark": "</atem:parameter>\n</atem:invoke>",
    "qwen3_coder": "</parameter>\n</function>",
}
"""Ends of calls within a block that can have several calls, by the name of the parser. The text of an argument does not
contain them."""
_KEY, _KEY_END, _VALUE_END = "<arg_key>", "</arg_key>", "</arg_value>"
_VALUE_START = re.compile(r"\A(?:\\n|\s)*<arg_value>")
"""Start of a value in GLM, with the blanks and escaped newlines that mlx-lm's parser permits before it."""
_CALL_START = re.compile(r"call:[\w-]+(?=\{)")
_QUOTE = '<|"|>'
"""Mark at the start and at the end of a text in Gemma 4."""
_QUOTE_OR_BRACE = re.compile(rf"{re.escape(_QUOTE)}|[{{}}]")


def wrap_parser(name: str, parse: Parse) -> Parse:
    """Return a parser that repairs each block before it calls `parse`. Return `parse` itself if this module has no
    repair for it.

    `name` is the name of `parse` in mlx-lm.
    """

    def parse_functions(block: str, tools: list[object]) -> object:
        functions = list(_find_functions(block))
        if len(functions) < 2 and "</function>" in block:
            return parse(block, tools)
        return [parse(function, tools) for function in functions]

    def parse_values(block: str, tools: list[object]) -> object:
        return parse(_rewrite_arguments(block), tools)

    def parse_calls(block: str, tools: list[object]) -> object:
        return [parse(call, tools) for call in _find_braced_calls(block)]

    def parse_first_call(block: str, tools: list[object]) -> object:
        return parse(block[: block.rfind("}") + 1], tools)

    repairs = {
        "qwen3_coder": parse_functions,
        "glm47": parse_values,
        "gemma4": parse_calls,
        "function_gemma": parse_first_call,
    }
    return repairs.get(name, parse)


def _find_functions(block: str) -> Iterator[str]:
    """Yield the functions of a block of Qwen3-Coder with their markers. An end marker in the text of a parameter does
    not end a function."""
    start, in_parameter = -1, False
    for mark in _FUNCTION_MARK.finditer(block):
        if start < 0:
            start = mark.start() if mark[0] == "<function=" else -1
        elif in_parameter:
            in_parameter = mark[0] != "</parameter>"
        elif mark[0] == "</function>":
            yield block[start : mark.end()]
            start = -1
        else:
            in_parameter = mark[0] == "<parameter="


def _rewrite_arguments(block: str) -> str:
    """Return a block of GLM with the name of the function and its complete arguments, all with the start of their
    value. Return a block without arguments unchanged."""
    first = at = block.find(_KEY)
    if first < 0:
        return block
    arguments = list[str]()
    while (
        (start := block.find(_KEY, at)) >= 0
        and (end := block.find(_KEY_END, start)) >= 0
        and (at := block.find(_VALUE_END, end)) >= 0
    ):
        value = _VALUE_START.sub("", block[end + len(_KEY_END) : at])
        arguments.append(f"{block[start:end]}{_KEY_END}<arg_value>{value}{_VALUE_END}")
    return block[:first] + ("".join(arguments) or _KEY)


def _find_braced_calls(block: str) -> Iterator[str]:
    """Yield the calls of a block of Gemma 4, each with the braces of its arguments, up to the first call without its
    last brace."""
    at = 0
    while (start := _CALL_START.search(block, at)) is not None:
        depth, quoted = 0, False
        for mark in _QUOTE_OR_BRACE.finditer(block, start.end()):
            if mark[0] == _QUOTE:
                quoted = not quoted
            elif not quoted:
                depth += 1 if mark[0] == "{" else -1
            if not depth:
                break
        else:
            return
        at = mark.end()
        yield block[start.start() : at]
