"""Frames of requests and of commands about models, between the coordinator and the engine of a node."""

import math
from collections.abc import Sequence
from enum import IntEnum, StrEnum
from typing import Annotated

from msgspec import Meta

from wire.bounds import (
    LONG_CHARACTERS,
    MAX_BIASES,
    MAX_DELTAS,
    MAX_ITEMS,
    MAX_MESSAGES,
    Blob,
    ErrorText,
    Ids,
    Long,
    Natural,
    Number,
    Real,
    Seconds,
    Signed,
    Text,
    Tokens,
    Word,
)
from wire.capacity.fairness import WeightedKey
from wire.frames.frame import Frame
from wire.refusals import Refused
from wire.report import (
    Model,
    WireStruct,
)

MAX_ROWS_IN_STEP = 64
"""Maximum deltas of an engine in one frame: 0.5 MiB if each has 0.5 s of tokens with 20 alternatives."""


SHARED_SCOPE = "*"
"""Scope of cached prefixes that every key may reuse. No key has this id."""


class Channel(IntEnum):
    """Part of an answer to which a piece of text belongs."""

    CONTENT = 0
    REASONING = 1
    TOOL_CALL = 2
    """A whole tool call as JSON, see `Delta.pieces`."""


class ToolCall(WireStruct, frozen=True, array_like=True, gc=False):
    """Tool call that the assistant made in an earlier turn of the conversation."""

    id: Word
    name: Word
    arguments: Long
    """Arguments as JSON text."""


class Message(WireStruct, frozen=True, array_like=True, gc=False):
    """A message of the conversation that forms the prompt."""

    role: Word
    """`system`, `user`, `assistant` or `tool`, or another role that the chat template knows."""
    content: Long = ""
    name: Word = ""
    """Name of the participant, or of the tool of a `tool` message; empty without one."""
    tool_calls: Annotated[tuple[ToolCall, ...], Meta(max_length=MAX_MESSAGES)] = ()
    tool_call_id: Word = ""
    """Id of the call that a message of the role `tool` answers."""
    reasoning: Long = ""
    """Reasoning of the assistant in an earlier turn."""


class GrammarKind(StrEnum):
    """Kind of a constraint on the text of an answer."""

    NONE = ""
    """Any text; the constraint is on tool calls only."""
    JSON_SCHEMA = "json_schema"
    """JSON that follows a schema."""
    JSON_OBJECT = "json_object"
    """Any JSON object."""
    REGEX = "regex"
    """Text that a regular expression matches as a whole."""
    CHOICE = "choice"
    """One of several texts."""
    LARK = "lark"
    """Text that a grammar matches. The grammar is in Lark's notation, or in GBNF if it is short."""


class CallConstraint(StrEnum):
    """Constraint on the tool calls of an answer."""

    NONE = ""
    """The answer has no tool calls."""
    FREE = "free"
    """The answer may be tool calls instead of text."""
    REQUIRED = "required"
    """The answer must be tool calls."""


class GrammarSpec(WireStruct, frozen=True, array_like=True, gc=False):
    """Constraint on an answer. A node that cannot enforce the constraint refuses the request.

    Reasoning before the answer is not constrained.
    """

    kind: Word = GrammarKind.NONE
    """A `GrammarKind`, or the kind of a newer coordinator."""
    value: Long = ""
    """Schema, pattern or grammar; for `choice` a JSON array of texts."""
    whitespace: Text = ""
    """Pattern of the white space in JSON; empty for a few white-space characters of any kind."""
    calls: Word = CallConstraint.NONE
    """A `CallConstraint`. Arguments of strict tools follow their schema."""
    tool: Word = ""
    """Name of the only tool that may be called; empty for all."""


NO_REPETITION_PENALTY = math.nextafter(1.0, 2.0)
"""Repetition penalty of a request that turns off the penalty of the model.

The number 1.0 cannot do that, because a request without a penalty has it as well. Nodes that do not know
`NO_REPETITION_PENALTY` apply it without an effect.
"""


class GenerationParams(WireStruct, frozen=True, array_like=True, gc=False):
    """Sampling parameters and limits of a request."""

    max_tokens: Tokens | None = None
    """Maximum generated tokens of each choice; None for the limit of the node, at most the context."""
    temperature: Real | None = None
    """Divisor of the logits; 0 selects the most likely token, None the default of the model."""
    top_p: Real | None = None
    """Cumulative probability of the tokens to draw from; 1 allows all tokens, None selects the default of the model."""
    seed: Signed | None = None
    """Seed of the draws; None for a random one."""
    stop: Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Stop strings, which end a choice."""
    n: Natural = 1
    """Number of choices: answers to the same prompt."""
    top_k: Signed | None = None
    """Number of most likely tokens to draw from; 0 or less allows all tokens, None selects the default of the model."""
    min_p: Real | None = None
    """Minimum probability of a token, as a share of that of the most likely token; 0 for no minimum.

    None selects the default of the model.
    """
    presence_penalty: Real = 0.0
    frequency_penalty: Real = 0.0
    repetition_penalty: Real = 1.0
    """Factor for the logits of tokens that occurred: positive logits are divided by it, negative ones multiplied.

    1 selects the default of the model, `NO_REPETITION_PENALTY` none. The other penalties are subtracted.
    """
    logit_bias: Annotated[tuple[tuple[Tokens, Real], ...], Meta(max_length=MAX_BIASES)] = ()
    """Pairs of a token id and the number that is added to its logit."""
    logprobs: bool = False
    top_logprobs: Natural = 0
    """Number of alternatives for each token, if `logprobs` is set."""
    one_call: bool = False
    """Whether an answer ends after its first tool call."""
    grammar: GrammarSpec | None = None
    """Constraint on the answer; None for no constraint."""


class Generate(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → engine: generate an answer. The prompt is `messages`, `text` or `ids`."""

    request: Number
    seq: Number
    """Sequence number, which grows with every Generate and Embed.

    A report acknowledges the highest one in `acked_seq`.
    """
    request_id: Word
    """Request id for logs, as the client knows it."""
    model: Word
    messages: Annotated[tuple[Message, ...], Meta(max_length=MAX_MESSAGES)]
    params: GenerationParams
    created: Natural
    """Unix time in seconds at which the request arrived, for the chat template."""
    expected: Tokens = 256
    """Output tokens of each choice for which memory is reserved."""
    stream: bool = True
    """Whether a client reads token by token. Without a stream, deltas may be collected for 0.5 s."""
    tools: Long = ""
    """JSON array of tools as in OpenAI's body; empty for none."""
    template: Long = ""
    """JSON object of further variables of the chat template; empty for none."""
    resume: Annotated[tuple[Ids, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Token ids by choice that another node has generated; empty for a new answer.

    The engine continues after them and does not send their text; usage counts them.
    """
    text: Long = ""
    """Prompt without chat template. The answer is content only: it is not parsed for reasoning or tool calls."""
    ids: Ids = ()
    """Prompt as token ids of the model, without chat template. The answer is content only, as with `text`."""
    weighted_key: WeightedKey = WeightedKey()
    """API key of the request, for the shares of the node's rows and memory (`wire.capacity.fairness`)."""
    fingerprint: Word = ""
    """Fingerprint of the model that began a resumed answer and must continue it; empty for any."""
    cache_scope: Word = ""
    """Scope of cached prefixes that the request may reuse and adds to; empty for the scope of `weighted_key`."""
    shared: bool = False
    """Whether the first message is a system prompt whose tokens all keys may reuse."""
    content: Word = ""
    """Content hash of the model that began a resumed answer; empty if unknown."""
    context_limit: Tokens = 0
    """Maximum tokens of prompt and answer together; 0 for the context of the model."""

    def get_known_ids(self, choice: int) -> tuple[int, ...]:
        """Return the token ids that another node has generated for a choice (from 0); empty if there are none."""
        return self.resume[choice] if choice < len(self.resume) else ()


class CountTokens(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → engine: count the tokens of a prompt.

    The fields mean the same as in Generate. The answer is Finished with `prompt_tokens`, Refusal or Failed.
    The model need not be loaded, because only its tokenizer runs.
    """

    request: Number
    model: Word
    messages: Annotated[tuple[Message, ...], Meta(max_length=MAX_MESSAGES)]
    created: Natural
    tools: Long = ""
    template: Long = ""
    weighted_key: WeightedKey = WeightedKey()


class LoadModel(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → engine: load a model. The answer is Finished, Refusal or Failed."""

    request: Number
    model: Word


class UnloadModel(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → engine: unload a model, or abort its load.

    The answer is Finished, Refusal if the model is not loaded or is in use, or Failed.
    """

    request: Number
    model: Word


class ClearCache(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → engine: delete the cached prefixes of a model, in memory and on the disk.

    The answer is Finished, Refusal or Failed.
    """

    request: Number
    model: Word
    """Name of the model, or the fingerprint of a deleted model whose cache remains; empty for all models."""


class ProfileModel(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → engine: measure the forwards of a model, from small ones to the largest that fit.

    The engine loads the model first if necessary. The answer is Finished with `measured`, Refusal or Failed. Cancel
    stops the measurement.
    """

    request: Number
    model: Word


class Cancel(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → engine: cancel a request, a CountTokens or a ProfileModel.

    The engine sends no further frame about it. A load continues.
    """

    request: Number


class Admitted(Frame, frozen=True, array_like=True, gc=False):
    """Engine → coordinator: the request is admitted and its memory is committed."""

    request: Number
    prompt_tokens: Tokens
    """Exact number of prompt tokens."""
    cached_tokens: Tokens = 0
    """Prompt tokens that the prefix cache supplies."""
    prompt_hash: Blob = b""
    """Hash of the prompt, which a report names when the prompt is evicted. Empty: the node caches nothing."""


class Logprob(WireStruct, frozen=True, array_like=True, gc=False):
    """Natural logarithm of the probability of a token, with the most likely alternatives. Tokens are UTF-8 bytes."""

    token: Blob
    logprob: Real
    top: Annotated[tuple[tuple[Blob, Real], ...], Meta(max_length=MAX_ITEMS)] = ()
    """Alternatives as pairs of token and log probability, most likely first."""


class Delta(WireStruct, frozen=True, array_like=True, gc=False):
    """Tokens and text that the engine added to a choice of a request since the last delta."""

    request: Number
    choice: Natural
    """Index of the choice, from 0."""
    ids: Ids
    """Ids of the new tokens, in their order."""
    pieces: Annotated[tuple[tuple[Natural, Long], ...], Meta(max_length=MAX_DELTAS)]
    """Pairs of channel (`Channel`) and text.

    A piece of TOOL_CALL is a complete call as JSON object: `index`, `id`, `name`, `arguments` (JSON text).
    """
    logprobs: Annotated[tuple[Logprob, ...], Meta(max_length=MAX_DELTAS)] = ()
    """Log probabilities of tokens, if the request asks for them; empty otherwise."""


class Deltas(Frame, frozen=True, array_like=True, gc=False):
    """Engine → coordinator: the new tokens of requests in an engine step.

    `split_deltas` splits a step with many rows or long texts into several frames.
    """

    deltas: Annotated[tuple[Delta, ...], Meta(max_length=MAX_DELTAS)]


def split_deltas(deltas: Sequence[Delta]) -> list[Frame]:
    """Return the frames with the deltas of an engine step.

    A frame has at most MAX_ROWS_IN_STEP deltas, or one if the texts have more than LONG_CHARACTERS characters in total.
    """
    characters = sum(len(text) for delta in deltas for _, text in delta.pieces)
    most = MAX_ROWS_IN_STEP if characters <= LONG_CHARACTERS else 1
    return [Deltas(tuple(deltas[at : at + most])) for at in range(0, len(deltas), most)]


class Timings(WireStruct, frozen=True, array_like=True, gc=False):
    """Durations in seconds of the phases of a request on the node: queued, prefill and decode; 0 for commands."""

    waiting: Seconds = 0.0
    prefill: Seconds = 0.0
    decode: Seconds = 0.0


class Finished(Frame, frozen=True, array_like=True, gc=False):
    """Engine → coordinator: the request, or the command about a model, is complete."""

    request: Number
    reasons: Annotated[tuple[Word, ...], Meta(max_length=MAX_ITEMS)]
    """Finish reason of each choice: `stop`, `length` or `tool_calls`; no items for embeddings, scores and commands."""
    prompt_tokens: Tokens
    """Exact number of prompt tokens; 0 for commands other than CountTokens."""
    completion_tokens: Tokens
    """Generated tokens of all choices, with those of `Generate.resume`; 0 without an answer to generate."""
    cached_tokens: Tokens = 0
    """Prompt tokens that the prefix cache supplied."""
    timings: Timings = Timings()
    measured: Model | None = None
    """Measured model in the answer to a ProfileModel; None in all other answers."""
    stops: Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Stop string by choice, empty for a choice without one; no items if no choice ended by a stop string."""
    reasoning_tokens: Tokens = 0
    """Tokens of `completion_tokens` that belong to reasoning."""


class Refusal(Frame, frozen=True, array_like=True, gc=False):
    """Engine or agent → coordinator: the request or command is refused. This node has sent no token of its answer."""

    request: Number
    refused: Refused
    prompt_tokens: Tokens | None = None
    """Exact number of prompt tokens; None if the prompt was not tokenized."""


class Failed(Frame, frozen=True, array_like=True, gc=False):
    """Engine or agent → coordinator: the request or command ended with an error."""

    request: Number
    code: Word
    """Machine-readable reason (`wire.refusals.FailureCode`)."""
    message: ErrorText
