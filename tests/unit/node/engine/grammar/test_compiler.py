"""A requested format becomes a grammar or a refusal, and neither takes long for any client."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.engine.grammar import sandbox
from node.engine.grammar.compiler import KEPT, LONGEST, Grammars
from node.engine.grammar.constrained_splitter import Calls, Thought
from node.engine.grammar.sandbox import TOO_LONG, Vetting
from node.engine.grammar.tool_spec import DEEPEST, Unfit
from node.engine.requests.preflight import Shape, impossible
from node.engine.requests.preparer import Door
from node.engine.text.tokenizer import Prompt, Tokenizer, load
from node.models.catalogue import Library
from node.settings import ModelSettings
from tests import models
from wire.frames import Generate, Grammar, Message, Params
from wire.refusals import Code
from wire.report import Model

SECONDS = 0.5
"""Limit in seconds of a refusal here, on a busy machine; the benchmark measures 0.1 s."""
PROMPT = Prompt((1,), thinking=False)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load(models.path("llama"))


class Asked(Vetting):
    """A vetting that records its grammars."""

    def __init__(self) -> None:
        super().__init__()
        self.grammars: list[str] = []

    def why_not(self, grammar: str) -> str:
        """Record the grammar and vet it."""
        self.grammars.append(grammar)
        return super().why_not(grammar)


class Refusing(Vetting):
    """A vetting that refuses every grammar as too long."""

    def why_not(self, grammar: str) -> str:
        """Return that the grammar takes too long."""
        return TOO_LONG


@pytest.fixture(scope="module")
def asked() -> Asked:
    return Asked()


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer, asked: Asked) -> Grammars:
    made = Grammars(asked)
    made.compile(tokenizer, Grammar("json_object"), "", PROMPT, one=False)
    return made


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


PATTERNS = [f".*a.{{{count}}}b.*" for count in range(30)]
HOSTILE = {
    "remote reference": Grammar("json_schema", '{"$ref": "http://127.0.0.1:1/schema.json"}'),
    "file": Grammar("json_schema", '{"$ref": "file:///etc/passwd"}'),
    "itself": Grammar("json_schema", '{"$ref": "#"}'),
    "all of itself": Grammar("json_schema", '{"allOf": [{"$ref": "#"}]}'),
    "a megabyte": Grammar("json_schema", json.dumps({"enum": ["x" * 1_000_000]})),
    "deep": Grammar("json_schema", nested(DEEPEST + 1)),
    "deeper than any stack": Grammar("json_schema", nested(12_000)),
    "very many values": Grammar("json_schema", json.dumps({"enum": [f"{number}v" for number in range(100_000)]})),
    "very many properties": Grammar(
        "json_schema", json.dumps({"type": "object", "properties": {f"p{number}": {} for number in range(9_000)}})
    ),
    "patterns that meet": Grammar("json_schema", json.dumps({"allOf": [{"pattern": one} for one in PATTERNS]})),
    "patterns that meet, in Lark": Grammar("lark", "start: A\nA: " + " & ".join(f"/{one}/" for one in PATTERNS)),
    "repeated repetitions": Grammar("regex", "(((((a{10}){10}){10}){10}){10}){100}"),
    "unfinished pattern": Grammar("regex", "("),
    "look ahead": Grammar("regex", "(?=a)b"),
    "back reference": Grammar("regex", r"(a)\1"),
    "type": Grammar("json_schema", '{"type": "nope"}'),
    "no schema": Grammar("json_schema", "[]"),
    "no JSON": Grammar("json_schema", "{"),
    "half a sign": Grammar("json_schema", '{"const": "\\ud800"}'),
    "blanks": Grammar("json_object", "", "("),
    "unknown kind": Grammar("poem"),
    "no rules": Grammar("lark", ""),
    "noise": Grammar("lark", "\0\ufffd"),
    "a rule of itself": Grammar("lark", "start: start"),
    "deep Lark": Grammar("lark", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "another file": Grammar("lark", "%import common.INT\nstart: INT @other"),
    "long GBNF": Grammar("lark", 'root ::= "a"' + ' | "a"' * 3000),
    "broken GBNF": Grammar("lark", "root ::= ("),
    "no choices": Grammar("choice", "[]"),
    "choices that are none": Grammar("choice", '["a", 1]'),
    "an empty choice": Grammar("choice", '["a", ""]'),
    "calls of nothing": Grammar(calls="required"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_or_means_harm_is_refused_in_no_time(
    name: str, tokenizer: Tokenizer, grammars: Grammars, asked: Asked
):
    asked.why_not('{"grammars":[{"lark_grammar":"start: \\"a\\""}]}')  # its process may have to start first
    begun = time.perf_counter()
    with pytest.raises(Unfit) as found:
        grammars.compile(tokenizer, HOSTILE[name], "", PROMPT, one=False)
    assert time.perf_counter() - begun < SECONDS
    assert 0 < len(str(found.value)) < 500


@pytest.fixture(scope="module")
def door(tokenizer: Tokenizer) -> Door:
    folder = models.path("llama")
    library = Library(ModelSettings(folders=(str(folder),), hub=False))
    library.scan()
    return Door(library)


def request(grammar: Grammar, tools: str = "") -> Generate:
    name = Path(models.path("llama")).name
    return Generate(1, 1, "r", name, (Message("user", "Hi"),), Params(grammar=grammar), 0, tools=tools)


KEYWORDS = (
    "type",
    "properties",
    "items",
    "anyOf",
    "allOf",
    "$ref",
    "enum",
    "pattern",
    "minimum",
    "required",
    "const",
    "format",
    "additionalProperties",
    "minItems",
    "maxLength",
    "$defs",
    "x-guidance",
)
WORDS = ("object", "string", "array", "integer", "#", "#/$defs/a")
JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda part: (
        st.lists(part, max_size=3)
        | st.dictionaries(st.sampled_from(KEYWORDS), part | st.sampled_from(WORDS), max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(JSONS, st.sampled_from(["json_schema", "choice"]))
def test_no_schema_ever_raises_out_of_the_door(door: Door, value: object, kind: str):
    prepared = door.prepare(request(Grammar(kind, json.dumps(value))))
    assert (prepared.grammar is None) == (prepared.refused is not None)
    assert prepared.refused is None or prepared.refused.code is Code.INVALID


@settings(max_examples=100, deadline=None)
@given(
    st.text(max_size=40),
    st.sampled_from(["json_schema", "json_object", "regex", "choice", "lark", ""]),
    st.text(max_size=5),
)
def test_no_text_ever_raises_out_of_the_door(door: Door, value: str, kind: str, blanks: str):
    grammar = Grammar(kind, value, blanks, "" if kind else "required")
    prepared = door.prepare(request(grammar, "" if kind else json.dumps([WEATHER])))
    assert (prepared.grammar is None) == (prepared.refused is not None)


def test_a_grammar_is_compiled_once(tokenizer: Tokenizer, grammars: Grammars):
    one, two = (grammars.compile(tokenizer, Grammar("regex", "[0-9]"), "", PROMPT, one=False) for _ in range(2))
    assert one.matcher is two.matcher
    for number in range(KEPT):
        grammars.compile(tokenizer, Grammar("regex", f"a{number}"), "", PROMPT, one=False)
    again = grammars.compile(tokenizer, Grammar("regex", "[0-9]"), "", PROMPT, one=False)
    assert again.matcher is not one.matcher
    assert grammars.kept == KEPT


def test_what_was_refused_is_remembered(tokenizer: Tokenizer, grammars: Grammars, asked: Asked):
    hostile = Grammar("regex", "((((a{11}){11}){11}){11}){11}")
    with pytest.raises(Unfit) as first:
        grammars.compile(tokenizer, hostile, "", PROMPT, one=False)
    questions = len(asked.grammars)
    with pytest.raises(Unfit) as second:
        grammars.compile(tokenizer, hostile, "", PROMPT, one=False)
    assert len(asked.grammars) == questions, "it is not asked again"
    assert str(first.value) == str(second.value)


def test_a_grammar_is_asked_of_before_it_is_compiled(tokenizer: Tokenizer):
    made = Grammars(Refusing())
    with pytest.raises(Unfit, match="too long to compile"):
        made.compile(tokenizer, Grammar("regex", "[0-9]"), "", PROMPT, one=False)
    assert made.kept == 0


def test_a_process_that_dies_of_a_grammar_is_replaced():
    asked = Vetting()
    fine = '{"grammars":[{"name":"a","lark_grammar":"start: \\"a\\""}]}'
    endless = json.dumps({"grammars": [{"json_schema": {"allOf": [{"pattern": one} for one in PATTERNS]}}]})
    first = asked.start()
    assert asked.why_not(fine) == ""
    assert first.poll() is None
    assert asked.why_not(endless) == TOO_LONG
    assert asked.why_not(fine) == ""
    assert first.poll() is not None


def test_a_process_that_gets_no_time_ends_by_the_clock(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox, "PATIENCE", 0.3)
    endless = json.dumps({"grammars": [{"json_schema": {"allOf": [{"pattern": one} for one in PATTERNS]}}]})
    begun = time.monotonic()
    assert Vetting(cpu=1000.0).why_not(endless) == TOO_LONG
    assert time.monotonic() - begun < 5


def test_a_schemas_own_options_are_not_taken(tokenizer: Tokenizer, grammars: Grammars):
    lenient = json.dumps({"type": "string", "not": {}, "x-guidance": {"lenient": True}})
    with pytest.raises(Unfit, match="not"):
        grammars.compile(tokenizer, Grammar("json_schema", lenient), "", PROMPT, one=False)


def test_where_a_thought_may_stand(tokenizer: Tokenizer, grammars: Grammars):
    def thought(prompt: Prompt) -> Thought:
        return grammars.compile(tokenizer, Grammar("json_object"), "", prompt, one=False).outline.thought

    assert thought(Prompt((1,), thinking=True)) is Thought.OPEN
    assert thought(Prompt((1,), thinking=False)) is Thought.MAY
    assert thought(Prompt((1,), thinking=False, thought=True)) is Thought.NONE
    assert thought(Prompt((1,), thinking=False, plain=True)) is Thought.NONE


# calls


def test_calls_stand_first_or_anywhere(tokenizer: Tokenizer, grammars: Grammars):
    tools = json.dumps([WEATHER])

    def where(grammar: Grammar) -> Calls:
        return grammars.compile(tokenizer, grammar, tools, PROMPT, one=False).outline.calls

    assert where(Grammar(calls="required")) is Calls.FIRST
    assert where(Grammar(calls="free")) is Calls.ANYWHERE
    assert where(Grammar("json_object", calls="free")) is Calls.FIRST
    assert where(Grammar("json_object")) is Calls.NONE


def test_what_is_too_long_is_not_read(tokenizer: Tokenizer, grammars: Grammars):
    long = json.dumps([WEATHER | {"x": "y" * LONGEST}])
    grammars.compile(tokenizer, Grammar("json_object"), long, PROMPT, one=False)
    with pytest.raises(Unfit, match=str(LONGEST)):
        grammars.compile(tokenizer, Grammar(calls="required"), long, PROMPT, one=False)


def test_an_engine_without_grammars_refuses_them():
    shape, asked = Shape(4, 8, 8, 1), request(Grammar("json_object"))
    found = impossible(asked, shape, Model(asked.model, "f", True, 1, 1, context=100), 4)
    assert found is not None
    assert found.code is Code.UNSUPPORTED
    offering = Model(asked.model, "f", True, 1, 1, context=100, features=("grammar",))
    assert impossible(asked, shape, offering, 4) is None
