"""Grammar compiler: compile a request's answer format (wire.frames.GrammarSpec) for a model's tokenizer.

    size and depth checked ─► rendered as llguidance's grammar ─► in the cache? ─► checked in the sandbox process ─►
    compiled here ─► cached by hash: the `MAX_CACHED_GRAMMARS` most recently used, of all models

A client may send a grammar with harmful intent, and the calling thread must not block. Grammars that are too long or
too deep are therefore not even parsed. A grammar is compiled here only after a separate process (`sandbox`) has shown
that its compilation ends. Refused grammars are cached as well.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark
from mlx_lm.generate import TextStateMachine

from node.engine.grammar.constrained_splitter import CallPlaces, FormatCutter, MarkerLayout, ReasoningStart
from node.engine.grammar.harmony_answer import render_harmony_answer
from node.engine.grammar.lark_builder import LarkBuilder
from node.engine.grammar.matcher import GrammarMatcher, ReasoningEndSearch, build_mask_without
from node.engine.grammar.sandbox import SandboxClient
from node.engine.grammar.sandbox_main import LIMITS, find_fault
from node.engine.grammar.schema_rewrite import rewrite_schema
from node.engine.grammar.tool_formats import has_quoted_calls, render_rules, render_tools_for_parser
from node.engine.grammar.tool_spec import (
    PREFIX,
    STRICT,
    Json,
    ToolCallFormat,
    UnsupportedSchema,
    join_lines,
    parse_json,
    parse_tool_specs,
)
from node.engine.text.detokenizer import MarkerCutter
from node.engine.text.harmony import CONSTRAINED_MARKERS
from node.engine.text.markers import MarkerPlace
from node.engine.text.pipeline_parts import MarkCutter
from node.engine.text.tokenizer import TokenizedPrompt, Tokenizer
from wire.frames import CallConstraint, GrammarKind, GrammarSpec

MAX_SCHEMA_CHARS: Final = 1 << 17
"""Maximum characters of a schema or grammar. Its pattern for blanks, and the tools of a grammar with calls, have the
same maximum each."""
MAX_GBNF_CHARS: Final = 1 << 13
"""Maximum characters of a grammar in GBNF."""
MAX_CACHED_GRAMMARS: Final = 64
"""Maximum number of cached compiled grammars of all models. A typical grammar takes 100 kB."""
MAX_CACHED_REFUSALS: Final = 256
"""Maximum number of cached refusals of grammars."""
ANY_GUIDE: Final = 0
"""Key of refusals by the sandbox process, which do not depend on a tokenizer. Other keys are ids of guides."""


class GrammarCompiler:
    """Compiler and cache of grammars for the tokenizers of one engine. Only one thread at a time may call `compile`.

    `vetting` is the client of the sandbox process; None: a new client."""

    def __init__(self, vetting: SandboxClient | None = None) -> None:
        self._vetting = vetting or SandboxClient()
        self._guides: dict[int, GrammarGuide] = {}
        self._cached: OrderedDict[tuple[int, bytes], LLMatcher] = OrderedDict()
        self._refusals: OrderedDict[tuple[int, bytes], str] = OrderedDict()

    def compile(
        self, tokenizer: Tokenizer, spec: GrammarSpec, tools: str, prompt: TokenizedPrompt, *, one_call: bool
    ) -> "CompiledGrammar":
        """Return the compiled grammar of a request. `spec` is its answer format, `tools` its JSON array of tools.

        `prompt` decides whether the answer may have reasoning. `one_call`: the answer has at most one tool call. The
        first `compile` for a tokenizer builds its tables, which takes about 1 s. Raise `UnsupportedSchema`, with a
        sentence for the client, if the grammar is invalid, too large, or not supported by the model. Raise `OSError` if
        the sandbox process cannot be started.
        """
        if max(len(spec.value), len(spec.whitespace), len(tools) if spec.calls else 0) > MAX_SCHEMA_CHARS:
            raise UnsupportedSchema(f"{PREFIX}it has more than {MAX_SCHEMA_CHARS} characters")
        guide = self._get_guide(tokenizer)
        outline = build_marker_layout(tokenizer, spec, prompt)
        messages = tokenizer.has_message_answer(prompt)
        call_format = tokenizer.tool_call_format if spec.calls or messages else None
        render = partial(render_grammar, spec, tools, one_call=one_call, messages=messages)
        # the vetting process has no tokenizer: there the markers are words
        plain = render(None if call_format is None else call_format.replace_tokens())
        matcher = self._get_matcher(guide, plain, lambda: render(call_format))
        known = (
            ""
            if call_format is None or not spec.calls
            else render_tools_for_parser(call_format.parser, parse_tool_specs(tools, spec.tool))
        )
        return CompiledGrammar(matcher, guide, outline, known)

    @property
    def cached_count(self) -> int:
        """Number of cached compiled grammars."""
        return len(self._cached)

    def has_tables_for(self, tokenizer: Tokenizer) -> bool:
        """Return whether the grammar tables of this tokenizer (`GrammarGuide`) are built."""
        return id(tokenizer) in self._guides

    def retain(self, tokenizers: Iterable[Tokenizer]) -> None:
        """Evict the tables, compiled grammars and cached refusals of all tokenizers except `tokenizers`. Must not be
        called during `compile`."""
        wanted = set(map(id, tokenizers))
        self._guides = {number: guide for number, guide in self._guides.items() if number in wanted}
        guides = set(map(id, self._guides.values()))
        self._cached = OrderedDict(entry for entry in self._cached.items() if entry[0][0] in guides)
        self._refusals = OrderedDict(entry for entry in self._refusals.items() if entry[0][0] in {ANY_GUIDE, *guides})

    def _get_guide(self, tokenizer: Tokenizer) -> "GrammarGuide":
        guide = self._guides.get(id(tokenizer))
        if guide is None:
            guide = self._guides[id(tokenizer)] = GrammarGuide.of(tokenizer)
        return guide

    def _get_matcher(self, guide: "GrammarGuide", plain: str, render: Callable[[], str]) -> LLMatcher:
        """Return the matcher of a grammar, from the cache or compiled from the text of `render()`.

        Before the compilation, the sandbox process checks `plain`: the form with words in place of special tokens. This
        form is also the cache key. Raise `UnsupportedSchema` if the grammar is refused. Raise `OSError` if the sandbox
        process cannot be started.
        """
        digest = hashlib.sha256(plain.encode()).digest()
        key = id(guide), digest
        matcher = self._cached.get(key)
        if matcher is None:
            self._vet(plain, digest)
            if key in self._refusals:
                raise UnsupportedSchema(PREFIX + join_lines(self._refusals[key]))
            matcher = self._cached[key] = self._compile_matcher(guide, render(), key)
            while len(self._cached) > MAX_CACHED_GRAMMARS:
                self._cached.popitem(last=False)
        self._cached.move_to_end(key)
        return matcher

    def _vet(self, grammar: str, digest: bytes) -> None:
        wrong = self._refusals.get((ANY_GUIDE, digest))
        if wrong is None:
            wrong = self._vetting.find_fault(grammar)
            if wrong:
                self._cache_refusal((ANY_GUIDE, digest), wrong)
        if wrong:
            raise UnsupportedSchema(PREFIX + join_lines(wrong))

    def _compile_matcher(self, guide: "GrammarGuide", grammar: str, key: tuple[int, bytes]) -> LLMatcher:
        matcher = LLMatcher(guide.ll_tokenizer, grammar, log_level=0, limits=LIMITS)
        wrong = find_fault(matcher)
        if wrong:
            self._cache_refusal(key, wrong)
            raise UnsupportedSchema(PREFIX + join_lines(wrong))
        return matcher

    def _cache_refusal(self, key: tuple[int, bytes], wrong: str) -> None:
        self._refusals[key] = wrong
        while len(self._refusals) > MAX_CACHED_REFUSALS:
            self._refusals.popitem(last=False)


@dataclass(frozen=True, slots=True, eq=False)
class GrammarGuide:
    """Grammar tables of one tokenizer, which all grammars that are compiled for this tokenizer share."""

    tokenizer: Tokenizer
    """Tokenizer of the model."""
    ll_tokenizer: LLTokenizer
    """llguidance's form of the tokenizer."""
    unending: bytes
    """Mask of all tokens except the tokens that end an answer, one bit per token."""

    @staticmethod
    def of(tokenizer: Tokenizer) -> "GrammarGuide":
        """Build the grammar tables of a tokenizer. This takes about 1 s for a large vocabulary.

        Raise `UnsupportedSchema` if answers with this tokenizer cannot follow a grammar.
        """
        made = tokenizer.build_guide()
        if made is None:
            raise UnsupportedSchema("this model does not support grammars, because of its tokenizer or answer format")
        return GrammarGuide(tokenizer, made, build_mask_without(made.vocab_size, tokenizer.eos))


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """Compiled grammar of a request. Each answer (choice) of the request gets its own matcher."""

    matcher: LLMatcher
    """Matcher at the start of an answer, which is copied for each answer."""
    guide: GrammarGuide
    """Grammar tables of the model's tokenizer."""
    outline: MarkerLayout
    """Markers of reasoning and calls, and where they may occur."""
    tools: str = ""
    """Tools as JSON, with the types that the parser of calls needs; empty if the parser uses the tools of the
    request."""

    def create_cursor(self) -> GrammarMatcher:
        """Return a new matcher of the grammar, in its state at the start of an answer."""
        tokenizer, start = self.guide.tokenizer, self.outline.reasoning
        thinking = ReasoningEndSearch(self.outline.think[1].encode(), tokenizer.token_bytes) if start else None
        opener = tokenizer.find_single_token(self.outline.think[0]) if start is ReasoningStart.MAY else None
        return GrammarMatcher(
            self.matcher.deep_copy(), self.guide.ll_tokenizer, thinking, opener, self.guide.unending, tokenizer.eos
        )

    def get_start_place(self) -> MarkerPlace:
        """Return the state of the text at the start of an answer (`MarkerLayout.get_start_place`)."""
        return self.outline.get_start_place()

    def create_cutter(self) -> MarkerCutter:
        """Return a new splitter of the text of one answer into reasoning, text and tool calls."""
        messages = self.outline.messages
        if messages is None:
            return FormatCutter(self.outline)
        return MarkCutter(TextStateMachine(messages.build_transitions(True)), self.get_start_place())


def build_marker_layout(tokenizer: Tokenizer, spec: GrammarSpec, prompt: TokenizedPrompt) -> MarkerLayout:
    """Return the markers of a model's reasoning and calls, and the places in the answer where they may occur.

    If the prompt has begun the reasoning, the answer continues it. Otherwise an answer may start with reasoning only if
    the model's start marker is a single token. No reasoning may follow a prompt without a template. Nor may it follow a
    prompt that has just ended its reasoning, because templates forbid reasoning in this way.
    """
    if tokenizer.has_message_answer(prompt):
        return MarkerLayout(messages=CONSTRAINED_MARKERS)
    think, call_format = tokenizer.think, tokenizer.tool_call_format
    start = ReasoningStart.NONE
    if prompt.thinking:
        start = ReasoningStart.OPEN
    elif (
        think[1]
        and not prompt.plain
        and not prompt.ends_reasoning
        and tokenizer.find_single_token(think[0]) is not None
    ):
        start = ReasoningStart.MAY
    if call_format is None or not spec.calls:
        return MarkerLayout(think, start)
    anywhere = spec.calls == CallConstraint.FREE and not spec.kind
    calls = CallPlaces.ANYWHERE if anywhere else CallPlaces.FIRST
    return MarkerLayout(think, start, call_format.markers, calls, quoted=has_quoted_calls(call_format.parser))


def render_grammar(
    spec: GrammarSpec, tools: str, call_format: ToolCallFormat | None, *, one_call: bool, messages: bool = False
) -> str:
    """Render the requested answer format `spec` as a grammar of llguidance, a JSON text.

    `tools` is the request's JSON array of tools. `call_format` is the model's format of tool calls; None: the model
    supports none. `one_call`: the answer has at most one call. `messages`: the answer is a sequence of messages in
    Harmony, the format of `call_format`. Raise `UnsupportedSchema` if the answer format is invalid or the model does
    not support it.
    """
    answer: list[Json] = [_build_answer_grammar(spec)] if spec.kind else []
    if messages and call_format is not None:
        return _render_messages(spec, tools, call_format, answer)
    if not spec.calls:
        return _join_grammars("start: @answer\n", answer)
    if call_format is None:
        raise UnsupportedSchema("this model does not support tools: its chat template has none")
    free = spec.calls == CallConstraint.FREE
    builder = LarkBuilder(call_format)
    either = "@answer | calls" if spec.kind else "spoken"
    rules_text = render_rules(builder, parse_tool_specs(tools, spec.tool), free=free, one_call=one_call)
    return _join_grammars(
        f"start: {either if free else 'calls'}\n{rules_text}", [*(answer if free else []), *builder.list_schemas()]
    )


def _render_messages(spec: GrammarSpec, tools: str, call_format: ToolCallFormat, answer: list[Json]) -> str:
    forced = spec.calls not in ("", CallConstraint.FREE)
    text = "" if forced else "@answer" if spec.kind else "WORDS"
    builder = LarkBuilder(call_format)
    rules_text = render_harmony_answer(builder, parse_tool_specs(tools, spec.tool) if spec.calls else (), text)
    return _join_grammars(rules_text, [*(() if forced else answer), *builder.list_schemas()])


def _join_grammars(lark: str, parts: list[Json]) -> str:
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": lark}, *parts]})


def _build_answer_grammar(spec: GrammarSpec) -> Json:
    if spec.kind == GrammarKind.JSON_SCHEMA:
        return {"name": "answer", "json_schema": _build_schema(spec)}
    if spec.kind == GrammarKind.JSON_OBJECT:
        return {"name": "answer", "json_schema": {"type": "object", "x-guidance": _get_blank_options(spec)}}
    lark = _LARK_CONVERTERS.get(spec.kind)
    if lark is None:
        raise UnsupportedSchema(f"unknown kind of grammar: {spec.kind[:40]}")
    return {"name": "answer", "lark_grammar": lark(spec.value)}


def _build_schema(spec: GrammarSpec) -> Json:
    found = parse_json(spec.value)
    if not isinstance(found, dict):
        raise UnsupportedSchema(f"{PREFIX}a schema must be a JSON object")
    return {**rewrite_schema(cast("Json", found), strict=True), "x-guidance": _get_blank_options(spec)}


def _get_blank_options(spec: GrammarSpec) -> Json:
    """Return the options for blanks in JSON. Blanks are limited to a few, because a model that only repeats blanks
    never ends."""
    return {**STRICT, "whitespace_pattern": spec.whitespace} if spec.whitespace else STRICT


def _convert_regex(pattern: str) -> str:
    made = cast("dict[str, list[dict[str, str]]]", json.loads(LLMatcher.grammar_from_regex(pattern)))
    return made["grammars"][0]["lark_grammar"]


def _convert_lark(text: str) -> str:
    """Return a grammar in Lark's notation. GBNF is converted; it is parsed here, and its length is therefore limited.
    Raise `UnsupportedSchema` for GBNF that is too long or invalid."""
    if "::=" not in text:
        return text
    if len(text) > MAX_GBNF_CHARS:
        raise UnsupportedSchema(f"{PREFIX}the limit for GBNF is {MAX_GBNF_CHARS} characters; write it in Lark")
    try:
        return gbnf_to_lark(text)
    except (GbnfToLarkError, RecursionError) as error:
        raise UnsupportedSchema(f"{PREFIX}{join_lines(str(error))}") from error


def _convert_choice(value: str) -> str:
    texts = parse_json(value)
    found = cast("list[object]", texts) if isinstance(texts, list) else []
    if not found or not all(isinstance(text, str) and text for text in found):
        raise UnsupportedSchema(f"{PREFIX}choices must be a list of non-empty texts")
    return "start: " + " | ".join(json.dumps(text) for text in found)


_LARK_CONVERTERS: dict[str, Callable[[str], str]] = {
    GrammarKind.REGEX: _convert_regex,
    GrammarKind.CHOICE: _convert_choice,
    GrammarKind.LARK: _convert_lark,
}
