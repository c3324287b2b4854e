"""The frames of the link and of the agent-engine socket, and their tags.

A frame is `u32 length | u8 tag | msgpack array` (see codec.py). One table for both sockets: the agent forwards what the
engine says without decoding more than its head, `request`. Fields are only ever appended; whatever was not in protocol
1 has a default.

Sizes in bytes, times in seconds, `request` is the coordinator's number for a request (unique over its restarts, because
the epoch is its upper half), `seq` grows with every Generate so that a report can acknowledge what it already counts.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from wire.bounds import (
    LONG_CHARACTERS,
    MAX_BIASES,
    MAX_DELTAS,
    MAX_ITEMS,
    MAX_MESSAGES,
    MAX_MODELS,
    Blob,
    Difference,
    ErrorText,
    Ids,
    Long,
    Natural,
    Number,
    Real,
    Seconds,
    Signed,
    Size,
    Text,
    Tokens,
    Word,
)
from wire.fairness import Owner
from wire.measures import GateMeasures
from wire.refusals import Refused
from wire.report import (
    CacheState,
    Counts,
    Enforcement,
    EngineState,
    Hardware,
    Level,
    Memory,
    Model,
    Part,
    Sharing,
    System,
)
from wire.video import Artifact, VideoState

MAX_ROWS_IN_STEP = 64
"""Deltas that an engine puts into one frame: 0.5 MiB where each has half a second of 20 alternatives a token."""
SHARED_SCOPE = "*"
"""Scope of cached prefixes that every key may reuse; no key has this id."""


class Channel(IntEnum):
    """Where a piece of text belongs."""

    CONTENT = 0
    REASONING = 1
    TOOL_CALL = 2


class Frame(Part, frozen=True, array_like=True, gc=False):
    """Base of all frames."""


# enrolment: the only frames that are read from a peer without a certificate


class EnrolStart(Frame, frozen=True, array_like=True, gc=False):
    """node → coordinator: who are you? `commitment` only where a short code will be shown."""

    protocol: Natural
    commitment: Blob = b""


class EnrolAuthority(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: the CA (DER) to compare with the token's pin, and a nonce for the short code."""

    ca: Blob
    cluster: Word
    cluster_name: Word
    nonce: Blob = b""


class Enrol(Frame, frozen=True, array_like=True, gc=False):
    """node → coordinator, over a connection verified with that CA: sign this request (DER).

    With a token: `token` and `mac`. Without: `opening`, the nonce of the commitment; a person then approves the code.
    A machine that has been a member shows its `certificate` (DER) and the signature of `rejoin_text` by that key.
    """

    csr: Blob
    name: Word
    machine: Word
    hardware: Hardware
    token: Text = ""
    mac: Blob = b""
    opening: Blob = b""
    certificate: Blob = b""
    proof: Blob = b""


class EnrolPending(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: wait, a person must approve the code that both sides show within `seconds`."""

    seconds: Seconds


class Enrolled(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: your certificate (DER) and your id."""

    node: Word
    certificate: Blob
    cluster: Word


# the link


class Hello(Frame, frozen=True, array_like=True, gc=False):
    """node → coordinator, first frame of a link. `instance` is new at every agent start; `takeover` marks a second link
    of the same instance that replaces the first without ending its requests. `generation` is the highest that this node
    was ever told in Welcome, with its `seal`: a coordinator of a lower one is not the cluster's any more."""

    protocol: Natural
    node: Word
    name: Word
    instance: Word
    machine: Word
    version: Word
    hardware: Hardware
    takeover: bool = False
    generation: Number = 0
    seal: Blob = b""


class Query(Frame, frozen=True, array_like=True, gc=False):
    """a member's command → coordinator, in place of Hello: read `path` of the API. The answer is JSON in Answers, then
    the connection ends; it is no link, and the node's own link stays as it is."""

    protocol: Natural
    node: Word
    machine: Word
    path: Text


class Welcome(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: you are in. `epoch` grows with every start of the coordinator; `addresses` to remember.
    `generation` grows with every restore of a backup, and `seal` is the CA's signature of it."""

    epoch: Number
    cluster: Word
    cluster_name: Word
    time: Seconds
    version: Word
    addresses: Annotated[tuple[Word, ...], Meta(max_length=MAX_ITEMS)] = ()
    generation: Number = 0
    seal: Blob = b""


class Denied(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: no, and why. `final`: asking again will not help until a person acts."""

    reason: Text
    message: ErrorText
    final: bool = False
    retry_after: Seconds = 0.0


class Report(Frame, frozen=True, array_like=True, gc=False):
    """node → coordinator: heartbeat and facts. `sequence` counts reports, `acked_seq` is the highest `seq` that
    `memory.reserved` already counts, `ping` echoes the newest Ping. `draining` is also true while `sharing.paused`: who
    does not know of pauses sends nothing new either."""

    sequence: Number
    memory: Memory
    engine: EngineState
    models: Annotated[tuple[Model, ...], Meta(max_length=MAX_MODELS)] = ()
    acked_seq: Number = 0
    draining: bool = False
    ping: Number = 0
    system: System = System()
    enforcement: Enforcement = Enforcement()
    video: VideoState = VideoState()
    sharing: Sharing = Sharing()


class Goodbye(Frame, frozen=True, array_like=True, gc=False):
    """node → coordinator, last frame: `stopping`, `asleep` or `leave`."""

    reason: Text


class Ping(Frame, frozen=True, array_like=True, gc=False):
    """either way: are you there? Answered by the next report, or by Pong on the engine's socket."""

    nonce: Number


class Pong(Frame, frozen=True, array_like=True, gc=False):
    """engine → agent: its second thread is alive. `busy`: seconds in the native call, `expected`: its length."""

    nonce: Number
    busy: Seconds = 0.0
    expected: Seconds = 0.0


class Renew(Frame, frozen=True, array_like=True, gc=False):
    """node → coordinator: sign this request (DER), my certificate is two thirds through its life."""

    csr: Blob


class Renewed(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: the new certificate (DER); open a second link with it."""

    certificate: Blob


class Ask(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: give `limit` bytes of `what` (`logs`, `metrics`, `artifact:LEASE/NAME`) from `offset`; a
    negative one counts from the end.

    Long answers are asked for in windows, so a slow reader of one holds up nobody and fills no memory."""

    ask: Number
    what: Text
    offset: Difference = 0
    limit: Size = 0


class Answer(Frame, frozen=True, array_like=True, gc=False):
    """node → coordinator: one piece of an answer. The last says where the next window begins (`next`, 0: no more), and
    where in the whole it ended (`end`): who follows a log asks again from there."""

    ask: Number
    payload: Blob
    last: bool = False
    error: ErrorText = ""
    next: Size = 0
    end: Size = 0


class Fragment(Frame, frozen=True, array_like=True, gc=False):
    """either way: a piece of one long frame; the codec cuts and joins, nobody else sees these."""

    message: Number
    payload: bytes
    last: bool = False


class Pause(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: take nothing new for so many `seconds` (None: until a person resumes you; 0: resume), `by`
    whom. Answered by the next report, whose `sharing` says how things stand; sent only to nodes that report it."""

    seconds: Seconds | None
    by: Text = ""


# requests


class ToolCall(Part, frozen=True, array_like=True, gc=False):
    """A call that the assistant made in an earlier turn; `arguments` is JSON text."""

    id: Word
    name: Word
    arguments: Long


class Message(Part, frozen=True, array_like=True, gc=False):
    """One chat message. `tool_call_id` says which call a message of role `tool` answers; `reasoning` is what the
    assistant thought in an earlier turn."""

    role: Word
    content: Long = ""
    name: Word = ""
    tool_calls: Annotated[tuple[ToolCall, ...], Meta(max_length=MAX_MESSAGES)] = ()
    tool_call_id: Word = ""
    reasoning: Long = ""


class Grammar(Part, frozen=True, array_like=True, gc=False):
    """What an answer has to be like; a node that cannot enforce it refuses. The model may think before it, as it likes.

    `kind`: `json_schema`, `json_object`, `regex`, `choice` (`value` is a JSON array of texts) or `lark`; empty for any
    text. `whitespace` is the pattern of the blanks that JSON may have in it (empty: a few of any).
    `calls`: `free` if the answer may instead be calls of the request's tools, as the model likes, `required` if it has
    to be; only of `tool` if that is named. Arguments are objects, those of a strict tool as its schema says."""

    kind: Word = ""
    value: Long = ""
    whitespace: Text = ""
    calls: Word = ""
    tool: Word = ""


class Params(Part, frozen=True, array_like=True, gc=False):
    """How to generate. None means: the model's default. `logit_bias` by token id; `top_logprobs` alternatives are given
    beside each token where `logprobs` asks for them. `repetition_penalty` divides (1: none), the others subtract.
    `one_call`: an answer ends with its first tool call."""

    max_tokens: Tokens | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    seed: Signed | None = None
    stop: Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)] = ()
    n: Natural = 1
    top_k: Signed | None = None
    min_p: Real | None = None
    presence_penalty: Real = 0.0
    frequency_penalty: Real = 0.0
    repetition_penalty: Real = 1.0
    logit_bias: Annotated[tuple[tuple[Tokens, Real], ...], Meta(max_length=MAX_BIASES)] = ()
    logprobs: bool = False
    top_logprobs: Natural = 0
    one_call: bool = False
    grammar: Grammar | None = None


class Generate(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → engine. `created` is the template's clock, `expected` the output tokens to reserve. Without
    `stream` nobody reads token by token: deltas may be gathered for half a second.

    `tools` is a JSON array of tools as in OpenAI's body (empty: none), `template` a JSON object of further variables
    for the chat template (empty: none).

    `resume`: the answer was begun elsewhere, and these are the token ids of each choice that were heard. Their text is
    not said again; usage counts them.

    `text` or `ids` instead of messages: a prompt as it is, without the chat template, in words or in the model's own
    token ids. Its answer is content alone: no thoughts and no calls are read in it.

    `owner`: whose turn it takes where several wait for rows.

    `fingerprint`: of the model that began a resumed answer, the only one that may continue it; empty: any.

    `cache_scope`: whose cached prefixes it may reuse, and whose its own become; empty: those of `owner`. `shared`: its
    first message is a system prompt that all keys share, so the tokens of that message may be reused by all."""

    request: Number
    seq: Number
    request_id: Word
    model: Word
    messages: Annotated[tuple[Message, ...], Meta(max_length=MAX_MESSAGES)]
    params: Params
    created: Natural
    expected: Tokens = 256
    stream: bool = True
    tools: Long = ""
    template: Long = ""
    resume: Annotated[tuple[Ids, ...], Meta(max_length=MAX_ITEMS)] = ()
    text: Long = ""
    ids: Ids = ()
    owner: Owner = Owner()
    fingerprint: Word = ""
    cache_scope: Word = ""
    shared: bool = False

    def known(self, choice: int) -> tuple[int, ...]:
        """Give the ids of a choice that were heard already."""
        return self.resume[choice] if choice < len(self.resume) else ()


class Count(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → engine: of how many tokens is this prompt? Parts as in Generate. Answered by Finished, whose
    `prompt_tokens` say it, or by Refusal; the model need not be loaded, and nothing is computed or promised. `owner`:
    whose turn it takes where several wait to be tokenized."""

    request: Number
    model: Word
    messages: Annotated[tuple[Message, ...], Meta(max_length=MAX_MESSAGES)]
    created: Natural
    tools: Long = ""
    template: Long = ""
    owner: Owner = Owner()


class Load(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → engine: load this model; answered by Finished, Refusal or Failed of this number."""

    request: Number
    model: Word


class Unload(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → engine: give this model's memory back; answered by Finished or Refusal (it is in use)."""

    request: Number
    model: Word


class Profile(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → engine: measure this model anew, from small forwards to the largest that fit, loading it if it is
    not loaded; answered by Finished (`measured` says what came of it), Refusal or Failed. Cancel ends it."""

    request: Number
    model: Word


class Cancel(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → engine: nobody waits for this any more."""

    request: Number


class Admitted(Frame, frozen=True, array_like=True, gc=False):
    """engine → coordinator: committed, with the exact count."""

    request: Number
    prompt_tokens: Tokens
    cached_tokens: Tokens = 0
    prompt_hash: Blob = b""


class Logprob(Part, frozen=True, array_like=True, gc=False):
    """One token's log probability and the likeliest alternatives at its place, tokens as bytes."""

    token: Blob
    logprob: Real
    top: Annotated[tuple[tuple[Blob, Real], ...], Meta(max_length=MAX_ITEMS)] = ()


class Delta(Part, frozen=True, array_like=True, gc=False):
    """What one step gave one choice: token ids and the text that became final, by channel.

    A piece of channel TOOL_CALL is one finished call as a JSON object: `index`, `id`, `name`, `arguments` (JSON text).
    """

    request: Number
    choice: Natural
    ids: Ids
    pieces: Annotated[tuple[tuple[Natural, Long], ...], Meta(max_length=MAX_DELTAS)]
    logprobs: Annotated[tuple[Logprob, ...], Meta(max_length=MAX_DELTAS)] = ()


class Deltas(Frame, frozen=True, array_like=True, gc=False):
    """engine → coordinator: one frame for a whole engine step."""

    deltas: Annotated[tuple[Delta, ...], Meta(max_length=MAX_DELTAS)]


def delta_frames(deltas: Sequence[Delta]) -> list[Frame]:
    """Return the frames of one step: one for up to MAX_ROWS_IN_STEP rows, of long texts one for each delta."""
    characters = sum(len(text) for delta in deltas for _, text in delta.pieces)
    most = MAX_ROWS_IN_STEP if characters <= LONG_CHARACTERS else 1
    return [Deltas(tuple(deltas[at : at + most])) for at in range(0, len(deltas), most)]


class Timings(Part, frozen=True, array_like=True, gc=False):
    """Where a request's time went on the node, in seconds."""

    waiting: Seconds = 0.0
    prefill: Seconds = 0.0
    decode: Seconds = 0.0


class Finished(Frame, frozen=True, array_like=True, gc=False):
    """engine → coordinator: done. One reason (`stop`, `length`, `tool_calls`) per choice, and the exact usage; at the
    end of a Profile the model as it is now. `stops`: by choice the stop string that ended it, empty if none did (or
    nothing at all if none ended any); `thought` are those of the completion's tokens that were reasoning."""

    request: Number
    reasons: Annotated[tuple[Word, ...], Meta(max_length=MAX_ITEMS)]
    prompt_tokens: Tokens
    completion_tokens: Tokens
    cached_tokens: Tokens = 0
    timings: Timings = Timings()
    measured: Model | None = None
    stops: Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)] = ()
    thought: Tokens = 0


class Refusal(Frame, frozen=True, array_like=True, gc=False):
    """engine → coordinator: this request was not begun, with the verdict and all its numbers."""

    request: Number
    refused: Refused
    prompt_tokens: Tokens | None = None


class Failed(Frame, frozen=True, array_like=True, gc=False):
    """engine or agent → coordinator: begun and broken, with a machine-readable reason."""

    request: Number
    code: Word
    message: ErrorText


# video: memory is lent for one job at a time, and the node alone decides


class Lease(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: lend `size` bytes to this job. Answered by LeaseGranted or LeaseRefused; once granted, by
    LeaseEnded, whatever happens. `generation` grows with every lease of a job: of two, the older is fenced off.

    `spec` is a JSON object for the worker: `prompt`, and as wanted `negative_prompt`, `width`, `height`, `frames`,
    `fps`, `steps`, `guidance`, `guidance_2`, `seed`, `timeout` and `stall` (seconds; the node's settings otherwise)."""

    lease: Word
    generation: Number
    job: Word
    model: Word
    size: Size
    spec: Blob


class Release(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: give the lease back and end its worker (`cause` becomes the code of its end: `cancelled`,
    `worker_lost`, …); with cause `acknowledged`: its end was heard, forget it and its files."""

    lease: Word
    generation: Number
    cause: Text


class RayHead(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node, from coordinators of 0.1 with a Ray cluster of the whole pool: nodes ignore it."""

    address: Text


class AllowVideo(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: whether this node may make videos. A node starts as one that may not."""

    allowed: bool


class LeaseGranted(Frame, frozen=True, array_like=True, gc=False):
    """node → coordinator: the ceiling is lowered and the engine holds to it; the job may be started on this node.
    `folder` is what the actor has to be told to find the lease."""

    lease: Word
    generation: Number
    folder: Text = ""


class LeaseRefused(Frame, frozen=True, array_like=True, gc=False):
    """node → coordinator: no. `need` and `headroom` in bytes, `retry_after` in seconds (0: it will not help),
    `waiting_for` says what would have to happen, for a person. Codes as in `wire.refusals`, or `lease_held`,
    `lease_superseded`, `guard_off`, `video_not_ready`."""

    lease: Word
    generation: Number
    code: Word
    message: ErrorText
    need: Difference = 0
    headroom: Difference | None = None
    retry_after: Seconds = 0.0
    waiting_for: Text = ""


class LeaseEnded(Frame, frozen=True, array_like=True, gc=False):
    """node → coordinator: the memory is back, its worker dead. Code `completed`, or what went wrong: `cancelled`,
    `worker_crashed`, `worker_stalled`, `job_timeout`, `memory_lease_exceeded`, `monitor_failed`, `output_invalid`,
    `worker_lost`, … Said again on every new link until it is acknowledged. `peak` are the most bytes that were read,
    `seconds` the worker's life, `made` a JSON object of what was really made (width, height, frames, fps, seed, …)."""

    lease: Word
    generation: Number
    code: Word
    message: ErrorText = ""
    artifacts: Annotated[tuple[Artifact, ...], Meta(max_length=MAX_ITEMS)] = ()
    peak: Size = 0
    seconds: Seconds = 0.0
    made: Blob = b""


# agent ↔ engine only


class Limits(Frame, frozen=True, array_like=True, gc=False):
    """agent → engine: the cap and ceiling in force, and the margin. `number` grows with every one, so that the engine
    can say which it holds. `margin_auto`: nobody set the margin, so that a profile of what is loaded may say a better
    one."""

    cap: Size
    ceiling: Size
    margin: Size
    bound_by: Word
    guard: bool = True
    leases: Size = 0
    number: Number = 0
    margin_auto: bool = False


class Enforce(Frame, frozen=True, array_like=True, gc=False):
    """agent → engine: at this poll you stood over a line. OVER_SOFT: give back what can be had again (free buffers,
    reusable cache, idle models). OVER_HARD: that, and if it is less than `excess` bytes, end the newest request."""

    poll: Number
    level: Level
    excess: Difference = 0


class MakeRoom(Frame, frozen=True, array_like=True, gc=False):
    """agent → engine: let `size` bytes fit beside what must stay, by giving up what can be had again (free buffers,
    reusable cache, idle models that nobody pinned); nothing, where all of that would not do. `number` grows."""

    number: Number
    size: Size


class Ban(Part, frozen=True, array_like=True, gc=False):
    """A model that is not loaded for `seconds` more, and why."""

    model: Word
    seconds: Seconds
    cause: Text


class Restore(Frame, frozen=True, array_like=True, gc=False):
    """agent → a new engine: load these models again, one by one, and keep those others out."""

    models: Annotated[tuple[Word, ...], Meta(max_length=MAX_MESSAGES)] = ()
    bans: Annotated[tuple[Ban, ...], Meta(max_length=MAX_MESSAGES)] = ()


class Stop(Frame, frozen=True, array_like=True, gc=False):
    """agent → engine: end the process once the native call in flight has returned and all memory is given back, within
    so many seconds. Nothing follows it."""

    seconds: Seconds


class EngineReport(Frame, frozen=True, array_like=True, gc=False):
    """engine → agent: the snapshot its inference thread published, judged by the limits that it holds: those of number
    `held`. `enforced` is the last `Enforce.poll` that it has acted on; `unreturned` are the bytes that did not
    come back after its last model had gone; `measures` is for who asks the agent for metrics; `roomed` is the last
    `MakeRoom.number` that it has acted on. `metal_limit` are the bytes that its device recommends at most (0: no Metal,
    or not known), `wired` those that MLX may keep wired."""

    memory: Memory
    models: Annotated[tuple[Model, ...], Meta(max_length=MAX_MESSAGES)]
    running: Natural
    waiting: Natural
    queued_tokens: Natural = 0
    acked_seq: Number = 0
    counts: Counts = Counts()
    cache: CacheState = CacheState()
    held: Number = 0
    enforced: Number = 0
    unreturned: Difference = 0
    measures: GateMeasures = GateMeasures()
    roomed: Number = 0
    metal_limit: Size = 0
    wired: Size = 0


class Head(Part, frozen=True, array_like=True, gc=False):
    """The first field of every frame about one request: all that the agent decodes of what it forwards."""

    request: Number


TAGS: dict[int, type[Frame]] = {
    1: EnrolStart, 2: EnrolAuthority, 3: Enrol, 4: EnrolPending, 5: Enrolled,
    10: Hello, 11: Welcome, 12: Denied, 13: Report, 14: Goodbye, 15: Ping, 16: Pong, 17: Renew, 18: Renewed,
    19: Ask, 20: Answer, 21: Fragment, 22: Pause, 23: Query,
    30: Generate, 31: Cancel, 32: Admitted, 33: Deltas, 34: Finished, 35: Refusal, 36: Failed,
    37: Load, 38: Unload, 39: Profile, 40: Count,
    50: Limits, 51: EngineReport, 52: Restore, 53: Enforce, 54: MakeRoom, 55: Stop,
    60: Lease, 61: Release, 62: RayHead, 63: LeaseGranted, 64: LeaseRefused, 65: LeaseEnded, 66: AllowVideo,
}  # fmt: skip
"""Never reuse a number."""

ENROLMENT = frozenset({EnrolStart, Enrol})
"""What a peer without a certificate may send."""
