"""Frames of the link and of the socket between agent and engine, and their tags.

A frame is `u32 length | u8 tag | msgpack array` (`wire.codec`). Both sockets use the same table, because the agent
forwards frames of the engine and decodes only their first field, `request`. Fields are only appended; a field that was
not in protocol 1 has a default.

Sizes are bytes, times are seconds. `request` is the coordinator's number of a request. It is unique across restarts
because its upper half is the epoch. `seq` grows with every Generate; a report acknowledges the newest one it counts.
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
from wire.capacity.fairness import WeightedKey
from wire.histogram import GateMeasures
from wire.refusals import Refused
from wire.report import (
    CacheState,
    Enforcement,
    EngineCounters,
    EngineState,
    Hardware,
    Memory,
    MemoryLevel,
    Model,
    Sharing,
    SystemMemory,
    WireStruct,
)
from wire.video import Artifact, VideoState

MAX_ROWS_IN_STEP = 64
"""Maximum deltas of an engine in one frame: 0.5 MiB if each has 0.5 s of tokens with 20 alternatives."""
SHARED_SCOPE = "*"
"""Scope of cached prefixes that every key may reuse. No key has this id."""


class Channel(IntEnum):
    """Kind of a piece of an answer."""

    CONTENT = 0
    REASONING = 1
    TOOL_CALL = 2


class Frame(WireStruct, frozen=True, array_like=True, gc=False):
    """Base of all frames."""


# enrolment: the only frames that are accepted from a peer without a certificate


class EnrollStart(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: request the CA."""

    protocol: Natural
    commitment: Blob = b""
    """Commitment to nonce and certificate request, if a person will compare short codes."""


class EnrollAuthority(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: the CA."""

    ca: Blob
    """CA in DER; the node compares it with the pin of its token."""
    cluster: Word
    cluster_name: Word
    nonce: Blob = b""
    """Nonce of the coordinator for the short code."""


class Enroll(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator, over a connection verified with the CA: request a certificate.

    With a token, the frame has `token` and `mac`. Without one, it has `opening`, and a person approves the short code.
    A former member sends `certificate` and `proof`.
    """

    csr: Blob
    """Certificate request in DER."""
    name: Word
    machine: Word
    hardware: Hardware
    token: Text = ""
    mac: Blob = b""
    """`request_mac` of the request under the key of the token."""
    opening: Blob = b""
    """Nonce of the commitment."""
    certificate: Blob = b""
    """Earlier certificate of the machine in DER."""
    proof: Blob = b""
    """Signature of `rejoin_text` by the key of that certificate."""


class EnrollPending(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: wait until a person approves the short code."""

    seconds: Seconds
    """Time after which the request expires."""


class Enrolled(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: the certificate."""

    node: Word
    """Id of the node."""
    certificate: Blob
    """Certificate in DER."""
    cluster: Word


# the link


class Hello(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: first frame of a link."""

    protocol: Natural
    node: Word
    name: Word
    instance: Word
    """Random id of this run of the agent."""
    machine: Word
    version: Word
    hardware: Hardware
    takeover: bool = False
    """Whether this link replaces the link of the same instance without ending its requests."""
    generation: Number = 0
    """Highest generation that the node has received in Welcome. A coordinator with a lower one is outdated."""
    seal: Blob = b""
    """Seal of that generation."""


class MemberQuery(Frame, frozen=True, array_like=True, gc=False):
    """Command on a member → coordinator, in place of Hello: request a path of the API.

    The coordinator sends JSON in Answers and closes the connection. The link of the node is not affected.
    """

    protocol: Natural
    node: Word
    machine: Word
    path: Text


class Welcome(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: the link is accepted."""

    epoch: Number
    """Grows with every start of the coordinator."""
    cluster: Word
    cluster_name: Word
    time: Seconds
    """Unix time of the coordinator."""
    version: Word
    addresses: Annotated[tuple[Word, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Addresses of the coordinator for later connections."""
    generation: Number = 0
    """Grows with every restore of a backup."""
    seal: Blob = b""
    """Signature of the generation by the CA."""


class Denied(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: the link or the request is refused."""

    reason: Text
    message: ErrorText
    final: bool = False
    """Whether a retry has the same result until a person acts."""
    retry_after: Seconds = 0.0


class Report(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: heartbeat with the state of the node."""

    sequence: Number
    """Number of the report."""
    memory: Memory
    engine: EngineState
    models: Annotated[tuple[Model, ...], Meta(max_length=MAX_MODELS)] = ()
    acked_seq: Number = 0
    """Highest `seq` of a Generate that `memory.reserved` counts."""
    draining: bool = False
    """Whether the node accepts no new requests; also true while `sharing.paused`, for older coordinators."""
    ping: Number = 0
    """Nonce of the newest Ping."""
    system: SystemMemory = SystemMemory()
    enforcement: Enforcement = Enforcement()
    video: VideoState = VideoState()
    sharing: Sharing = Sharing()


class Goodbye(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: last frame of a link."""

    reason: Text
    """`stopping`, `asleep` or `leave`."""


class Ping(Frame, frozen=True, array_like=True, gc=False):
    """Both directions: request a sign of life. The answer is the next Report, or a Pong of the engine."""

    nonce: Number


class Pong(Frame, frozen=True, array_like=True, gc=False):
    """Engine → agent: its second thread is alive."""

    nonce: Number
    busy: Seconds = 0.0
    """Seconds since the native call in progress began."""
    expected: Seconds = 0.0
    """Expected seconds of that call."""


class RenewCertificate(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: request a new certificate; sent after two thirds of the validity."""

    csr: Blob
    """Certificate request in DER."""


class CertificateRenewed(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: the new certificate. The node opens a second link with it."""

    certificate: Blob
    """Certificate in DER."""


class FetchRequest(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: request a window of a file or of measurements.

    Long answers are requested in windows. A slow reader then neither delays other readers nor fills memory.
    """

    ask: Number
    what: Text
    """`logs`, `metrics` or `artifact:LEASE/NAME`."""
    offset: Difference = 0
    """First byte; a negative offset counts from the end."""
    limit: Size = 0
    """Maximum bytes of the window."""


class FetchChunk(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: part of an answer."""

    ask: Number
    payload: Blob
    last: bool = False
    error: ErrorText = ""
    next: Size = 0
    """Offset of the next window; 0 after the last."""
    end: Size = 0
    """Offset behind this window. A reader that follows a log continues there."""


class Fragment(Frame, frozen=True, array_like=True, gc=False):
    """Both directions: a piece of a long frame. Only the codec uses it."""

    message: Number
    payload: bytes
    last: bool = False


class PauseNode(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: accept no new requests for a time.

    `sharing` of the next report has the result. The frame is sent only to nodes that report `sharing`.
    """

    seconds: Seconds | None
    """Duration; None until a person resumes the node, 0 to resume now."""
    by: Text = ""
    """Name of the person or key."""


# requests


class ToolCall(WireStruct, frozen=True, array_like=True, gc=False):
    """Tool call of the assistant in an earlier turn."""

    id: Word
    name: Word
    arguments: Long
    """JSON text."""


class Message(WireStruct, frozen=True, array_like=True, gc=False):
    """A chat message."""

    role: Word
    content: Long = ""
    name: Word = ""
    tool_calls: Annotated[tuple[ToolCall, ...], Meta(max_length=MAX_MESSAGES)] = ()
    tool_call_id: Word = ""
    """Id of the call that a message of the role `tool` answers."""
    reasoning: Long = ""
    """Reasoning of the assistant in an earlier turn."""


class GrammarSpec(WireStruct, frozen=True, array_like=True, gc=False):
    """Constraint on an answer. A node that cannot enforce it refuses the request.

    Reasoning before the answer is not constrained.
    """

    kind: Word = ""
    """`json_schema`, `json_object`, `regex`, `choice`, `lark`, or empty without a constraint on text."""
    value: Long = ""
    """Schema, pattern or grammar; for `choice` a JSON array of texts."""
    whitespace: Text = ""
    """Pattern of the white space in JSON; empty for a few characters of any kind."""
    calls: Word = ""
    """`free` if the answer may be tool calls instead, `required` if it must be. Arguments of strict tools follow their
    schema."""
    tool: Word = ""
    """Name of the only tool that may be called; empty for all."""


class GenerationParams(WireStruct, frozen=True, array_like=True, gc=False):
    """Parameters of generation. None selects the default of the model."""

    max_tokens: Tokens | None = None
    temperature: Real | None = None
    top_p: Real | None = None
    seed: Signed | None = None
    stop: Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)] = ()
    n: Natural = 1
    """Number of choices."""
    top_k: Signed | None = None
    min_p: Real | None = None
    presence_penalty: Real = 0.0
    frequency_penalty: Real = 0.0
    repetition_penalty: Real = 1.0
    """Divides logits; 1 for none. The other penalties are subtracted."""
    logit_bias: Annotated[tuple[tuple[Tokens, Real], ...], Meta(max_length=MAX_BIASES)] = ()
    """Bias by token id."""
    logprobs: bool = False
    top_logprobs: Natural = 0
    """Alternatives for each token, if `logprobs` is set."""
    one_call: bool = False
    """Whether an answer ends after its first tool call."""
    grammar: GrammarSpec | None = None


class Generate(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → engine: generate an answer. The prompt is `messages`, `text` or `ids`."""

    request: Number
    seq: Number
    request_id: Word
    model: Word
    messages: Annotated[tuple[Message, ...], Meta(max_length=MAX_MESSAGES)]
    params: GenerationParams
    created: Natural
    """Unix time for the chat template."""
    expected: Tokens = 256
    """Output tokens to reserve memory for."""
    stream: bool = True
    """Whether a client reads token by token. Without a stream, deltas may be collected for 0.5 s."""
    tools: Long = ""
    """JSON array of tools as in OpenAI's body; empty for none."""
    template: Long = ""
    """JSON object of further variables of the chat template; empty for none."""
    resume: Annotated[tuple[Ids, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Token ids by choice that another node has generated. The engine continues after them and does not send their
    text; usage counts them."""
    text: Long = ""
    """Prompt without chat template. The answer is content only: it is not parsed for reasoning or tool calls."""
    ids: Ids = ()
    """Prompt as token ids of the model, as `text`."""
    owner: WeightedKey = WeightedKey()
    """Key for fair shares."""
    fingerprint: Word = ""
    """Fingerprint of the model that began a resumed answer and must continue it; empty for any."""
    cache_scope: Word = ""
    """Scope of cached prefixes that the request may reuse and adds to; empty for that of `owner`."""
    shared: bool = False
    """Whether the first message is a system prompt whose tokens all keys may reuse."""

    def known(self, choice: int) -> tuple[int, ...]:
        """Return the token ids of a choice that were generated on another node."""
        return self.resume[choice] if choice < len(self.resume) else ()


class CountTokens(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → engine: count the tokens of a prompt.

    Fields are those of Generate. The answer is Finished with `prompt_tokens`, or Refusal. The model need not be loaded;
    nothing is computed or reserved.
    """

    request: Number
    model: Word
    messages: Annotated[tuple[Message, ...], Meta(max_length=MAX_MESSAGES)]
    created: Natural
    tools: Long = ""
    template: Long = ""
    owner: WeightedKey = WeightedKey()


class LoadModel(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → engine: load a model. The answer is Finished, Refusal or Failed."""

    request: Number
    model: Word


class UnloadModel(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → engine: unload a model. The answer is Finished, or Refusal if the model is in use."""

    request: Number
    model: Word


class ProfileModel(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → engine: measure the forwards of a model, from small ones to the largest that fit.

    The engine loads the model first if necessary. The answer is Finished with `measured`, Refusal or Failed. Cancel
    stops the measurement.
    """

    request: Number
    model: Word


class Cancel(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → engine: end a request without an answer."""

    request: Number


class Admitted(Frame, frozen=True, array_like=True, gc=False):
    """Engine → coordinator: the request has its memory."""

    request: Number
    prompt_tokens: Tokens
    """Exact number of prompt tokens."""
    cached_tokens: Tokens = 0
    prompt_hash: Blob = b""


class Logprob(WireStruct, frozen=True, array_like=True, gc=False):
    """Log probability of a token, with the most likely alternatives. Tokens are bytes."""

    token: Blob
    logprob: Real
    top: Annotated[tuple[tuple[Blob, Real], ...], Meta(max_length=MAX_ITEMS)] = ()


class Delta(WireStruct, frozen=True, array_like=True, gc=False):
    """Tokens and text of a choice from one step of the engine."""

    request: Number
    choice: Natural
    ids: Ids
    """Token ids."""
    pieces: Annotated[tuple[tuple[Natural, Long], ...], Meta(max_length=MAX_DELTAS)]
    """Channel and text. A piece of TOOL_CALL is a complete call as JSON object: `index`, `id`, `name`, `arguments`
    (JSON text)."""
    logprobs: Annotated[tuple[Logprob, ...], Meta(max_length=MAX_DELTAS)] = ()


class Deltas(Frame, frozen=True, array_like=True, gc=False):
    """Engine → coordinator: the deltas of an engine step."""

    deltas: Annotated[tuple[Delta, ...], Meta(max_length=MAX_DELTAS)]


def delta_frames(deltas: Sequence[Delta]) -> list[Frame]:
    """Return the frames of an engine step: one for up to MAX_ROWS_IN_STEP rows, or one a delta for long texts."""
    characters = sum(len(text) for delta in deltas for _, text in delta.pieces)
    most = MAX_ROWS_IN_STEP if characters <= LONG_CHARACTERS else 1
    return [Deltas(tuple(deltas[at : at + most])) for at in range(0, len(deltas), most)]


class Timings(WireStruct, frozen=True, array_like=True, gc=False):
    """Durations of the phases of a request on the node."""

    waiting: Seconds = 0.0
    prefill: Seconds = 0.0
    decode: Seconds = 0.0


class Finished(Frame, frozen=True, array_like=True, gc=False):
    """Engine → coordinator: the request is complete."""

    request: Number
    reasons: Annotated[tuple[Word, ...], Meta(max_length=MAX_ITEMS)]
    """`stop`, `length` or `tool_calls` by choice."""
    prompt_tokens: Tokens
    completion_tokens: Tokens
    cached_tokens: Tokens = 0
    timings: Timings = Timings()
    measured: Model | None = None
    """Model after a `ProfileModel`."""
    stops: Annotated[tuple[Text, ...], Meta(max_length=MAX_ITEMS)] = ()
    """Stop string by choice, empty for a choice without one; no items if no choice ended by a stop string."""
    thought: Tokens = 0
    """Completion tokens of reasoning."""


class Refusal(Frame, frozen=True, array_like=True, gc=False):
    """Engine → coordinator: the request was not started."""

    request: Number
    refused: Refused
    prompt_tokens: Tokens | None = None


class Failed(Frame, frozen=True, array_like=True, gc=False):
    """Engine or agent → coordinator: the request ended with an error."""

    request: Number
    code: Word
    """Machine-readable reason."""
    message: ErrorText


# video leases: the node decides


class LeaseRequest(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: reserve memory for a video job.

    The answer is LeaseGranted or LeaseRefused. LeaseEnded follows every granted lease.
    """

    lease: Word
    generation: Number
    """Grows with every lease of a job; the node refuses the older of two."""
    job: Word
    model: Word
    size: Size
    """Bytes."""
    spec: Blob
    """JSON object for the worker: `prompt`, and optionally `negative_prompt`, `width`, `height`, `frames`, `fps`,
    `steps`, `guidance`, `guidance_2`, `seed`, `timeout` and `stall` (seconds; default: the settings of the node)."""


class LeaseRelease(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: end a lease and its worker."""

    lease: Word
    generation: Number
    cause: Text
    """Code of the end, such as `cancelled` or `worker_lost`. With `acknowledged` the node deletes the record and the
    files of an ended lease."""


class RayHead(Frame, frozen=True, array_like=True, gc=False):
    """Sent by coordinators of version 0.1 with a Ray cluster for the whole pool. Nodes ignore it."""

    address: Text


class AllowVideo(Frame, frozen=True, array_like=True, gc=False):
    """Coordinator → node: whether the node may make videos. A node starts without permission."""

    allowed: bool


class LeaseGranted(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: the ceiling is lowered and in force in the engine. The job can start."""

    lease: Word
    generation: Number
    folder: Text = ""
    """Argument with which the actor finds the lease."""


class LeaseRefused(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: the lease is refused."""

    lease: Word
    generation: Number
    code: Word
    """Code of `wire.refusals`, or `lease_held`, `lease_superseded`, `guard_off`, `video_not_ready`."""
    message: ErrorText
    need: Difference = 0
    """Bytes."""
    headroom: Difference | None = None
    """Bytes."""
    retry_after: Seconds = 0.0
    """Seconds; 0 if a retry has the same result."""
    waiting_for: Text = ""
    """Condition for a lease, as text for a person."""


class LeaseEnded(Frame, frozen=True, array_like=True, gc=False):
    """Node → coordinator: the worker has ended and the memory is free.

    Sent again on every new link until the coordinator acknowledges it.
    """

    lease: Word
    generation: Number
    code: Word
    """`completed`, `cancelled`, `worker_crashed`, `worker_stalled`, `job_timeout`, `memory_lease_exceeded`,
    `monitor_failed`, `output_invalid`, `worker_lost`, …"""
    message: ErrorText = ""
    artifacts: Annotated[tuple[Artifact, ...], Meta(max_length=MAX_ITEMS)] = ()
    peak: Size = 0
    """Highest footprint in bytes."""
    seconds: Seconds = 0.0
    """Lifetime of the worker."""
    made: Blob = b""
    """JSON object of the properties of the clip: width, height, frames, fps, seed, …"""


# agent ↔ engine only


class MemoryLimits(Frame, frozen=True, array_like=True, gc=False):
    """Agent → engine: the memory limits in force."""

    cap: Size
    ceiling: Size
    margin: Size
    bound_by: Word
    guard: bool = True
    leases: Size = 0
    number: Number = 0
    """Grows with every frame; the engine reports the one in force."""
    margin_auto: bool = False
    """Whether the margin is a default, which a profile of the loaded models may replace."""


class ReduceMemory(Frame, frozen=True, array_like=True, gc=False):
    """Agent → engine: the engine is above a limit.

    OVER_SOFT: free unused memory (free buffers, reusable cache, idle models). OVER_HARD: also end the newest request
    if that frees less than `excess` bytes.
    """

    poll: Number
    level: MemoryLevel
    excess: Difference = 0


class ReclaimMemory(Frame, frozen=True, array_like=True, gc=False):
    """Agent → engine: free memory until `size` bytes fit.

    The engine frees buffers, reusable cache and idle models that are not pinned. It frees nothing if that would not
    suffice.
    """

    number: Number
    """Grows with every frame."""
    size: Size


class ModelBan(WireStruct, frozen=True, array_like=True, gc=False):
    """A model that must not be loaded for a time."""

    model: Word
    seconds: Seconds
    """Remaining time."""
    cause: Text
    """Reason."""


class RestoreModels(Frame, frozen=True, array_like=True, gc=False):
    """Agent → new engine: load models again, and do not load banned ones."""

    models: Annotated[tuple[Word, ...], Meta(max_length=MAX_MESSAGES)] = ()
    bans: Annotated[tuple[ModelBan, ...], Meta(max_length=MAX_MESSAGES)] = ()


class StopEngine(Frame, frozen=True, array_like=True, gc=False):
    """Agent → engine: end the process after the native call in progress, with all memory freed. Last frame."""

    seconds: Seconds
    """Time limit."""


class EngineReport(Frame, frozen=True, array_like=True, gc=False):
    """Engine → agent: state published by the inference thread."""

    memory: Memory
    """Judged by the limits of number `held`."""
    models: Annotated[tuple[Model, ...], Meta(max_length=MAX_MESSAGES)]
    running: Natural
    waiting: Natural
    queued_tokens: Natural = 0
    acked_seq: Number = 0
    counts: EngineCounters = EngineCounters()
    cache: CacheState = CacheState()
    held: Number = 0
    """Number of the Limits in force."""
    enforced: Number = 0
    """Number of the last Enforce that was applied."""
    unreturned: Difference = 0
    """Bytes that stayed allocated after the last model was unloaded."""
    measures: GateMeasures = GateMeasures()
    """Answer to `FetchRequest('metrics')`."""
    roomed: Number = 0
    """Number of the last MakeRoom that was applied."""
    metal_limit: Size = 0
    """Memory that the Metal device recommends at most; 0 if unknown."""
    wired: Size = 0
    """Bytes that MLX may keep wired."""


class RequestHead(WireStruct, frozen=True, array_like=True, gc=False):
    """First field of every frame about a request: the only one that the agent decodes when it forwards a frame."""

    request: Number


TAGS: dict[int, type[Frame]] = {
    1: EnrollStart,
    2: EnrollAuthority,
    3: Enroll,
    4: EnrollPending,
    5: Enrolled,
    10: Hello,
    11: Welcome,
    12: Denied,
    13: Report,
    14: Goodbye,
    15: Ping,
    16: Pong,
    17: RenewCertificate,
    18: CertificateRenewed,
    19: FetchRequest,
    20: FetchChunk,
    21: Fragment,
    22: PauseNode,
    23: MemberQuery,
    30: Generate,
    31: Cancel,
    32: Admitted,
    33: Deltas,
    34: Finished,
    35: Refusal,
    36: Failed,
    37: LoadModel,
    38: UnloadModel,
    39: ProfileModel,
    40: CountTokens,
    50: MemoryLimits,
    51: EngineReport,
    52: RestoreModels,
    53: ReduceMemory,
    54: ReclaimMemory,
    55: StopEngine,
    60: LeaseRequest,
    61: LeaseRelease,
    62: RayHead,
    63: LeaseGranted,
    64: LeaseRefused,
    65: LeaseEnded,
    66: AllowVideo,
}
"""Tags of all frame types. A tag is never reused."""

ENROLLMENT = frozenset({EnrollStart, Enroll})
"""Frames that a peer without a certificate may send."""
