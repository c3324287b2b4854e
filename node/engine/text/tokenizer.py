"""Tokenizer of a model: from requests to prompts, from tokens to text. It encapsulates mlx-lm's and transformers' APIs.

`tokenizer_loader` loads a tokenizer, `chat_template` renders the prompts.

`tokenize_request`, `count_tokens` and `create_pipeline` may be called on several threads at the same time. They read
only immutable tables, and a pipeline has its own decoding state. Only one thread at a time may use the parts for
grammars (`build_guide`, `tool_call_format`, `find_single_token`).

A long text is tokenized by the Rust tokenizer's batch call, which releases the interpreter's lock. Its single call
holds the lock and blocks every other thread: 8.6 s for 7.9 MB (`python -m tests.bench tokenize`).
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any, Final, cast

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from mlx_lm.generate import TextStateMachine
from mlx_lm.tokenizer_utils import TokenizerWrapper
from msgspec.structs import replace
from transformers import PreTrainedTokenizerFast

from node.engine.grammar.tool_arguments import list_tool_variants
from node.engine.grammar.tool_spec import ToolCallFormat
from node.engine.text import harmony
from node.engine.text.call_repairs import CALL_ENDS, NAKED, wrap_parser
from node.engine.text.chat_template import ChatTemplate, parse_tools
from node.engine.text.detokenizer import AnswerFormat, TextPipeline
from node.engine.text.markers import NORMAL, MarkerPlace, MarkerSet
from node.engine.text.pipeline_parts import MarkCutter, PassThrough, TokenDecoder
from node.engine.text.stop_strings import StopStrings
from node.engine.text.token_bytes import TokenBytes
from node.engine.text.tokenizer_errors import TemplateFailed, TooLong, convert_panics, format_error
from node.engine.text.tool_call_parser import NO_NAMES, Parse, ToolCallParser
from wire.capacity.arithmetic import TOKENIZE_SLACK, TOKENIZE_SLICE_CHARS
from wire.frames import Generate, Message

if TYPE_CHECKING:
    from tokenizers import Tokenizer as RustTokenizer

LONG_TEXT_CHARS: Final = 16 * 1024
"""Characters above which a text is tokenized without the interpreter's lock."""
PROBES: Final = "a", "b"
"""User messages without a common token, with which the tokens that depend only on the system prompt are found."""
DATE_VALID_SECONDS: Final = 3600
"""Seconds for which a template that contains the date is expected to render the same date."""
MAX_OPENINGS: Final = 64
"""Maximum number of shared system prompts whose tokens are cached."""
TAIL_TOKENS: Final = 32
"""Number of tokens at the end of a prompt in which a marker of reasoning, with blanks after it, is searched."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Prompt of a request as tokens, with the state of the model's reasoning at its end."""

    ids: tuple[int, ...]
    """Token ids."""
    thinking: bool
    """Whether the prompt ends with the marker that starts reasoning; the answer then starts within reasoning."""
    ends_reasoning: bool = False
    """Whether the prompt ends with the marker that ends reasoning, by which templates forbid reasoning."""
    plain: bool = False
    """Whether the prompt is the text or the ids of the request, without a template."""
    continued: bool = False
    """Whether the answer continues the text of a message in Harmony: the prompt does not end with `harmony.OPENING`."""


class Tokenizer:
    """Tokenizer of one model: renders and tokenizes prompts, and decodes answers. `wrapper` is mlx-lm's tokenizer."""

    def __init__(self, wrapper: TokenizerWrapper) -> None:
        self.wrapper = wrapper
        """Tokenizer of mlx-lm, with the chat template."""
        vocabulary = wrapper.get_vocab()
        self._has_harmony = has_harmony = not wrapper.has_tool_calling and harmony.has_format(vocabulary)
        ends = {vocabulary[token] for token in harmony.ENDS} if has_harmony else set[int]()
        self.eos = frozenset(wrapper.eos_token_ids) | ends
        """Ids that end an answer."""
        self.size = max(len(wrapper), max(vocabulary.values(), default=-1) + 1)
        """Highest id plus one."""
        parser: Parse | None = wrapper.tool_parser
        self._parse_call = parser and wrap_parser(_get_parser_name(wrapper), parser)
        if has_harmony:
            self._parse_call = harmony.parse_call
        self.call_parser = "harmony" if has_harmony else _get_parser_name(wrapper)
        """Name of the parser of calls: `harmony`, or the name of mlx-lm's parser (`_get_parser_name`)."""
        self.features = ("tools",) if wrapper.has_tool_calling or has_harmony else ()
        """Features of the model: `tools` if its calls can be parsed."""
        self.token_bytes = TokenBytes(wrapper, self.size).get_bytes
        """`token_bytes(token)` returns the bytes of a token; empty for an id out of range."""
        self._template = ChatTemplate(wrapper)
        self._ids: dict[str, int] = {}
        self._openings: dict[tuple[str, str, int], tuple[int, ...]] = {}
        self._special = re.compile("")
        self.markers = harmony.MARKERS if has_harmony else _build_markers(wrapper)
        """Markers of reasoning and tool calls."""
        self._machines = {tools: TextStateMachine(self.markers.build_transitions(tools)) for tools in (False, True)}
        self._encode_plainly = cast(
            "Callable[[str], list[int]]", partial(cast("Any", wrapper).encode, add_special_tokens=False)
        )
        fast = cast("Any", wrapper)._tokenizer
        self.rust: RustTokenizer | None = fast.backend_tokenizer if isinstance(fast, PreTrainedTokenizerFast) else None
        """Rust tokenizer below `wrapper`; None if the tokenizer is written in Python."""
        # The first use removes a truncation that the tokenizer's file sets. It must not happen during a call of another
        # thread.
        wrapper.encode("")

    def tokenize_request(self, request: Generate, max_tokens: int = 0) -> TokenizedPrompt:
        """Return the tokens of a request: its ids unchanged, its text without a template, or its messages rendered by
        the model's template.

        With `max_tokens` above 0, raise `TooLong` for a very long text with more tokens (`encode`). Other prompts are
        returned whole, even with more tokens. Raise `TemplateFailed` if template or tokenizer fail, the prompt is
        empty, or an id is out of range.
        """
        plain = bool(request.text or request.ids)
        try:
            ids = request.ids or self.encode(self._render_text(request), plain=plain, max_tokens=max_tokens)
            self._check_ids(ids)
            if plain:
                return TokenizedPrompt(ids, False, plain=True)
            if self._has_harmony:
                return TokenizedPrompt(ids, False, continued=not self._ends_with(ids, harmony.OPENING))
            return TokenizedPrompt(ids, *(self._ends_with(ids, marker) for marker in self.markers.think))
        except (TemplateFailed, TooLong):
            raise
        except Exception as error:
            raise TemplateFailed(format_error(error)) from error

    def count_shared_tokens(self, request: Generate, prompt: TokenizedPrompt) -> int:
        """Return the number of leading tokens of a prompt that depend only on the system prompt.

        All prompts without tools that have this system prompt start with these tokens. Return 0 if the API keys do not
        share the system prompt (`Generate.shared`), or if this prompt does not start with these tokens.
        """
        if not request.shared or not request.messages:
            return 0
        system = request.messages[0]
        known = system.role, system.content, request.created // DATE_VALID_SECONDS
        opening = self._openings.get(known)
        if opening is None:
            opening = self._openings[known] = self._find_opening(request, system)
            for oldest in tuple(self._openings)[:-MAX_OPENINGS]:  # a copy: several threads add prompts
                self._openings.pop(oldest, None)
        return len(opening) if prompt.ids[: len(opening)] == opening else 0

    def _find_opening(self, request: Generate, system: Message) -> tuple[int, ...]:
        """Return the common leading tokens of prompts with this system prompt; empty if the template fails."""
        try:
            one, other = (self._tokenize_probe(request, system, word) for word in PROBES)
        except Exception:
            return ()
        return tuple(token for token, _ in takewhile(_is_equal, zip(one, other, strict=False)))

    def _tokenize_probe(self, request: Generate, system: Message, word: str) -> tuple[int, ...]:
        probe = replace(request, messages=(system, Message("user", word)), tools="", template="")
        return self.encode(self._render_text(probe), plain=False)

    def count_tokens(self, request: Generate) -> int:
        """Return the number of tokens of a request's text or rendered messages, without the special tokens that the
        tokenizer adds to every text.

        Raise `TemplateFailed` if template or tokenizer fail, or the prompt is empty.
        """
        try:
            text = self._render_text(request)
            if self.rust is not None and len(text) > LONG_TEXT_CHARS:
                with convert_panics():
                    return len(self.rust.encode_batch_fast([text], add_special_tokens=False)[0])
            ids = self.encode(text, plain=False)
            self._check_ids(ids)
            return len(ids)
        except TemplateFailed:
            raise
        except Exception as error:
            raise TemplateFailed(format_error(error)) from error

    def _render_text(self, request: Generate) -> str:
        if request.text:
            return request.text
        return self._template.render(request)

    def encode(self, text: str, *, plain: bool, max_tokens: int = 0) -> tuple[int, ...]:
        """Return the token ids of a text. With `plain`, include the special tokens that the tokenizer adds to every
        text.

        With `max_tokens` above 0, raise `TooLong` for a very long text with more than `TOKENIZE_SLACK × max_tokens`
        tokens. This is checked only with a Rust tokenizer, and only for a text with more characters than
        `TOKENIZE_SLICE_CHARS` and `2 × max_tokens`. Raise `TokenizerPanic` if the native tokenizer panics.
        """
        with convert_panics():
            if self.rust is None or len(text) <= LONG_TEXT_CHARS:
                return tuple(self.wrapper.encode(text) if plain else self._encode_plainly(text))
            if max_tokens and len(text) > max(2 * max_tokens, TOKENIZE_SLICE_CHARS):
                self._check_length(self.rust, text, max_tokens)
            return tuple(self.rust.encode_batch_fast([text], add_special_tokens=plain)[0].ids)

    def _check_length(self, rust: "RustTokenizer", text: str, max_tokens: int) -> None:
        """Raise `TooLong` as soon as the slices of a text have more than `TOKENIZE_SLACK × max_tokens` tokens. The
        slack covers the few tokens that a cut between slices can add."""
        counted = 0
        for start in range(0, len(text), TOKENIZE_SLICE_CHARS):
            part = text[start : start + TOKENIZE_SLICE_CHARS]
            counted += len(rust.encode_batch_fast([part], add_special_tokens=False)[0])
            if counted > max_tokens * TOKENIZE_SLACK:
                share = (start + len(part)) / len(text)
                raise TooLong(f"the first {share:.0%} of the prompt already has {counted} tokens")

    def create_pipeline(
        self,
        request_id: str,
        choice: int,
        stops: tuple[str, ...],
        tools: str,
        thinking: bool,
        *,
        continued: bool = False,
        one_call: bool = False,
        grammar: AnswerFormat | None = None,
        client_names: Mapping[str, str] = NO_NAMES,
    ) -> TextPipeline:
        """Return a new text pipeline for one choice of a request.

        The ids of its calls contain `request_id` and, above 0, `choice`. `stops` are its stop strings. `tools` is the
        JSON array of the request. `thinking`: the prompt has started the reasoning. `continued`: the prompt has started
        a message in Harmony. With `one_call` the answer ends with its first call. With a `grammar`, markers are
        recognized only where the grammar allows them; `thinking` and `continued` have no effect, and tools of the
        grammar replace `tools`. `client_names` has the client's names of tools by the names that the model uses, where
        they differ. Raise `TemplateFailed` or `ValueError` if `tools` is not a JSON array.
        """
        parsed_tools = parse_tools((grammar.tools if grammar is not None else "") or tools)
        prefix = f"call_{request_id}_{choice}_" if choice else f"call_{request_id}_"
        calls = ToolCallParser(
            prefix,
            self._parse_call if parsed_tools else None,
            list_tool_variants(parsed_tools),
            self.markers.call[1],
            client_names,
            CALL_ENDS.get(self.call_parser, ""),
        )
        if grammar is not None:
            place = grammar.get_start_place()
            return TextPipeline(
                self._create_decoder(), grammar.create_cutter(), place, StopStrings(stops), calls, one_call=one_call
            )
        place = harmony.CONTINUED if continued else self.markers.get_start_place(thinking)
        cutter = MarkCutter(self._machines[bool(parsed_tools)], place)
        return TextPipeline(self._create_decoder(), cutter, place, StopStrings(stops), calls, one_call=one_call)

    def create_plain_pipeline(self, stops: tuple[str, ...]) -> TextPipeline:
        """Return a new text pipeline for one choice whose prompt has no template: all text is content. `stops` are the
        stop strings."""
        return TextPipeline(
            self._create_decoder(),
            PassThrough(),
            MarkerPlace(NORMAL),
            StopStrings(stops),
            ToolCallParser("", None, (), ""),
        )

    # grammars

    @property
    def think(self) -> tuple[str, str]:
        """Markers at the start and the end of reasoning; empty texts if the model does not reason."""
        return self.markers.think

    @property
    def tool_call_format(self) -> ToolCallFormat | None:
        """Format of the model's tool calls; None if the model has none."""
        if not self.markers.call[0]:
            return None
        template = self.wrapper.chat_template
        return ToolCallFormat(
            self.call_parser, self.markers.call, template if isinstance(template, str) else "", self._render_literal
        )

    def find_single_token(self, text: str) -> int | None:
        """Return the token id of a marker; None if the marker takes several tokens or is empty."""
        ids = self._encode_plainly(text)
        return ids[0] if len(ids) == 1 else None

    def has_message_answer(self, prompt: TokenizedPrompt) -> bool:
        """Return whether the answer to a prompt is a sequence of whole messages in Harmony."""
        return self._has_harmony and not prompt.plain and not prompt.continued

    @property
    def constrainable(self) -> bool:
        """Whether answers can follow a grammar. False if the model has its own answer format other than Harmony, or if
        llguidance cannot use the tokenizer."""
        known = self._has_harmony or not self.markers.edges
        return known and isinstance(cast("Any", self.wrapper)._tokenizer, PreTrainedTokenizerFast)

    def build_guide(self) -> LLTokenizer | None:
        """Build llguidance's form of the tokenizer. Return None if answers cannot follow a grammar (`constrainable`).

        Also record the special tokens, which `tool_call_format` renders as tokens only after this call. The call takes
        about 1 s for a large vocabulary.
        """
        fast = cast("Any", self.wrapper)._tokenizer
        if not self.constrainable:
            return None
        guide = from_tokenizer(fast, n_vocab=self.size, eos_token=sorted(self.eos))
        self._record_special_tokens(guide)
        return guide

    def _render_literal(self, marker: str) -> tuple[str, bool]:
        """Return the Lark expression that matches `marker`, with special tokens as tokens, and whether it starts with a
        token."""
        parts = [part for part in self._special.split(marker) if part] if self._special.pattern else [marker]
        written = [f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part) for part in parts]
        return " ".join(written), bool(parts) and parts[0] in self._ids

    def _record_special_tokens(self, guide: LLTokenizer) -> None:
        """Record the tokens that llguidance does not treat as text."""
        added = self.wrapper.get_added_vocab()
        self._ids = {text: token for text, token in added.items() if text and guide.is_special_token(token)}
        longest = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest))})" if longest else "")

    def _create_decoder(self) -> TokenDecoder:
        return TokenDecoder(self.wrapper.detokenizer, self.size, self.eos)

    def _check_ids(self, ids: tuple[int, ...]) -> None:
        if not ids:
            raise TemplateFailed("the chat template rendered an empty prompt")
        wrong = next((token for token in ids if not 0 <= token < self.size), None)
        if wrong is not None:
            raise TemplateFailed(f"token {wrong} is outside the vocabulary of {self.size} tokens")

    def _ends_with(self, ids: tuple[int, ...], marker: str) -> bool:
        """Return whether the prompt's last tokens end with a marker. Only the end counts, because a user's text may
        contain the marker."""
        return bool(marker) and self.wrapper.decode(list(ids[-TAIL_TOKENS:])).rstrip().endswith(marker)


def _get_parser_name(wrapper: TokenizerWrapper) -> str:
    """Return the name of mlx-lm's parser of calls. If mlx-lm has no parser for the model, the result is empty or the
    name of another module."""
    return str(getattr(wrapper.tool_parser, "__module__", "")).rpartition(".")[2]


def _build_markers(wrapper: TokenizerWrapper) -> MarkerSet:
    return MarkerSet(
        think=(wrapper.think_start or "", wrapper.think_end or ""),
        call=(wrapper.tool_call_start or "", wrapper.tool_call_end or ""),
        naked=NAKED.get(_get_parser_name(wrapper), ("", "")),
        structure=tuple(wrapper.structural_markers),
        edges=wrapper.response_transitions,
        initial=wrapper.response_initial_state or "",
    )


def _is_equal(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]
