"""Limits of a grammar under construction."""

from typing import cast

import pytest

from node.engine.grammar import lark_builder
from node.engine.grammar.lark_builder import LarkBuilder
from node.engine.grammar.tool_spec import ToolCallFormat, UnsupportedSchema


def test_a_grammar_has_at_most_the_limit_of_rules_and_equal_rules_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lark_builder, "MAX_RULES", 2)
    builder = LarkBuilder(cast("ToolCallFormat", None))
    assert [builder.add_rule("a"), builder.add_rule("b"), builder.add_rule("a")] == ["part_0", "part_1", "part_0"]
    with pytest.raises(UnsupportedSchema, match="too many or too large parameters"):
        builder.add_rule("c")
    assert len(builder.rules) == 2
