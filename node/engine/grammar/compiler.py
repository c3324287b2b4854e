"""What an answer has to be like (wire.frames.Grammar), compiled for a model's tokenizer: the I/O thread's part.

    size, depth, shape ─► written as llguidance's grammar ─► kept already? ─► vetted, in a process that may die of it ─►
    compiled here ─► kept, by hash, the last few for each model

Whoever sends grammars may mean harm, and this thread is the engine's life line. So what is too long or too deep is not
even read, and nothing is compiled here of which is not known, from a process of its own (`vetting`), that it ends. A
grammar that was refused is remembered, too.
"""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import GbnfToLarkError, gbnf_to_lark

from node.engine.grammar.constrained_splitter import Calls, FormatCutter, Outline, Thought
from node.engine.grammar.lark_builder import Sheet
from node.engine.grammar.matcher import Constraint, Thinking, all_but
from node.engine.grammar.sandbox import Vetting
from node.engine.grammar.sandbox_main import LIMITS, why_not
from node.engine.grammar.tool_formats import as_read, quoted, rules
from node.engine.grammar.tool_spec import PREFIX, STRICT, Calling, Json, Unfit, read, told, tools_of
from node.engine.text.markers import Place
from node.engine.text.tokenizer import Prompt, Tokenizer
from wire.frames import Grammar as Asked

LONGEST: Final = 1 << 17
"""Bytes of a schema or grammar, and of the tools where these are part of it."""
LONGEST_GBNF: Final = 1 << 13
KEPT: Final = 64
"""Compiled grammars, of all models together; a usual one takes 100 kB."""
REMEMBERED: Final = 256
"""Refused grammars."""


class Grammars:
    """Compiles what is asked for, for the tokenizers of one engine."""

    def __init__(self, vetting: Vetting | None = None) -> None:
        self._vetting = vetting or Vetting()
        self._guides: dict[int, Guide] = {}
        self._kept: OrderedDict[tuple[int, bytes], LLMatcher] = OrderedDict()
        self._wrong: OrderedDict[bytes, str] = OrderedDict()

    def compile(self, tokenizer: Tokenizer, asked: Asked, tools: str, prompt: Prompt, *, one: bool) -> "Grammar":
        """Give the grammar of a request with these tools and this prompt; `one`: of no more than one call. Unfit with a
        sentence for the client where there can be none."""
        if max(len(asked.value), len(asked.whitespace), len(tools) if asked.calls else 0) > LONGEST:
            raise Unfit(f"{PREFIX}it has more than {LONGEST} characters")
        guide = self._guide(tokenizer)
        outline = outline_of(tokenizer, asked, prompt)
        calling = tokenizer.calling if asked.calls else None
        # whoever vets it knows no tokens, so there the markers are words
        plain = write(asked, tools, None if calling is None else calling.in_words(), one=one)
        matcher = self._matcher(guide, plain, lambda: write(asked, tools, calling, one=one))
        known = "" if calling is None else as_read(calling.parser, tools_of(tools, asked.tool))
        return Grammar(matcher, guide, outline, known)

    @property
    def kept(self) -> int:
        """Number of compiled grammars that are kept."""
        return len(self._kept)

    def knows(self, tokenizer: Tokenizer) -> bool:
        """Whether this tokenizer's tables are made."""
        return id(tokenizer) in self._guides

    def _guide(self, tokenizer: Tokenizer) -> "Guide":
        guide = self._guides.get(id(tokenizer))
        if guide is None:
            guide = self._guides[id(tokenizer)] = Guide.of(tokenizer)
        return guide

    def _matcher(self, guide: "Guide", plain: str, written: Callable[[], str]) -> LLMatcher:
        """Compile what is `written` for a tokenizer, once the same in `plain` words, which decide it, was vetted."""
        digest = hashlib.sha256(plain.encode()).digest()
        key = id(guide), digest
        kept = self._kept.get(key)
        if kept is None:
            self._vet(plain, digest)
            kept = self._kept[key] = self._compiled(guide, written(), digest)
            while len(self._kept) > KEPT:
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
            raise Unfit(PREFIX + told(wrong))

    def _compiled(self, guide: "Guide", written: str, digest: bytes) -> LLMatcher:
        matcher = LLMatcher(guide.tokenizer, written, log_level=0, limits=LIMITS)
        wrong = why_not(matcher)
        if wrong:
            self._remember(digest, wrong)
            raise Unfit(PREFIX + told(wrong))
        return matcher

    def _remember(self, digest: bytes, wrong: str) -> None:
        self._wrong[digest] = wrong
        while len(self._wrong) > REMEMBERED:
            self._wrong.popitem(last=False)


@dataclass(frozen=True, slots=True, eq=False)
class Guide:
    """What of a tokenizer every grammar needs: llguidance's form of it, and the mask of all tokens but the endings."""

    owner: Tokenizer
    tokenizer: LLTokenizer
    unending: bytes

    @staticmethod
    def of(tokenizer: Tokenizer) -> "Guide":
        """Make it, which takes a second for a large vocabulary; Unfit where it cannot be made."""
        made = tokenizer.guide()
        if made is None:
            raise Unfit(
                "answers of this model cannot be constrained: its tokenizer or its format of answers is unusual"
            )
        return Guide(tokenizer, made, all_but(made.vocab_size, tokenizer.eos))


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled grammar, of which every answer gets a copy. `tools` are those of the request as the parser has to know
    them to read its calls, empty where it is to know them as they came."""

    matcher: LLMatcher
    guide: Guide
    outline: Outline
    tools: str = ""

    def begin(self) -> Constraint:
        """Stand at the beginning of an answer."""
        owner, thought = self.guide.owner, self.outline.thought
        thinking = Thinking(self.outline.think[1].encode(), owner.token_bytes) if thought else None
        opener = owner.single(self.outline.think[0]) if thought is Thought.MAY else None
        return Constraint(
            self.matcher.deep_copy(), self.guide.tokenizer, thinking, opener, self.guide.unending, owner.eos
        )

    def beginning(self) -> Place:
        """Return the place of the first token of an answer."""
        return self.outline.beginning()

    def cutter(self) -> FormatCutter:
        """Give the cutter of an answer's text."""
        return FormatCutter(self.outline)


def outline_of(tokenizer: Tokenizer, asked: Asked, prompt: Prompt) -> Outline:
    """Say where thoughts and calls may stand in the answer. A thought that the prompt has not opened may only be begun
    where one token does it, and not where the prompt has closed one already, as templates do to forbid it."""
    think, calling = tokenizer.think, tokenizer.calling
    thought = Thought.NONE
    if prompt.thinking:
        thought = Thought.OPEN
    elif think[1] and not prompt.plain and not prompt.thought and tokenizer.single(think[0]) is not None:
        thought = Thought.MAY
    if calling is None or not asked.calls:
        return Outline(think, thought)
    anywhere = asked.calls == "free" and not asked.kind
    calls = Calls.ANYWHERE if anywhere else Calls.FIRST
    return Outline(think, thought, calling.markers, calls, quoted=quoted(calling.parser))


def write(asked: Asked, tools: str, calling: Calling | None, *, one: bool) -> str:
    """Write what is asked for as llguidance's grammar, a JSON text; Unfit if it makes no sense."""
    answer: list[Json] = [_answer(asked)] if asked.kind else []
    if not asked.calls:
        return _grammar("start: @answer\n", answer)
    if calling is None:
        raise Unfit("this model was not made for tools: its template has none")
    free = asked.calls == "free"
    sheet = Sheet(calling)
    either = "@answer | calls" if asked.kind else "spoken"
    written = rules(sheet, tools_of(tools, asked.tool), free=free, one=one)
    return _grammar(f"start: {either if free else 'calls'}\n{written}", [*(answer if free else []), *sheet.parts()])


def _grammar(lark: str, parts: list[Json]) -> str:
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": lark}, *parts]})


def _answer(asked: Asked) -> Json:
    if asked.kind == "json_schema":
        return {"name": "answer", "json_schema": _schema(asked)}
    if asked.kind == "json_object":
        return {"name": "answer", "json_schema": {"type": "object", "x-guidance": _blanks(asked)}}
    lark = {"regex": _regex, "choice": _choice, "lark": _lark}.get(asked.kind)
    if lark is None:
        raise Unfit(f"there is no grammar of the kind {asked.kind[:40]}")
    return {"name": "answer", "lark_grammar": lark(asked.value)}


def _schema(asked: Asked) -> Json:
    found = read(asked.value)
    if not isinstance(found, dict):
        raise Unfit(f"{PREFIX}a schema is a JSON object")
    return {**cast("Json", found), "x-guidance": _blanks(asked)}


def _blanks(asked: Asked) -> Json:
    """Give the blanks between JSON's signs: a few, as a model that goes on with them for ever says nothing."""
    return {**STRICT, "whitespace_pattern": asked.whitespace} if asked.whitespace else STRICT


def _regex(pattern: str) -> str:
    made = cast("dict[str, list[dict[str, str]]]", json.loads(LLMatcher.grammar_from_regex(pattern)))
    return made["grammars"][0]["lark_grammar"]


def _lark(text: str) -> str:
    """Give a grammar in Lark's notation, or turn one in GBNF's, which is read here and so has to be short, into it."""
    if "::=" not in text:
        return text
    if len(text) > LONGEST_GBNF:
        raise Unfit(f"{PREFIX}in GBNF it may have {LONGEST_GBNF} characters; write it in Lark")
    try:
        return gbnf_to_lark(text)
    except (GbnfToLarkError, RecursionError) as error:
        raise Unfit(f"{PREFIX}{told(str(error))}") from error


def _choice(value: str) -> str:
    texts = read(value)
    found = cast("list[object]", texts) if isinstance(texts, list) else []
    if not found or not all(isinstance(one, str) and one for one in found):
        raise Unfit(f"{PREFIX}choices are a list of texts that are not empty")
    return "start: " + " | ".join(json.dumps(one) for one in found)
