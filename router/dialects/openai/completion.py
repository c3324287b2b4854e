"""`/v1/completions`: one request for each prompt, combined into one answer with consecutive choices.

A prompt is text or token ids, and is given to the model unchanged. The answer is plain text, in which neither reasoning
nor calls are recognised.
"""

from collections.abc import Sequence
from typing import cast

import msgspec

from router.admission.request_limits import MAX_CHOICES
from router.dialects.openai.completion_response import CompletionChunks, encode_completion
from router.dialects.openai.completion_schema import COMPLETION, CompletionBody
from router.dialects.shared.common_fields import build_params, list_given_penalties, parse_stream_options, resolve_limit
from router.dialects.shared.field_table import sanitize_names
from router.dialects.shared.interface import OPENAI, AnswerReader
from router.dialects.shared.validation import build_unsupported
from router.dispatch.request import CompleteAnswer, RequestSpec
from router.dispatch.resource_demand import compute_plain_demand
from router.errors import Problem, build_invalid
from wire.frames import Finished, GenerationParams

DEFAULT_ANSWER_TOKENS = 16
"""Maximum tokens of an answer if the body sets no limit. Clients rely on this default of OpenAI."""

Prompt = str | tuple[int, ...]


class CompletionRequest(msgspec.Struct, frozen=True, gc=False):
    """Parsed body of `/v1/completions`. If `echo` is true, every choice begins with its prompt."""

    model: str
    prompts: tuple[Prompt, ...]
    params: GenerationParams
    stream: bool
    include_usage: bool
    echo: bool
    session: str = ""
    ignored: tuple[str, ...] = ()
    """Names of the fields of the body that have no effect."""
    set_penalties: frozenset[str] = frozenset()
    """Names of the penalties that the body sets, including those set to their defaults."""
    default_limit: bool = False
    """Whether the body sets no maximum length of the answer, so that `params` has `DEFAULT_ANSWER_TOKENS`."""

    def to_specs(self, key: str, request_id: str, created: int) -> Sequence[RequestSpec]:
        """Return one request for each prompt; see `router.dialects.shared.interface.ParsedRequest`."""
        return [self._build_spec(prompt, key, request_id, created) for prompt in self.prompts]

    def _build_spec(self, prompt: Prompt, key: str, request_id: str, created: int) -> RequestSpec:
        text, ids = (prompt, ()) if isinstance(prompt, str) else ("", prompt)
        return RequestSpec(
            compute_plain_demand(self.model, text, ids, self.params),
            key,
            request_id,
            (),
            self.params,
            created,
            self.stream,
            include_usage=self.include_usage,
            text=text,
            ids=ids,
            session=self.session,
            ignored=self.ignored,
            set_penalties=self.set_penalties,
            default_limit=self.default_limit,
        )

    def _list_echoes(self) -> list[str]:
        """Return the text that precedes each choice: its prompt for `echo`, else an empty text."""
        texts = [str(prompt) if self.echo else "" for prompt in self.prompts]
        return [text for text in texts for _ in range(self.params.n)]

    def render_complete(self, spec: RequestSpec, answer: CompleteAnswer, finished: Finished) -> bytes:
        """Encode the complete answer; see `router.dialects.shared.interface.ParsedRequest`."""
        return encode_completion(spec, answer, finished, self._list_echoes())

    def create_chunk_encoder(self, reader: AnswerReader) -> CompletionChunks:
        """Return the encoder of the stream; see `router.dialects.shared.interface.ParsedRequest`."""
        return CompletionChunks(reader.spec, self._list_echoes())


class CompletionRoute:
    """Dialect of `/v1/completions`. `strict` refuses unknown fields."""

    style = OPENAI

    def __init__(self, *, strict: bool = False) -> None:
        self._strict = strict

    def parse(self, body: bytes, key: str) -> CompletionRequest | Problem:
        """Parse a body, or return a 400 problem; see `router.dialects.shared.interface.Dialect`."""
        parsed = COMPLETION.read(body, strict=self._strict)
        return parsed if isinstance(parsed, Problem) else _build_request(parsed.body, parsed.ignored)


def _build_request(body: CompletionBody, ignored: tuple[str, ...]) -> CompletionRequest | Problem:
    prompts = _list_prompts(body)
    wrong = _check_combinations(body, prompts)
    if wrong is not None:
        return wrong
    include_usage = parse_stream_options(body)
    if isinstance(include_usage, Problem):
        return include_usage
    grammar = body.build_grammar()
    if isinstance(grammar, Problem):
        return grammar
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    most = DEFAULT_ANSWER_TOKENS if limit is None else resolve_limit(limit)
    params = build_params(body, most, logprobs=body.logprobs, grammar=grammar)
    return CompletionRequest(
        body.model,
        prompts,
        params,
        bool(body.stream),
        include_usage,
        bool(body.echo),
        body.session,
        sanitize_names(ignored),
        list_given_penalties(body),
        default_limit=limit is None,
    )


def _list_prompts(body: CompletionBody) -> tuple[Prompt, ...]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return (prompt,)
    if isinstance(prompt[0], int):
        return (tuple(cast("list[int]", prompt)),)
    return tuple(item if isinstance(item, str) else tuple(item) for item in cast("list[str | list[int]]", prompt))


def _check_combinations(body: CompletionBody, prompts: Sequence[Prompt]) -> Problem | None:
    """Return a 400 problem if the body has a combination of fields that is not supported, else None."""
    n = body.n or 1
    if body.best_of is not None and body.best_of != n:
        return build_unsupported(
            "best_of", why=f"best_of {body.best_of} is not supported: only n ({n}) answers are generated"
        )
    if body.echo and body.logprobs is not None:
        return build_unsupported(
            "echo", why="echo with logprobs is not supported: log probabilities of a prompt are not computed"
        )
    if body.echo and not isinstance(prompts[0], str):
        why = "echo of token ids is not supported: only the node can decode them. Send the prompt as text"
        return build_unsupported("echo", why=why)
    if len(prompts) * n > MAX_CHOICES * MAX_CHOICES:
        return build_invalid(f"{len(prompts)} prompts × n {n} are more than {MAX_CHOICES * MAX_CHOICES} answers", "n")
    return None
