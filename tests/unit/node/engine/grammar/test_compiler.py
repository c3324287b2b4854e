"""A requested format becomes a grammar or a refusal, and neither takes long for any client."""

import json
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.engine.grammar import sandbox
from node.engine.grammar.compiler import MAX_CACHED_GRAMMARS, MAX_SCHEMA_CHARS, GrammarCompiler
from node.engine.grammar.constrained_splitter import CallPlaces, ReasoningStart
from node.engine.grammar.sandbox import CPU_LIMIT_SECONDS, TOO_LONG, SandboxClient
from node.engine.grammar.tool_spec import MAX_JSON_DEPTH, UnsupportedSchema
from node.engine.requests.preflight import RequestShape, refuse_impossible
from node.engine.requests.preparer import RequestPreparer
from node.engine.text.tokenizer import TokenizedPrompt, Tokenizer
from node.engine.text.tokenizer_loader import load
from node.models.catalogue import ModelCatalogue
from node.settings import ModelSettings
from tests import models
from tests.effort import scale_examples
from wire.frames import Generate, GenerationParams, GrammarSpec, Message
from wire.refusals import RefusalCode
from wire.report import Model

CPU_SECONDS = 0.5
"""Limit of CPU seconds for a refusal, in this process and in the sandbox. The sandbox has CPU_LIMIT_SECONDS of them at
most. The benchmark measures 0.1 s in all."""
FINE = '{"grammars":[{"name":"a","lark_grammar":"start: \\"a\\""}]}'
PROMPT = TokenizedPrompt((1,), thinking=False)
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load(models.path("llama"))


class Asked(SandboxClient):
    """A vetting that records its grammars."""

    def __init__(self) -> None:
        super().__init__()
        self.grammars: list[str] = []

    def find_fault(self, grammar: str) -> str:
        """Record the grammar and vet it."""
        self.grammars.append(grammar)
        return super().find_fault(grammar)


class Refusing(SandboxClient):
    """Sandbox client that refuses every grammar, as if its compilation took too long."""

    def find_fault(self, grammar: str) -> str:
        """Return that the grammar takes too long."""
        return TOO_LONG


@pytest.fixture(scope="module")
def asked() -> Asked:
    return Asked()


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer, asked: Asked) -> GrammarCompiler:
    made = GrammarCompiler(asked)
    made.compile(tokenizer, GrammarSpec("json_object"), "", PROMPT, one_call=False)
    return made


def nested(depth: int) -> str:
    return '{"items":' * depth + "{}" + "}" * depth


PATTERNS = [f".*a.{{{count}}}b.*" for count in range(30)]
HOSTILE = {
    "remote reference": GrammarSpec("json_schema", '{"$ref": "http://127.0.0.1:1/schema.json"}'),
    "file": GrammarSpec("json_schema", '{"$ref": "file:///etc/passwd"}'),
    "itself": GrammarSpec("json_schema", '{"$ref": "#"}'),
    "all of itself": GrammarSpec("json_schema", '{"allOf": [{"$ref": "#"}]}'),
    "a megabyte": GrammarSpec("json_schema", json.dumps({"enum": ["x" * 1_000_000]})),
    "deep": GrammarSpec("json_schema", nested(MAX_JSON_DEPTH + 1)),
    "deeper than any stack": GrammarSpec("json_schema", nested(12_000)),
    "very many values": GrammarSpec("json_schema", json.dumps({"enum": [f"{number}v" for number in range(100_000)]})),
    "very many properties": GrammarSpec(
        "json_schema", json.dumps({"type": "object", "properties": {f"p{number}": {} for number in range(9_000)}})
    ),
    "patterns that meet": GrammarSpec("json_schema", json.dumps({"allOf": [{"pattern": one} for one in PATTERNS]})),
    "patterns that meet, in Lark": GrammarSpec("lark", "start: A\nA: " + " & ".join(f"/{one}/" for one in PATTERNS)),
    "repeated repetitions": GrammarSpec("regex", "(((((a{10}){10}){10}){10}){10}){100}"),
    "unfinished pattern": GrammarSpec("regex", "("),
    "look ahead": GrammarSpec("regex", "(?=a)b"),
    "back reference": GrammarSpec("regex", r"(a)\1"),
    "type": GrammarSpec("json_schema", '{"type": "nope"}'),
    "no schema": GrammarSpec("json_schema", "[]"),
    "no JSON": GrammarSpec("json_schema", "{"),
    "half a sign": GrammarSpec("json_schema", '{"const": "\\ud800"}'),
    "blanks": GrammarSpec("json_object", "", "("),
    "unknown kind": GrammarSpec("poem"),
    "no rules": GrammarSpec("lark", ""),
    "noise": GrammarSpec("lark", "\0\ufffd"),
    "a rule of itself": GrammarSpec("lark", "start: start"),
    "deep Lark": GrammarSpec("lark", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "another file": GrammarSpec("lark", "%import common.INT\nstart: INT @other"),
    "long GBNF": GrammarSpec("lark", 'root ::= "a"' + ' | "a"' * 3000),
    "broken GBNF": GrammarSpec("lark", "root ::= ("),
    "no choices": GrammarSpec("choice", "[]"),
    "choices that are none": GrammarSpec("choice", '["a", 1]'),
    "an empty choice": GrammarSpec("choice", '["a", ""]'),
    "calls of nothing": GrammarSpec(calls="required"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_wrong_or_means_harm_is_refused_in_no_time(
    name: str, tokenizer: Tokenizer, grammars: GrammarCompiler, asked: Asked
):
    asked.find_fault('{"grammars":[{"lark_grammar":"start: \\"a\\""}]}')  # its process may have to start first
    begun = time.process_time()
    with pytest.raises(UnsupportedSchema) as found:
        grammars.compile(tokenizer, HOSTILE[name], "", PROMPT, one_call=False)
    assert time.process_time() - begun < CPU_SECONDS - CPU_LIMIT_SECONDS
    assert 0 < len(str(found.value)) < 500


@pytest.fixture(scope="module")
def door(tokenizer: Tokenizer) -> RequestPreparer:
    folder = models.path("llama")
    library = ModelCatalogue(ModelSettings(folders=(str(folder),), use_huggingface_cache=False))
    library.scan()
    return RequestPreparer(library)


def request(grammar: GrammarSpec, tools: str = "") -> Generate:
    name = Path(models.path("llama")).name
    return Generate(1, 1, "r", name, (Message("user", "Hi"),), GenerationParams(grammar=grammar), 0, tools=tools)


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


@settings(max_examples=scale_examples(1000), deadline=None)
@given(JSONS, st.sampled_from(["json_schema", "choice"]))
def test_preparing_a_hostile_schema_never_raises(door: RequestPreparer, value: object, kind: str):
    prepared = door.prepare(request(GrammarSpec(kind, json.dumps(value))))
    assert (prepared.grammar is None) == (prepared.refused is not None)
    assert prepared.refused is None or prepared.refused.code is RefusalCode.INVALID


@settings(max_examples=scale_examples(500), deadline=None)
@given(
    st.text(max_size=40),
    st.sampled_from(["json_schema", "json_object", "regex", "choice", "lark", ""]),
    st.text(max_size=5),
)
def test_preparing_a_hostile_text_never_raises(door: RequestPreparer, value: str, kind: str, blanks: str):
    grammar = GrammarSpec(kind, value, blanks, "" if kind else "required")
    prepared = door.prepare(request(grammar, "" if kind else json.dumps([WEATHER])))
    assert (prepared.grammar is None) == (prepared.refused is not None)


def test_a_grammar_is_compiled_once(tokenizer: Tokenizer, grammars: GrammarCompiler):
    one, two = (
        grammars.compile(tokenizer, GrammarSpec("regex", "[0-9]"), "", PROMPT, one_call=False) for _ in range(2)
    )
    assert one.matcher is two.matcher
    for number in range(MAX_CACHED_GRAMMARS):
        grammars.compile(tokenizer, GrammarSpec("regex", f"a{number}"), "", PROMPT, one_call=False)
    again = grammars.compile(tokenizer, GrammarSpec("regex", "[0-9]"), "", PROMPT, one_call=False)
    assert again.matcher is not one.matcher
    assert grammars.cached_count == MAX_CACHED_GRAMMARS


def test_what_was_refused_is_remembered(tokenizer: Tokenizer, grammars: GrammarCompiler, asked: Asked):
    hostile = GrammarSpec("regex", "((((a{11}){11}){11}){11}){11}")
    with pytest.raises(UnsupportedSchema) as first:
        grammars.compile(tokenizer, hostile, "", PROMPT, one_call=False)
    questions = len(asked.grammars)
    with pytest.raises(UnsupportedSchema) as second:
        grammars.compile(tokenizer, hostile, "", PROMPT, one_call=False)
    assert len(asked.grammars) == questions, "it is not asked again"
    assert str(first.value) == str(second.value)


def test_a_grammar_is_vetted_before_it_is_compiled(tokenizer: Tokenizer):
    made = GrammarCompiler(Refusing())
    with pytest.raises(UnsupportedSchema, match="too long to compile"):
        made.compile(tokenizer, GrammarSpec("regex", "[0-9]"), "", PROMPT, one_call=False)
    assert made.cached_count == 0


def test_grammars_of_a_dropped_tokenizer_go_with_it(tokenizer: Tokenizer, asked: Asked):
    """The id of a dropped object may be that of a new one, whose tokens are other ones."""
    made, other = GrammarCompiler(asked), load(models.path("qwen3"))
    for each in (tokenizer, other):
        made.compile(each, GrammarSpec("regex", "[0-9]"), "", PROMPT, one_call=False)
    assert made.cached_count == 2
    made.retain([other])
    assert (made.cached_count, made.has_tables_for(tokenizer), made.has_tables_for(other)) == (1, False, True)
    made.compile(other, GrammarSpec("regex", "[0-9]"), "", PROMPT, one_call=False)
    assert made.cached_count == 1, "the grammar of the other tokenizer is still cached"


def test_a_process_that_dies_of_a_grammar_is_replaced():
    asked = SandboxClient()
    endless = json.dumps({"grammars": [{"json_schema": {"allOf": [{"pattern": one} for one in PATTERNS]}}]})
    first = asked.start()
    assert asked.find_fault(FINE) == ""
    assert first.poll() is None
    assert asked.find_fault(endless) == TOO_LONG
    assert asked.find_fault(FINE) == ""
    assert first.poll() is not None


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_compiler_that_crashes_is_named_and_replaced(number: signal.Signals, monkeypatch: pytest.MonkeyPatch):
    """The system ends a process by SIGKILL for lack of memory."""
    asked, wait = SandboxClient(), select.select
    child = asked.start()

    def crash(*arguments: Any) -> Any:
        child.send_signal(number)
        child.wait()
        return wait(*arguments)

    monkeypatch.setattr(select, "select", crash)
    assert asked.find_fault("{}") == f"its compiler ended by {number.name}: simplify it or its patterns"
    monkeypatch.undo()
    assert asked.find_fault(FINE) == ""


def test_a_process_that_ended_while_idle_refuses_no_grammar():
    asked = SandboxClient()
    assert asked.find_fault(FINE) == ""
    child = asked.start()
    child.kill()
    child.wait()
    assert asked.find_fault(FINE) == ""


def test_a_process_that_could_not_be_started_once_is_started_by_the_next_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked, wait = SandboxClient(), select.select
    child = asked.start()

    def crash(*arguments: Any) -> Any:
        child.kill()
        child.wait()
        monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
        return wait(*arguments)

    monkeypatch.setattr(select, "select", crash)
    for _ in range(2):
        with pytest.raises(FileNotFoundError):
            asked.find_fault(FINE)
    monkeypatch.undo()
    assert asked.find_fault(FINE) == ""


def test_a_process_that_gets_no_time_ends_by_the_clock(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox, "TIMEOUT_SECONDS", 0.3)
    endless = json.dumps({"grammars": [{"json_schema": {"allOf": [{"pattern": one} for one in PATTERNS]}}]})
    begun = time.monotonic()
    assert SandboxClient(cpu=1000.0).find_fault(endless) == TOO_LONG
    assert time.monotonic() - begun < 5


def test_a_schemas_own_options_are_not_taken(tokenizer: Tokenizer, grammars: GrammarCompiler):
    lenient = json.dumps({"type": "string", "not": {}, "x-guidance": {"lenient": True}})
    with pytest.raises(UnsupportedSchema, match="not"):
        grammars.compile(tokenizer, GrammarSpec("json_schema", lenient), "", PROMPT, one_call=False)


def test_where_a_thought_may_stand(tokenizer: Tokenizer, grammars: GrammarCompiler):
    def thought(prompt: TokenizedPrompt) -> ReasoningStart:
        return grammars.compile(tokenizer, GrammarSpec("json_object"), "", prompt, one_call=False).outline.reasoning

    assert thought(TokenizedPrompt((1,), thinking=True)) is ReasoningStart.OPEN
    assert thought(TokenizedPrompt((1,), thinking=False)) is ReasoningStart.MAY
    assert thought(TokenizedPrompt((1,), thinking=False, ends_reasoning=True)) is ReasoningStart.NONE
    assert thought(TokenizedPrompt((1,), thinking=False, plain=True)) is ReasoningStart.NONE


# calls


def test_calls_stand_first_or_anywhere(tokenizer: Tokenizer, grammars: GrammarCompiler):
    tools = json.dumps([WEATHER])

    def where(grammar: GrammarSpec) -> CallPlaces:
        return grammars.compile(tokenizer, grammar, tools, PROMPT, one_call=False).outline.calls

    assert where(GrammarSpec(calls="required")) is CallPlaces.FIRST
    assert where(GrammarSpec(calls="free")) is CallPlaces.ANYWHERE
    assert where(GrammarSpec("json_object", calls="free")) is CallPlaces.FIRST
    assert where(GrammarSpec("json_object")) is CallPlaces.NONE


def test_what_is_too_long_is_not_read(tokenizer: Tokenizer, grammars: GrammarCompiler):
    long = json.dumps([WEATHER | {"x": "y" * MAX_SCHEMA_CHARS}])
    grammars.compile(tokenizer, GrammarSpec("json_object"), long, PROMPT, one_call=False)
    with pytest.raises(UnsupportedSchema, match=str(MAX_SCHEMA_CHARS)):
        grammars.compile(tokenizer, GrammarSpec(calls="required"), long, PROMPT, one_call=False)


def test_an_engine_without_grammars_refuses_them():
    shape, asked = RequestShape(4, 8, 8, 1), request(GrammarSpec("json_object"))
    found = refuse_impossible(asked, shape, Model(asked.model, "f", True, 1, 1, context=100), 4)
    assert found is not None
    assert found.code is RefusalCode.UNSUPPORTED
    offering = Model(asked.model, "f", True, 1, 1, context=100, features=("grammar",))
    assert refuse_impossible(asked, shape, offering, 4) is None


def test_the_newest_refusals_are_remembered(tokenizer: Tokenizer, asked: Asked, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.engine.grammar.compiler.MAX_CACHED_REFUSALS", 2)
    made, found = GrammarCompiler(asked), list[int]()
    for number in (1, 2, 3, 2, 3, 1):
        before = len(asked.grammars)
        with pytest.raises(UnsupportedSchema):
            made.compile(tokenizer, GrammarSpec("regex", f"({number}"), "", PROMPT, one_call=False)
        found.append(len(asked.grammars) - before)
    assert found == [1, 1, 1, 0, 0, 1], "the oldest one is asked again"


def test_a_refusal_by_one_tokenizer_is_remembered_for_that_tokenizer_alone(
    tokenizer: Tokenizer, asked: Asked, monkeypatch: pytest.MonkeyPatch
):
    made, other, faults = GrammarCompiler(asked), load(models.path("llama")), ["unknown special token", ""]
    monkeypatch.setattr("node.engine.grammar.compiler.find_fault", lambda _: faults.pop(0))
    spec = GrammarSpec("regex", "only once")
    for _ in range(2):
        with pytest.raises(UnsupportedSchema, match="unknown special token"):
            made.compile(tokenizer, spec, "", PROMPT, one_call=False)
    made.compile(other, spec, "", PROMPT, one_call=False)
    assert faults == [], "the first tokenizer's refusal is not computed again"
    made.retain([other])
    faults.append("")
    made.compile(tokenizer, spec, "", PROMPT, one_call=False)
