"""Tokenizer of a model: from requests to prompts, from tokens to text. It encapsulates mlx-lm's and transformers' APIs.

Loading is strictly local, and code that comes with a model is never run. Chat templates come with the models and run in
transformers' sandbox. They see the time of the request instead of the present, because a resumed request must get the
same prompt. An exception of a template fails only the request.

`prompt`, `count` and `pipeline` may be called on several threads at the same time. They read only immutable tables, and
a pipeline holds its own decoding state. Grammars (`guide`, `calling`, `single`) are for one thread at once.

A long text is tokenized by the Rust tokenizer's batch call, which releases the interpreter's lock. Its single call
holds the lock and thus stops every other thread: 8.6 s for 7.9 MB (`python -m tests.bench tokenize`).
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

from node.engine.grammar.tool_arguments import tool_variants
from node.engine.grammar.tool_spec import ToolCallFormat
from node.engine.text.detokenizer import AnswerFormat, TextPipeline
from node.engine.text.markers import NORMAL, MarkerPlace, MarkerSet
from node.engine.text.stop_strings import StopStrings
from node.engine.text.time_limit import Deadline
from node.engine.text.tool_call_parser import ToolCallParser
from wire.capacity.arithmetic import TOKENIZE_SLACK, TOKENIZE_SLICE_CHARS
from wire.frames import Generate, Message

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer as RustTokenizer

MAX_ERROR_CHARS: Final = 300
"""Maximum characters of an error's text in a message: templates can raise with a whole conversation in it."""
RESERVED: Final = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "add_generation_prompt",
        "tokenize",
        "chat_template",
        "strftime_now",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "sanitize_control_tokens",
    }
)
"""Forbidden names of a request's template variables: they would change the call instead of the template's variables."""

FILES: Final = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tiktoken.model")
"""Names of tokenizer files in model folders."""
LONG_TEXT_CHARS: Final = 16 * 1024
"""Characters from which a text is tokenized without the interpreter's lock."""
PROBES: Final = "a", "b"
"""User messages without a common token, for finding the tokens that follow from a system prompt."""
DATE_VALID_SECONDS: Final = 3600
"""Seconds for which a template that contains the date is expected to render the same date."""
MAX_OPENINGS: Final = 64
"""Maximum number of shared system prompts whose tokens are remembered."""
RENDER_TIMEOUT_SECONDS: Final = 5.0
"""Time limit of a chat template in seconds. A conversation of 8 MB takes less than 1 s."""
TAIL_TOKENS: Final = 32
"""Tokens at a prompt's end that are searched for the mark of an open thought, with the blanks after it."""
_NOW: ContextVar[int] = ContextVar("_NOW")
"""Time of the request whose template is being rendered, in seconds."""


def _byte_signs() -> dict[str, bytes]:
    """Return the byte of each sign of a byte-level vocabulary (the table of GPT-2's encoder). Printable bytes are their
    own signs; all other bytes have the signs from 256 on, in order."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    signs = {chr(byte): bytes([byte]) for byte in printable}
    return signs | {chr(256 + at): bytes([byte]) for at, byte in enumerate(others)}


BYTES: Final = _byte_signs()


class TokenizerError(ValueError):
    """Error of a model folder without a usable tokenizer. The text states the reason and contains no path but the
    folder's name."""


class TemplateFailed(ValueError):
    """Error of a request from which no prompt can be made; the text is one line for the client."""


class TokenizerPanic(TemplateFailed):
    """Panic of the native tokenizer, such as a regular expression that exceeds its limit of steps for a text."""


class TooLong(ValueError):
    """Error of a prompt with more tokens than allowed; the text is one line for the client."""


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """Prompt of a request as tokens, with the state of the model's reasoning at its end."""

    ids: tuple[int, ...]
    """Token ids."""
    thinking: bool
    """Whether the prompt ends within a thought; the answer then starts with reasoning."""
    opens_reasoning: bool = False
    """Whether the prompt ends with the end of a thought."""
    plain: bool = False
    """Whether it was made from the text or ids of the request, without a template."""


def load(folder: Path) -> "Tokenizer":
    """Load the tokenizer of a model's folder, from that folder alone. Raise `TokenizerError` if that fails."""
    if not folder.is_dir():
        raise TokenizerError(f"{folder.name}: the folder does not exist")
    try:
        return Tokenizer(_wrapper(folder))
    except Exception as error:
        if _needs_code(folder):
            reason = "its tokenizer needs code from the model folder, and Macpool never runs such code"
        else:
            reason = _line(error).replace(str(folder), folder.name)
        raise TokenizerError(f"{folder.name}: {reason}") from error


class Tokenizer:
    """Tokenizer of one model: renders and tokenizes prompts, and decodes answers. `RequestPreparer` loads one per
    model."""

    def __init__(self, wrapper: TokenizerWrapper) -> None:
        self.wrapper = wrapper
        """Tokenizer of mlx-lm, with the chat template."""
        self.eos = frozenset(wrapper.eos_token_ids)
        """Ids that end an answer."""
        self.size = max(len(wrapper), max(wrapper.get_vocab().values(), default=-1) + 1)
        """Highest id plus one."""
        self.features = ("tools",) if wrapper.has_tool_calling else ()
        """Features of the model: `tools` if its calls can be parsed."""
        self._own_renderer = wrapper.chat_template is None or "chat_template_type" in wrapper.init_kwargs
        self._added = {token: text for text, token in wrapper.get_added_vocab().items()}
        self._detokenizer = wrapper.detokenizer
        self._ids: dict[str, int] = {}
        self._openings: dict[tuple[str, str, int], tuple[int, ...]] = {}
        self._special = re.compile("")
        self.markup = _markup(wrapper)
        """Markers of reasoning and tool calls."""
        self._machines = {tools: TextStateMachine(self.markup.transitions(tools)) for tools in (False, True)}
        self._plainly = cast(
            "Callable[[str], list[int]]", partial(cast("Any", wrapper).encode, add_special_tokens=False)
        )
        fast = cast("Any", wrapper)._tokenizer
        self.rust: RustTokenizer | None = fast.backend_tokenizer if isinstance(fast, PreTrainedTokenizerFast) else None
        """Rust tokenizer below `wrapper`; None if the tokenizer is written in Python."""
        # The first use removes a truncation set in the tokenizer's file; it must not happen during another thread's
        # call.
        wrapper.encode("")

    def prompt(self, request: Generate, most: int = 0) -> TokenizedPrompt:
        """Tokenize a request: its text or ids unchanged, or its messages rendered by the model's template.

        If a text is clearly longer than `most` tokens (0: no limit), raise `TooLong` as soon as they are counted. Raise
        `TemplateFailed` if template or tokenizer fail.
        """
        plain = bool(request.text or request.ids)
        try:
            ids = request.ids or self.encode(self._text(request), plain=plain, most=most)
            self._check(ids)
            if plain:
                return TokenizedPrompt(ids, False, plain=True)
            return TokenizedPrompt(ids, *(self._ends_with(ids, marker) for marker in self.markup.think))
        except (TemplateFailed, TooLong):
            raise
        except Exception as error:
            raise TemplateFailed(_line(error)) from error

    def shared(self, request: Generate, prompt: TokenizedPrompt) -> int:
        """Return the number of a prompt's first tokens that follow from the system prompt alone, if all keys share
        that.

        Return 0 without such a system prompt, or if its end depends on other text. The tokens are those that two
        prompts with only this system prompt in common share.
        """
        if not request.shared or not request.messages:
            return 0
        system = request.messages[0]
        known = system.role, system.content, request.created // DATE_VALID_SECONDS
        opening = self._openings.get(known)
        if opening is None:
            opening = self._openings[known] = self._opening(request, system)
            for oldest in tuple(self._openings)[:-MAX_OPENINGS]:  # a copy: several threads add prompts
                self._openings.pop(oldest, None)
        return len(opening) if prompt.ids[: len(opening)] == opening else 0

    def _opening(self, request: Generate, system: Message) -> tuple[int, ...]:
        """Return the common first tokens of prompts with this system prompt; empty if the template fails."""
        try:
            one, other = (self._probe(request, system, word) for word in PROBES)
        except Exception:
            return ()
        return tuple(token for token, _ in takewhile(_equal, zip(one, other, strict=False)))

    def _probe(self, request: Generate, system: Message, word: str) -> tuple[int, ...]:
        probe = replace(request, messages=(system, Message("user", word)), tools="", template="")
        return self.encode(self._text(probe), plain=False)

    def count(self, request: Generate) -> int:
        """Return the number of a request's prompt tokens. Raise `TemplateFailed` if template or tokenizer fail."""
        try:
            text = self._text(request)
            if self.rust is not None and len(text) > LONG_TEXT_CHARS:
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
        """Tokenize a text. `plain` includes the tokens that the tokenizer adds to every text.

        If a long text clearly has more than `most` tokens (0: no limit), raise `TooLong` as soon as they are counted.
        Raise `TokenizerPanic` if the native tokenizer panics.
        """
        try:
            if self.rust is None or len(text) <= LONG_TEXT_CHARS:
                return tuple(self.wrapper.encode(text) if plain else self._plainly(text))
            if most and len(text) > max(2 * most, TOKENIZE_SLICE_CHARS):
                self._bound(self.rust, text, most)
            return tuple(self.rust.encode_batch_fast([text], add_special_tokens=plain)[0].ids)
        except BaseException as error:
            if type(error).__name__ != "PanicException":  # pyo3's type, a BaseException, cannot be imported
                raise
            raise TokenizerPanic(f"the tokenizer failed: {_line(error)}") from error

    def _bound(self, rust: "RustTokenizer", text: str, most: int) -> None:
        """Raise `TooLong` as soon as a text's slices have more than `most` tokens. A cut adds at most a few."""
        counted = 0
        for start in range(0, len(text), TOKENIZE_SLICE_CHARS):
            part = text[start : start + TOKENIZE_SLICE_CHARS]
            counted += len(rust.encode_batch_fast([part], add_special_tokens=False)[0])
            if counted > most * TOKENIZE_SLACK:
                share = (start + len(part)) / len(text)
                raise TooLong(f"the first {share:.0%} of the prompt already has {counted} tokens")

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
        """Return the text pipeline of one choice.

        `tools` is the JSON array of the request, `thinking` that of `TokenizedPrompt`. With `one_call` the answer ends
        with its first call. With a `grammar`, markers are recognized only where the grammar puts them.
        """
        given = _tools((grammar.tools if grammar is not None else "") or tools)
        prefix = f"call_{request_id}_{choice}_" if choice else f"call_{request_id}_"
        calls = ToolCallParser(
            prefix, self.wrapper.tool_parser if given else None, tool_variants(given), self.markup.call[1]
        )
        if grammar is not None:
            place = grammar.beginning()
            return TextPipeline(self._decoder(), grammar.cutter(), place, StopStrings(stops), calls, one_call=one_call)
        place = self.markup.beginning(thinking)
        cutter = MarkCutter(self._machines[bool(given)], place)
        return TextPipeline(self._decoder(), cutter, place, StopStrings(stops), calls, one_call=one_call)

    def plain_pipeline(self, stops: tuple[str, ...]) -> TextPipeline:
        """Return the text pipeline of one choice for a prompt without a template: all text is content."""
        return TextPipeline(
            self._decoder(), PassThrough(), MarkerPlace(NORMAL), StopStrings(stops), ToolCallParser("", None, (), "")
        )

    # grammars

    @property
    def think(self) -> tuple[str, str]:
        """Markers at the start and the end of a thought; empty texts if the model does not reason."""
        return self.markup.think

    @property
    def calling(self) -> ToolCallFormat | None:
        """Format of the model's tool calls; None if the model makes no calls."""
        if not self.markup.call[0]:
            return None
        parser = str(getattr(self.wrapper.tool_parser, "__module__", "")).rpartition(".")[2]
        template = self.wrapper.chat_template
        return ToolCallFormat(parser, self.markup.call, template if isinstance(template, str) else "", self._mark)

    def single(self, text: str) -> int | None:
        """Return the token id of a marker; None if the marker takes several tokens."""
        ids = self._plainly(text)
        return ids[0] if len(ids) == 1 else None

    @property
    def constrainable(self) -> bool:
        """Whether answers can follow a grammar. They cannot if the model has its own format of answers, or if
        llguidance cannot use the tokenizer."""
        return not self.markup.edges and isinstance(cast("Any", self.wrapper)._tokenizer, PreTrainedTokenizerFast)

    def guide(self) -> LLTokenizer | None:
        """Return the tokenizer in llguidance's form; None if answers cannot follow a grammar. This takes a second for a
        large vocabulary."""
        fast = cast("Any", self.wrapper)._tokenizer
        if not self.constrainable:
            return None
        guide = from_tokenizer(fast, n_vocab=self.size, eos_token=sorted(self.eos))
        self._learn_special(guide)
        return guide

    def _mark(self, marker: str) -> tuple[str, bool]:
        """Return text in Lark's notation, with special tokens as tokens; and whether it starts with one."""
        parts = [part for part in self._special.split(marker) if part] if self._special.pattern else [marker]
        written = [f"<[{self._ids[part]}]>" if part in self._ids else json.dumps(part) for part in parts]
        return " ".join(written), bool(parts) and parts[0] in self._ids

    def _learn_special(self, guide: LLTokenizer) -> None:
        """Record the tokens that llguidance does not treat as text."""
        self._ids = {text: token for token, text in self._added.items() if text and guide.is_special_token(token)}
        longest = sorted(self._ids, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, longest))})" if longest else "")

    def _decoder(self) -> "_Decoder":
        return _Decoder(self.wrapper.detokenizer, self.size, self.eos)

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token: exact for byte-level tokens, else the text of the token alone. Return no bytes
        for an id out of range."""
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
        with Deadline(RENDER_TIMEOUT_SECONDS, f"the chat template took more than {RENDER_TIMEOUT_SECONDS:.0f} s"):
            messages = [_written(message, self._own_renderer) for message in request.messages]
            return cast(
                "str",
                cast("Any", self.wrapper).apply_chat_template(
                    messages, tools=tools, add_generation_prompt=not continued, tokenize=False, **variables
                ),
            )

    def _check(self, ids: tuple[int, ...]) -> None:
        if not ids:
            raise TemplateFailed("the chat template rendered an empty prompt")
        wrong = next((token for token in ids if not 0 <= token < self.size), None)
        if wrong is not None:
            raise TemplateFailed(f"the tokenizer returned token {wrong}, the vocabulary has {self.size}")

    def _ends_with(self, ids: tuple[int, ...], marker: str) -> bool:
        """Return whether the prompt's last tokens end with a marker. Only the end counts, because a user's text may
        contain the marker."""
        return bool(marker) and self.wrapper.decode(list(ids[-TAIL_TOKENS:])).rstrip().endswith(marker)


class _Decoder:
    """mlx-lm's streaming detokenizer for one pipeline: no id raises, and end-of-answer tokens have no text."""

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
        except Exception:  # an id in a gap of the vocabulary has no text
            segment = ""
        return segment


class MarkCutter:
    """Cutter of an answer's text at the model's markers, by mlx-lm's state machine; for one pipeline. `place` is the
    start."""

    def __init__(self, machine: "TextStateMachine[MarkerPlace]", place: MarkerPlace) -> None:
        self._state = machine.make_state(place)

    def feed(self, text: str) -> list[tuple[MarkerPlace, str]]:
        """Split text at markers, as in `MarkerCutter.feed`."""
        self._state, segments = TextStateMachine.split(self._state, text)
        return segments

    def flush(self) -> str:
        """Return the text held back as a possible start of a marker, as in `MarkerCutter.flush`."""
        self._state, text, _ = TextStateMachine.flush(self._state)
        return text


class PassThrough:
    """Cutter for answers without markers."""

    def feed(self, text: str) -> list[tuple[MarkerPlace, str]]:
        """Return the text unsplit, as content."""
        return [(MarkerPlace(NORMAL), text)]

    def flush(self) -> str:
        """Return an empty text, because no text is held back."""
        return ""


# loading


def _wrapper(folder: Path) -> TokenizerWrapper:
    config = load_config(folder) if (folder / "config.json").exists() else {}
    strictly = {"trust_remote_code": False, "local_files_only": True}
    return load_tokenizer(folder, strictly, config.get("eos_token_id"), defaults(config.get("model_type")))


def defaults(kind: object) -> dict[str, object] | None:
    """Return mlx-lm's tokenizer defaults for a type of model, for folders with incomplete tokenizer settings. Return
    None if mlx-lm has none.

    The defaults are in the model's module. The module is parsed and not imported, because an import would create
    kernels on this thread, and only the inference thread may use MLX.
    """
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


def _markup(wrapper: TokenizerWrapper) -> MarkerSet:
    return MarkerSet(
        think=(wrapper.think_start or "", wrapper.think_end or ""),
        call=(wrapper.tool_call_start or "", wrapper.tool_call_end or ""),
        structure=tuple(wrapper.structural_markers),
        edges=wrapper.response_transitions,
        initial=wrapper.response_initial_state or "",
    )


def _equal(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]


# template variables


def _now(form: str) -> str:
    return datetime.fromtimestamp(_NOW.get(), UTC).strftime(form)


def _set_clock(source: str) -> None:
    """Set the request's clock in a template.

    Variables cannot carry it, because transformers turns every value into plain data first. It therefore replaces the
    template's own clock in the globals of the compiled template, which transformers caches by source.
    """
    module = importlib.import_module("transformers.utils.chat_template_utils")
    compiled = cast("Callable[[str], Template]", module._compile_jinja_template)
    compiled(source).globals["strftime_now"] = _now


def _written(message: Message, own_renderer: bool) -> dict[str, object]:
    """Return a message in the form of templates. Arguments are objects, because most templates iterate over them;
    renderers in Python parse the text themselves."""
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


def _line(error: BaseException) -> str:
    """Render an exception as one line: its name and the beginning of its text."""
    words = " ".join(str(error).split())
    message = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return message if len(message) <= MAX_ERROR_CHARS else message[: MAX_ERROR_CHARS - 1] + "…"
