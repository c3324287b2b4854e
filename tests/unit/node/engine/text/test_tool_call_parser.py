"""Blocks of calls that an answer did not finish: the parts that can consist of complete calls."""

import pytest

from node.engine.text.tool_call_parser import ToolCallParser


@pytest.mark.parametrize(
    ("block", "parts"),
    [
        ('[{"name": "f"}]', ['[{"name": "f"}]', ""]),
        ('{"name": "f"} \n', ['{"name": "f"} \n', ""]),
        ('{"name": "f"}<call>{"na', ['{"name": "f"}']),
        ('{"name": "f"}<ca', ['{"name": "f"}', ""]),
        ('{"name": "f"', [""]),
    ],
)
def test_calls_that_end_with_the_answer_are_complete_after_a_closing_bracket(block: str, parts: list[str]) -> None:
    calls = ToolCallParser("c", None, [[]], "")
    assert calls.list_complete_parts(block, "<call>") == parts


@pytest.mark.parametrize(
    ("call_end", "block", "parts"),
    [("</one>", "a</one>b</one>c", ["a</one>b</one>"]), ("</one>", "a", []), ("", "a</one>b", [])],
)
def test_calls_before_an_end_mark_are_complete_where_a_block_has_several(
    call_end: str, block: str, parts: list[str]
) -> None:
    calls = ToolCallParser("c", None, [[]], "</calls>", call_end=call_end)
    assert calls.list_complete_parts(block, "<calls>") == parts
