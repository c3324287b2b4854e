"""Limits of a grammar under construction."""

from typing import cast

import pytest
from llguidance import LLMatcher, LLTokenizer

from node.engine.grammar import lark_builder
from node.engine.grammar.compiler import GrammarGuide
from node.engine.grammar.lark_builder import LarkBuilder
from node.engine.grammar.tool_arguments import MarkExclusion, TextArgument
from node.engine.grammar.tool_spec import Json, ToolCallFormat, UnsupportedSchema, quote_marker
from node.engine.text.tokenizer_loader import load
from tests import models


def test_a_grammar_has_at_most_the_limit_of_rules_and_equal_rules_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lark_builder, "MAX_RULES", 2)
    builder = LarkBuilder(cast("ToolCallFormat", None))
    assert [builder.add_rule("a"), builder.add_rule("b"), builder.add_rule("a")] == ["part_0", "part_1", "part_0"]
    with pytest.raises(UnsupportedSchema, match="too many or too large parameters"):
        builder.add_rule("c")
    assert len(builder.rules) == 2


FORMAT = ToolCallFormat("any", ("<call>", "</call>"), "", quote_marker)


@pytest.fixture(scope="module")
def tokens() -> LLTokenizer:
    return GrammarGuide.of(load(models.path("llama"))).ll_tokenizer


@pytest.mark.parametrize(
    ("argument", "options", "accepted", "refused"),
    [
        (TextArgument(), {"null": False}, ["", "a b", "null", "a < b", " "], ["a</p>", "</p>"]),
        (TextArgument(), {"null": True}, ["", "nulls", "a null"], ["null", " NULL\n", "Null"]),
        (TextArgument(nullable=True), {"null": True}, ["null", "", "a"], ["</p>"]),
        (TextArgument(filled=True), {"null": False}, ["a", " a ", "null"], ["", " ", "\n\t"]),
        (TextArgument(filled=True), {"null": True}, ["a", "nullable"], ["", " ", "null", " null "]),
        (TextArgument(filled=True, nullable=True), {"null": True}, ["null", "a"], ["", "\n"]),
        (TextArgument(), {"null": False, "section": True}, ["a ]] >", "a"], ["a ]]> b"]),
        (TextArgument(choices=("red", "a/b")), {"null": True}, ["red", "a/b"], ["", "green", "null", "redred"]),
        (TextArgument(choices=("red",), nullable=True), {"null": True}, ["red", "null"], ["", "NULL"]),
    ],
    ids=str,
)
def test_unquoted_text_ends_at_its_mark_and_is_never_read_as_another_value(
    tokens: LLTokenizer, argument: TextArgument, options: dict[str, bool], accepted: list[str], refused: list[str]
) -> None:
    builder = LarkBuilder(FORMAT)
    text = builder.add_text(argument, "</p>", MarkExclusion(("</p>",)), **options)
    matcher = LLMatcher(tokens, f"start: {text}\n{builder.render_rules()}", log_level=0)
    assert not matcher.get_error()

    def accepts(content: str) -> bool:
        ids = tokens.tokenize_str(f"{content}</p>")
        walk = matcher.deep_copy()
        return walk.validate_tokens(ids) == len(ids) and walk.consume_tokens(ids) and walk.is_accepting()

    assert [content for content in accepted if not accepts(content)] == []
    assert [content for content in refused if accepts(content)] == []


def test_schemas_have_at_most_the_limit_of_characters_and_equal_ones_count_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first: Json = {"type": "string"}
    second: Json = {"type": "number"}
    monkeypatch.setattr(lark_builder, "MAX_SCHEMAS_CHARS", 2 * len('{"type": "string"}'))
    builder = LarkBuilder(FORMAT)
    assert [builder.add_schema(schema) for schema in (first, second, first)] == ["@json_0", "@json_1", "@json_0"]
    with pytest.raises(UnsupportedSchema, match="more than 36 characters in total"):
        builder.add_schema({})
    assert builder.list_schemas() == [
        {"name": "json_0", "json_schema": first},
        {"name": "json_1", "json_schema": second},
    ]
