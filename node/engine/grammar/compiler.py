"""Grammar compiler: compile a request's answer format (wire.frames.GrammarSpec) for a model's tokenizer.

    size, depth, shape ─► rendered as llguidance's grammar ─► cached? ─► vetted, in a process that may die of it ─►
    compiled here ─► cached, by hash, the last few for each model

A client may send a grammar with harmful intent, and the calling thread must not block. Grammars that are too long or
too deep are therefore not even parsed. A grammar is compiled here only after a separate process (`sandbox`) has shown
that its compilation ends. Refused grammars are cached as well.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from node.engine.grammar.constrained_splitter import CallPlaces, FormatCutter, MarkerLayout, ReasoningStart
from node.engine.grammar.lark_builder import LarkBuilder
from node.engine.grammar.matcher import GrammarMatcher, ReasoningEndSearch, all_but
from node.engine.grammar.sandbox import SandboxClient
from node.engine.grammar.sandbox_main import LIMITS, why_not
from node.engine.grammar.tool_formats import as_read, quoted, rules
from node.engine.grammar.tool_spec import (
    PREFIX,
    STRICT,
    Json,
    ToolCallFormat,
    UnsupportedSchema,
    one_line,
    read,
    tools_of,
)
from node.engine.text.markers import MarkerPlace
from node.engine.text.tokenizer import TokenizedPrompt, Tokenizer
from wire.frames import CallConstraint, GrammarKind
from wire.frames import GrammarSpec as Asked

MAX_SCHEMA_CHARS: Final = 1 << 17
"""Maximum characters of a schema or grammar, and of the tools if they are part of it."""
MAX_GBNF_CHARS: Final = 1 << 13
"""Maximum characters of a grammar in GBNF."""
MAX_CACHED_GRAMMARS: Final = 64
"""Maximum number of cached compiled grammars of all models; a usual one takes 100 kB."""
MAX_CACHED_REFUSALS: Final = 256
"""Maximum number of cached refusals of grammars."""


class GrammarCompiler:
    """Compiler and cache of grammars for the tokenizers of one engine. Only one thread at a time may call `compile`."""

    def __init__(self, vetting: SandboxClient | None = None) -> None:
        self._vetting = vetting or SandboxClient()
        self._guides: dict[int, GrammarGuide] = {}
        self._kept: OrderedDict[tuple[int, bytes], LLMatcher] = OrderedDict()
        self._wrong: OrderedDict[bytes, str] = OrderedDict()

    def compile(
        self, tokenizer: Tokenizer, spec: Asked, tools: str, prompt: TokenizedPrompt, *, one: bool
    ) -> "CompiledGrammar":
        """Return the compiled grammar of a request. `spec` is its answer format, `tools` its JSON array of tools.
        `one`: at most one call.

        Raise `UnsupportedSchema`, with a sentence for the client, if the grammar is invalid, too large, or not
        supported by the model.
        """
        if max(len(spec.value), len(spec.whitespace), len(tools) if spec.calls else 0) > MAX_SCHEMA_CHARS:
            raise UnsupportedSchema(f"{PREFIX}it has more than {MAX_SCHEMA_CHARS} characters")
        guide = self._guide(tokenizer)
        outline = marker_layout(tokenizer, spec, prompt)
        calling = tokenizer.calling if spec.calls else None
        # the vetting process has no tokenizer: there the markers are words
        plain = write(spec, tools, None if calling is None else calling.in_words(), one=one)
        matcher = self._matcher(guide, plain, lambda: write(spec, tools, calling, one=one))
        known = "" if calling is None else as_read(calling.parser, tools_of(tools, spec.tool))
        return CompiledGrammar(matcher, guide, outline, known)

    @property
    def kept(self) -> int:
        """Number of cached compiled grammars."""
        return len(self._kept)

    def knows(self, tokenizer: Tokenizer) -> bool:
        """Return whether the grammar tables of this tokenizer are built."""
        return id(tokenizer) in self._guides

    def _guide(self, tokenizer: Tokenizer) -> "GrammarGuide":
        guide = self._guides.get(id(tokenizer))
        if guide is None:
            guide = self._guides[id(tokenizer)] = GrammarGuide.of(tokenizer)
        return guide

    def _matcher(self, guide: "GrammarGuide", plain: str, written: Callable[[], str]) -> LLMatcher:
        """Return the matcher of a grammar, compiled from `written` after its `plain` form was vetted. The plain form is
        the cache key."""
        digest = hashlib.sha256(plain.encode()).digest()
        key = id(guide), digest
        kept = self._kept.get(key)
        if kept is None:
            self._vet(plain, digest)
            kept = self._kept[key] = self._compiled(guide, written(), digest)
            while len(self._kept) > MAX_CACHED_GRAMMARS:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        return kept

    def _vet(self, written: str, digest: bytes) -> None:
        wrong = self._wrong.get(digest)
        if wrong is None:
            wrong = self._vetting.why_not(written)
            if wrong:
                self._remember(digest, wrong)
        if wrong:
            raise UnsupportedSchema(PREFIX + one_line(wrong))

    def _compiled(self, guide: "GrammarGuide", written: str, digest: bytes) -> LLMatcher:
        matcher = LLMatcher(guide.tokenizer, written, log_level=0, limits=LIMITS)
        wrong = why_not(matcher)
        if wrong:
            self._remember(digest, wrong)
            raise UnsupportedSchema(PREFIX + one_line(wrong))
        return matcher

    def _remember(self, digest: bytes, wrong: str) -> None:
        self._wrong[digest] = wrong
        while len(self._wrong) > MAX_CACHED_REFUSALS:
            self._wrong.popitem(last=False)


@dataclass(frozen=True, slots=True, eq=False)
class GrammarGuide:
    """Data of one tokenizer that all its grammars use."""

    owner: Tokenizer
    """Tokenizer of the model."""
    tokenizer: LLTokenizer
    """llguidance's form of the tokenizer."""
    unending: bytes
    """Mask of all tokens but those that end an answer, one bit per token."""

    @staticmethod
    def of(tokenizer: Tokenizer) -> "GrammarGuide":
        """Return the data of a tokenizer. This takes a second for a large vocabulary.

        Raise `UnsupportedSchema` if answers with this tokenizer cannot follow a grammar.
        """
        made = tokenizer.guide()
        if made is None:
            raise UnsupportedSchema("this model does not support grammars, because of its tokenizer or answer format")
        return GrammarGuide(tokenizer, made, all_but(made.vocab_size, tokenizer.eos))


@dataclass(frozen=True, slots=True, eq=False)
class CompiledGrammar:
    """Compiled grammar of a request. Every answer gets a state of its own."""

    matcher: LLMatcher
    """Matcher, copied for each answer."""
    guide: GrammarGuide
    """Tokenizer data."""
    outline: MarkerLayout
    """Markers of reasoning and calls, and where they may occur."""
    tools: str = ""
    """Tools as JSON, with the types that the parser of calls needs; empty if the parser uses the tools of the
    request."""

    def begin(self) -> GrammarMatcher:
        """Return the grammar state at the start of an answer."""
        owner, start = self.guide.owner, self.outline.reasoning
        thinking = ReasoningEndSearch(self.outline.think[1].encode(), owner.token_bytes) if start else None
        opener = owner.single(self.outline.think[0]) if start is ReasoningStart.MAY else None
        return GrammarMatcher(
            self.matcher.deep_copy(), self.guide.tokenizer, thinking, opener, self.guide.unending, owner.eos
        )

    def beginning(self) -> MarkerPlace:
        """Return the place where an answer starts."""
        return self.outline.beginning()

    def cutter(self) -> FormatCutter:
        """Return a new cutter for the text of one answer."""
        return FormatCutter(self.outline)


def marker_layout(tokenizer: Tokenizer, spec: Asked, prompt: TokenizedPrompt) -> MarkerLayout:
    """Return where thoughts and calls may occur in the answer.

    If the prompt has not opened a thought, the answer may start one only with a single token. It may not if the prompt
    has closed a thought already, because templates do that to forbid thoughts.
    """
    think, calling = tokenizer.think, tokenizer.calling
    start = ReasoningStart.NONE
    if prompt.thinking:
        start = ReasoningStart.OPEN
    elif think[1] and not prompt.plain and not prompt.opens_reasoning and tokenizer.single(think[0]) is not None:
        start = ReasoningStart.MAY
    if calling is None or not spec.calls:
        return MarkerLayout(think, start)
    anywhere = spec.calls == CallConstraint.FREE and not spec.kind
    calls = CallPlaces.ANYWHERE if anywhere else CallPlaces.FIRST
    return MarkerLayout(think, start, calling.markers, calls, quoted=quoted(calling.parser))


def write(spec: Asked, tools: str, calling: ToolCallFormat | None, *, one: bool) -> str:
    """Render the requested format as llguidance's grammar, a JSON text. `calling` is the model's format of calls; None:
    the model makes none. `one`: at most one call.

    Raise `UnsupportedSchema` if the format is invalid or the model does not support it.
    """
    answer: list[Json] = [_answer(spec)] if spec.kind else []
    if not spec.calls:
        return _grammar("start: @answer\n", answer)
    if calling is None:
        raise UnsupportedSchema("this model does not support tools: its chat template has none")
    free = spec.calls == CallConstraint.FREE
    builder = LarkBuilder(calling)
    either = "@answer | calls" if spec.kind else "spoken"
    written = rules(builder, tools_of(tools, spec.tool), free=free, one=one)
    return _grammar(
        f"start: {either if free else 'calls'}\n{written}", [*(answer if free else []), *builder.all_schemas()]
    )


def _grammar(lark: str, parts: list[Json]) -> str:
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": lark}, *parts]})


def _answer(spec: Asked) -> Json:
    if spec.kind == GrammarKind.JSON_SCHEMA:
        return {"name": "answer", "json_schema": _schema(spec)}
    if spec.kind == GrammarKind.JSON_OBJECT:
        return {"name": "answer", "json_schema": {"type": "object", "x-guidance": _blanks(spec)}}
    lark = _LARK_WRITERS.get(spec.kind)
    if lark is None:
        raise UnsupportedSchema(f"unknown kind of grammar: {spec.kind[:40]}")
    return {"name": "answer", "lark_grammar": lark(spec.value)}


def _schema(spec: Asked) -> Json:
    found = read(spec.value)
    if not isinstance(found, dict):
        raise UnsupportedSchema(f"{PREFIX}a schema must be a JSON object")
    return {**cast("Json", found), "x-guidance": _blanks(spec)}


def _blanks(spec: Asked) -> Json:
    """Return the options for blanks in JSON. Blanks are limited to a few, because a model that only repeats blanks
    never ends."""
    return {**STRICT, "whitespace_pattern": spec.whitespace} if spec.whitespace else STRICT


def _regex(pattern: str) -> str:
    made = cast("dict[str, list[dict[str, str]]]", json.loads(LLMatcher.grammar_from_regex(pattern)))
    return made["grammars"][0]["lark_grammar"]


def _lark(text: str) -> str:
    """Return a grammar in Lark's notation. GBNF is converted; it is parsed here, and its length is therefore
    limited."""
    if "::=" not in text:
        return text
    if len(text) > MAX_GBNF_CHARS:
        raise UnsupportedSchema(f"{PREFIX}the limit for GBNF is {MAX_GBNF_CHARS} characters; write it in Lark")
    try:
        return gbnf_to_lark(text)
    except (GbnfToLarkError, RecursionError) as error:
        raise UnsupportedSchema(f"{PREFIX}{one_line(str(error))}") from error


def _choice(value: str) -> str:
    texts = read(value)
    found = cast("list[object]", texts) if isinstance(texts, list) else []
    if not found or not all(isinstance(one, str) and one for one in found):
        raise UnsupportedSchema(f"{PREFIX}choices must be a list of non-empty texts")
    return "start: " + " | ".join(json.dumps(one) for one in found)


_LARK_WRITERS: dict[str, Callable[[str], str]] = {
    GrammarKind.REGEX: _regex,
    GrammarKind.CHOICE: _choice,
    GrammarKind.LARK: _lark,
}
