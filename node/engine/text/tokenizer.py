"""A model's tokenizer: prompts out of requests, text out of tokens. What mlx-lm and transformers know of it stays here.

Loading is strictly local, and code that a model brings along is never run. Chat templates come with the models too:
they run in transformers' sandbox, see the request's clock instead of the wall's (else a resumed request could get
another prompt), and whatever they raise fails only the request.

`prompt`, `count` and `pipeline` may be called on several threads at the same time: they read only tables that never
change, and a pipeline holds its own decoding state. Grammars (`guide`, `calling`, `single`) are for one thread at once.

A long text is put into tokens by the Rust tokenizer's batch call, which releases the interpreter's lock. Its single
call holds the lock, and so stops every other thread: 8.6 s for 7.9 MB (`python -m tests.bench tokenize`).
"""

import ast
import importlib
import importlib.util
import json
import re
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from mlx_lm.generate import TextStateMachine
from mlx_lm.tokenizer_utils import (
    BPEStreamingDetokenizer,
    SPMStreamingDetokenizer,
    StreamingDetokenizer,
    TokenizerWrapper,
)
from mlx_lm.tokenizer_utils import load as load_tokenizer
from mlx_lm.utils import MODEL_REMAPPING, load_config
from msgspec.structs import replace
from transformers import PreTrainedTokenizerFast

from node.engine.grammar.tool_arguments import ways
from node.engine.grammar.tool_spec import Calling
from node.engine.text.detokenizer import AnswerFormat, TextPipeline
from node.engine.text.markers import NORMAL, Markup, Place
from node.engine.text.stop_strings import Stops
from node.engine.text.time_limit import Deadline
from node.engine.text.tool_call_parser import Calls
from wire.capacity.arithmetic import READ_SLACK, READ_SLICE
from wire.frames import Generate, Message

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer as RustTokenizer

LONGEST_MESSAGE: Final = 300
"""Characters of an error's text that are told: templates can raise with a whole conversation in it."""
RESERVED: Final = frozenset({
    "messages", "conversation", "tools", "add_generation_prompt", "tokenize", "chat_template", "strftime_now",
    "padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs", "sanitize_control_tokens",
})  # fmt: skip
"""What a request's template variables may not be called: it would change the call, not the template's world."""

FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tiktoken.model")
"""What a tokenizer is read from, as models have it."""
LONG_TEXT: Final = 16 * 1024
"""Characters from which a text is put into tokens without the interpreter's lock."""
PROBES: Final = "a", "b"
"""Questions that have no token in common."""
CLOCK_SECONDS: Final = 3600
"""For so long a template that writes the date is taken to write the same one."""
MAX_OPENINGS: Final = 64
"""Shared system prompts whose tokens are remembered."""
RENDER_SECONDS: Final = 5.0
"""Seconds that a chat template may take. A conversation of 8 MB takes less than one."""
TAIL: Final = 32
"""Tokens at a prompt's end among which the mark of an open thought is looked for, with the blanks after it."""
_NOW: ContextVar[int] = ContextVar("_NOW")
"""The clock of the request whose template is being rendered, in seconds."""


def _byte_signs() -> dict[str, bytes]:
    """Give the byte that each sign of a byte-level vocabulary stands for (the table of GPT-2's encoder): printable
    ones for themselves, all others for signs from 256 on in their order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    signs = {chr(byte): bytes([byte]) for byte in printable}
    return signs | {chr(256 + at): bytes([byte]) for at, byte in enumerate(others)}


BYTES: Final = _byte_signs()


class TokenizerError(ValueError):
    """This folder gives no tokenizer; the text says why and ends with no path but the folder's name."""


class TemplateFailed(ValueError):
    """This request gives no prompt; the text is one line, for the client."""


class TooLong(ValueError):
    """A prompt has more tokens than it may; the text is one line, for the client."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as token ids. `thinking`: it ends inside a thought, so the answer begins with reasoning; `thought`: it
    ends with the end of one. `plain`: no template wrote it."""

    ids: tuple[int, ...]
    thinking: bool
    thought: bool = False
    plain: bool = False


def load(folder: Path) -> "Tokenizer":
    """Load the tokenizer of a model's folder, with nothing but what lies in it; TokenizerError if that fails."""
    if not folder.is_dir():
        raise TokenizerError(f"{folder.name}: there is no such folder")
    try:
        return Tokenizer(_wrapper(folder))
    except Exception as error:
        if _needs_code(folder):
            reason = "its tokenizer needs code that comes with the model, and such code is never run"
        else:
            reason = _line(error).replace(str(folder), folder.name)
        raise TokenizerError(f"{folder.name}: {reason}") from error


class Tokenizer:
    """One model's tokenizer.

    `eos` are the ids that end an answer, `size` is one more than the highest id, `features` what the model can do:
    `tools` where its calls can be read. `wrapper` is mlx-lm's tokenizer, `rust` the tokenizer below it, None where
    that is written in Python; `markup` are the marks of thoughts and calls.
    """

    def __init__(self, wrapper: TokenizerWrapper) -> None:
        self.wrapper = wrapper
        self.eos = frozenset(wrapper.eos_token_ids)
        self.size = max(len(wrapper), max(wrapper.get_vocab().values(), default=-1) + 1)
        self.features = ("tools",) if wrapper.has_tool_calling else ()
        self._own_renderer = wrapper.chat_template is None or "chat_template_type" in wrapper.init_kwargs
        self._added = {token: text for text, token in wrapper.get_added_vocab().items()}
        self._detokenizer = wrapper.detokenizer
        self._ids: dict[str, int] = {}
        self._openings: dict[tuple[str, str, int], tuple[int, ...]] = {}
        self._special = re.compile("")
        self.markup = _markup(wrapper)
        self._machines = {tools: TextStateMachine(self.markup.transitions(tools)) for tools in (False, True)}
        self._plainly = cast(
            "Callable[[str], list[int]]", partial(cast("Any", wrapper).encode, add_special_tokens=False)
        )
        fast = cast("Any", wrapper)._tokenizer
        self.rust: RustTokenizer | None = fast.backend_tokenizer if isinstance(fast, PreTrainedTokenizerFast) else None
        # a truncation set in the tokenizer's file is taken off at its first use, and must not be while others read
        wrapper.encode("")

    def prompt(self, request: Generate, most: int = 0) -> Prompt:
        """Put a request into tokens: its prompt as it is, or rendered by the model's template.

        A text that is clearly longer than `most` tokens (0: any) raises TooLong once so many are counted. Raises
        TemplateFailed where template or tokenizer fail."""
        plain = bool(request.text or request.ids)
        try:
            ids = request.ids or self.encode(self._text(request), plain=plain, most=most)
            self._check(ids)
            if plain:
                return Prompt(ids, False, plain=True)
            return Prompt(ids, *(self._ends_with(ids, marker) for marker in self.markup.think))
        except (TemplateFailed, TooLong):
            raise
        except Exception as error:
            raise TemplateFailed(_line(error)) from error

    def shared(self, request: Generate, prompt: Prompt) -> int:
        """Return how many of a prompt's first tokens follow from its shared system prompt alone; 0 where it has none,
        or where something else stands before its end.

        They are what two prompts have in common that share the system prompt and nothing else."""
        if not request.shared or not request.messages:
            return 0
        system = request.messages[0]
        known = system.role, system.content, request.created // CLOCK_SECONDS
        opening = self._openings.get(known)
        if opening is None:
            opening = self._openings[known] = self._opening(request, system)
            while len(self._openings) > MAX_OPENINGS:
                self._openings.pop(next(iter(self._openings)), None)
        return len(opening) if prompt.ids[: len(opening)] == opening else 0

    def _opening(self, request: Generate, system: Message) -> tuple[int, ...]:
        """Return the tokens in which prompts begin that share this system prompt; none where a template fails."""
        try:
            one, other = (self._probe(request, system, word) for word in PROBES)
        except Exception:
            return ()
        return tuple(token for token, _ in takewhile(_equal, zip(one, other, strict=False)))

    def _probe(self, request: Generate, system: Message, word: str) -> tuple[int, ...]:
        probe = replace(request, messages=(system, Message("user", word)), tools="", template="")
        return self.encode(self._text(probe), plain=False)

    def count(self, request: Generate) -> int:
        """Return the number of a request's prompt tokens; TemplateFailed where template or tokenizer fail."""
        try:
            text = self._text(request)
            if self.rust is not None and len(text) > LONG_TEXT:
                return len(self.rust.encode_batch_fast([text], add_special_tokens=False)[0])
            ids = self.encode(text, plain=False)
            self._check(ids)
            return len(ids)
        except TemplateFailed:
            raise
        except Exception as error:
            raise TemplateFailed(_line(error)) from error

    def _text(self, request: Generate) -> str:
        if request.text:
            return request.text
        if not self.wrapper.has_chat_template:
            raise TemplateFailed("the model has no chat template")
        return self._render(request)

    def encode(self, text: str, *, plain: bool, most: int = 0) -> tuple[int, ...]:
        """Put a text into tokens; with `plain` with those that the tokenizer adds to every text."""
        if self.rust is None or len(text) <= LONG_TEXT:
            return tuple(self.wrapper.encode(text) if plain else self._plainly(text))
        if most and len(text) > max(2 * most, READ_SLICE):
            self._bound(self.rust, text, most)
        return tuple(self.rust.encode_batch_fast([text], add_special_tokens=plain)[0].ids)

    def _bound(self, rust: "RustTokenizer", text: str, most: int) -> None:
        """Raise TooLong as soon as a text's slices have more than `most` tokens. A cut adds at most a few."""
        counted = 0
        for start in range(0, len(text), READ_SLICE):
            part = text[start : start + READ_SLICE]
            counted += len(rust.encode_batch_fast([part], add_special_tokens=False)[0])
            if counted > most * READ_SLACK:
                share = (start + len(part)) / len(text)
                raise TooLong(f"the first {share:.0%} of the prompt have {counted} tokens already")

    def pipeline(
        self,
        request_id: str,
        choice: int,
        stops: tuple[str, ...],
        tools: str,
        thinking: bool,
        *,
        one_call: bool = False,
        grammar: AnswerFormat | None = None,
    ) -> TextPipeline:
        """Begin the text of one choice. `tools` as in the request; `thinking` as the prompt said. What follows a
        `grammar` has its markers where that puts them, and nowhere else."""
        given = _tools((grammar.tools if grammar is not None else "") or tools)
        prefix = f"call_{request_id}_{choice}_" if choice else f"call_{request_id}_"
        calls = Calls(prefix, self.wrapper.tool_parser if given else None, ways(given), self.markup.call[1])
        if grammar is not None:
            place = grammar.beginning()
            return TextPipeline(self._decoder(), grammar.cutter(), place, Stops(stops), calls, one_call=one_call)
        place = self.markup.beginning(thinking)
        cutter = MarkCutter(self._machines[bool(given)], place)
        return TextPipeline(self._decoder(), cutter, place, Stops(stops), calls, one_call=one_call)

    def plain_pipeline(self, stops: tuple[str, ...]) -> TextPipeline:
        """Begin the text of one choice of a request without a template: content, whatever it looks like."""
        return TextPipeline(self._decoder(), Uncut(), Place(NORMAL), Stops(stops), Calls("", None, (), ""))

    # grammars

    @property
    def think(self) -> tuple[str, str]:
        """The markers around a thought, empty where there are none."""
        return self.markup.think

    @property
    def calling(self) -> Calling | None:
        """How calls are written; None where the model makes none."""
        if not self.markup.call[0]:
            return None
        parser = str(getattr(self.wrapper.tool_parser, "__module__", "")).rpartition(".")[2]
        template = self.wrapper.chat_template
        return Calling(parser, self.markup.call, template if isinstance(template, str) else "", self._mark)

    def single(self, text: str) -> int | None:
        """Give the one token that a marker is, if it is one."""
        ids = self._plainly(text)
        return ids[0] if len(ids) == 1 else None

    @property
    def constrainable(self) -> bool:
        """Whether answers can follow a grammar: not where they have a format of their own, into which no other can be
        put, and not with a tokenizer that llguidance cannot read."""
        return not self.markup.edges and isinstance(cast("Any", self.wrapper)._tokenizer, PreTrainedTokenizerFast)

    def guide(self) -> LLTokenizer | None:
        """Give the tokenizer as llguidance has it; None where it cannot be. Takes a second for a large vocabulary."""
        fast = cast("Any", self.wrapper)._tokenizer
        if not self.constrainable:
            return None
        guide = from_tokenizer(fast, n_vocab=self.size, eos_token=sorted(self.eos))
        self._learn_special(guide)
        return guide

    def _mark(self, marker: str) -> tuple[str, bool]:
        """Write text in Lark, the special tokens in it as tokens; and whether it begins with one."""
        parts = [part for part in self._special.split(marker) if part] if self._special.pattern else [marker]
        written = [f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part) for part in parts]
        return " ".join(written), bool(parts) and parts[0] in self._ids

    def _learn_special(self, guide: LLTokenizer) -> None:
        """Learn which tokens are no text to llguidance."""
        self._ids = {text: token for token, text in self._added.items() if text and guide.is_special_token(token)}
        longest = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest))})" if longest else "")

    def _decoder(self) -> "_Decoder":
        return _Decoder(self.wrapper.detokenizer, self.size, self.eos)

    def token_bytes(self, token: int) -> bytes:
        """Give a token's bytes: exactly where tokens are bytes, else the text that it has alone; none out of range."""
        if not 0 <= token < self.size:
            return b""
        if token in self._added:
            return self._added[token].encode()
        if isinstance(self._detokenizer, BPEStreamingDetokenizer):
            return b"".join(BYTES.get(sign) or sign.encode() for sign in self._detokenizer.tokenmap[token] or "")
        if isinstance(self._detokenizer, SPMStreamingDetokenizer):
            return self._detokenizer.tokenmap[token].replace("\u2581".encode(), b" ")
        return self.wrapper.decode([token]).encode()

    # prompts

    def _render(self, request: Generate) -> str:
        variables = _variables(request.template)
        continued = variables.pop("continue_final_message", False) is True
        if continued:
            variables["continue_final_message"] = True
        tools = _tools(request.tools) or None
        if not self._own_renderer:
            _set_clock(self.wrapper.get_chat_template(None, tools))
        moment = _NOW.set(request.created)
        try:
            return self._written_out(request, tools, continued, variables)
        finally:
            _NOW.reset(moment)

    def _written_out(
        self, request: Generate, tools: list[object] | None, continued: bool, variables: dict[str, object]
    ) -> str:
        with Deadline(RENDER_SECONDS, f"the chat template took more than {RENDER_SECONDS:.0f} s"):
            messages = [_written(message, self._own_renderer) for message in request.messages]
            return cast("str", cast("Any", self.wrapper).apply_chat_template(
                messages, tools=tools, add_generation_prompt=not continued, tokenize=False, **variables
            ))  # fmt: skip

    def _check(self, ids: tuple[int, ...]) -> None:
        if not ids:
            raise TemplateFailed("the chat template gives an empty prompt")
        wrong = next((token for token in ids if not 0 <= token < self.size), None)
        if wrong is not None:
            raise TemplateFailed(f"the tokenizer gives token {wrong}, and there are only {self.size}")

    def _ends_with(self, ids: tuple[int, ...], marker: str) -> bool:
        """Look at the very end only: the marker may also stand in what a user wrote."""
        return bool(marker) and self.wrapper.decode(list(ids[-TAIL:])).rstrip().endswith(marker)


class _Decoder:
    """mlx-lm's streaming detokenizer for one pipeline, held to our rules: no id raises, endings have no text."""

    def __init__(self, detokenizer: StreamingDetokenizer, size: int, silent: frozenset[int]) -> None:
        self._detokenizer = detokenizer
        self._size = size
        self._silent = silent

    def feed(self, token: int) -> str:
        if token in self._silent or not 0 <= token < self._size:
            return ""
        return self._segment(lambda: self._detokenizer.add_token(token))

    def flush(self) -> str:
        return self._segment(self._detokenizer.finalize)

    def _segment(self, advance: Callable[[], None]) -> str:
        try:
            advance()
            segment = self._detokenizer.last_segment
        except Exception:  # an id in a gap of the vocabulary has no text, and no more can be said of it
            segment = ""
        return segment


class MarkCutter:
    """mlx-lm's state machine for one pipeline, beginning at a place of the machine."""

    def __init__(self, machine: "TextStateMachine[Place]", place: Place) -> None:
        self._state = machine.make_state(place)

    def feed(self, text: str) -> list[tuple[Place, str]]:
        """See `Cutter`."""
        self._state, segments = TextStateMachine.split(self._state, text)
        return segments

    def flush(self) -> str:
        """See `Cutter`."""
        self._state, text, _ = TextStateMachine.flush(self._state)
        return text


class Uncut:
    """A cutter for text in which nothing is a mark."""

    def feed(self, text: str) -> list[tuple[Place, str]]:
        """See `Cutter`."""
        return [(Place(NORMAL), text)]

    def flush(self) -> str:
        """See `Cutter`."""
        return ""


# loading


def _wrapper(folder: Path) -> TokenizerWrapper:
    config = load_config(folder) if (folder / "config.json").exists() else {}
    strictly = {"trust_remote_code": False, "local_files_only": True}
    return load_tokenizer(folder, strictly, config.get("eos_token_id"), defaults(config.get("model_type")))


def defaults(kind: object) -> dict[str, object] | None:
    """Read what mlx-lm presumes of a type of model whose folder says too little about its tokenizer.

    It stands in the model's module, which is read here and not imported: that would make kernels on this thread, and
    MLX belongs to another."""
    name = MODEL_REMAPPING.get(kind, kind) if isinstance(kind, str) else ""
    spec = importlib.util.find_spec(f"mlx_lm.models.{name}") if name.isidentifier() else None
    if spec is None or spec.origin is None:
        return None
    for statement in ast.parse(Path(spec.origin).read_bytes()).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="TOKENIZER_DEFAULTS")], value=value):
                return ast.literal_eval(value)
            case _:
                pass
    return None


def _needs_code(folder: Path) -> bool:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and "auto_map" in config


def _markup(wrapper: TokenizerWrapper) -> Markup:
    return Markup(
        think=(wrapper.think_start or "", wrapper.think_end or ""),
        call=(wrapper.tool_call_start or "", wrapper.tool_call_end or ""),
        structure=tuple(wrapper.structural_markers),
        edges=wrapper.response_transitions,
        initial=wrapper.response_initial_state or "",
    )


def _equal(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]


# the template's world


def _now(form: str) -> str:
    return datetime.fromtimestamp(_NOW.get(), UTC).strftime(form)


def _set_clock(source: str) -> None:
    """Give a template the request's clock.

    Variables cannot bring it: transformers turns every value into plain data first. So it goes where the template's own
    clock is, into the globals of the compiled template, which transformers keeps by source."""
    module = importlib.import_module("transformers.utils.chat_template_utils")
    compiled = cast("Callable[[str], Template]", module._compile_jinja_template)
    compiled(source).globals["strftime_now"] = _now


def _written(message: Message, own_renderer: bool) -> dict[str, object]:
    """Write a message as templates know it. Arguments are objects, as most templates iterate over them; renderers in
    Python parse the text themselves."""
    written: dict[str, object] = {"role": message.role, "content": message.content}
    if message.name:
        written["name"] = message.name
    if message.tool_call_id:
        written["tool_call_id"] = message.tool_call_id
    if message.reasoning:
        written["reasoning_content"] = message.reasoning
    if message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if own_renderer else _arguments(call.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return written


def _arguments(text: str) -> object:
    try:
        found = json.loads(text)
    except ValueError:
        return text
    return cast("object", found) if isinstance(found, dict) else text


def _tools(text: str) -> list[object]:
    found = cast("object", json.loads(text or "[]"))
    if not isinstance(found, list):
        raise TemplateFailed("the tools are not a JSON array")
    return cast("list[object]", found)


def _variables(text: str) -> dict[str, object]:
    found = cast("object", json.loads(text or "{}"))
    if not isinstance(found, dict):
        raise TemplateFailed("the template's variables are not a JSON object")
    variables = cast("dict[str, object]", found)
    reserved = sorted(RESERVED & variables.keys())
    if reserved:
        raise TemplateFailed(f"a template variable cannot be called {', '.join(reserved)}")
    return variables


def _line(error: Exception) -> str:
    """Tell an exception in one line: its name and the beginning of its text."""
    words = " ".join(str(error).split())
    told = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return told if len(told) <= LONGEST_MESSAGE else told[: LONGEST_MESSAGE - 1] + "…"
