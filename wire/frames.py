"""The frames of the link and of the agent-engine socket, and their tags.

A frame is `u32 length | u8 tag | msgpack array` (see codec.py). One table for both sockets: the agent forwards what the
engine says without decoding more than its head, `request`. Fields are only ever appended; whatever was not in protocol
1 has a default.

Sizes in bytes, times in seconds, `request` is the coordinator's number for a request (unique over its restarts, because
the epoch is its upper half), `seq` grows with every Generate so that a report can acknowledge what it already counts.
"""

from enum import IntEnum

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

    protocol: int
    commitment: bytes = b""


class EnrolAuthority(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: the CA (DER) to compare with the token's pin, and a nonce for the short code."""

    ca: bytes
    cluster: str
    cluster_name: str
    nonce: bytes = b""


class Enrol(Frame, frozen=True, array_like=True, gc=False):
    """node → coordinator, over a connection verified with that CA: sign this request (DER).

    With a token: `token` and `mac`. Without: `opening`, the nonce of the commitment; a person then approves the code.
    """

    csr: bytes
    name: str
    machine: str
    hardware: Hardware
    token: str = ""
    mac: bytes = b""
    opening: bytes = b""


class EnrolPending(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: wait, a person must approve the code that both sides show within `seconds`."""

    seconds: float


class Enrolled(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: your certificate (DER) and your id."""

    node: str
    certificate: bytes
    cluster: str


# the link


class Hello(Frame, frozen=True, array_like=True, gc=False):
    """node → coordinator, first frame of a link. `instance` is new at every agent start; `takeover` marks a second link
    of the same instance that replaces the first without ending its requests. `generation` is the highest that this node
    was ever told in Welcome, with its `seal`: a coordinator of a lower one is not the cluster's any more."""

    protocol: int
    node: str
    name: str
    instance: str
    machine: str
    version: str
    hardware: Hardware
    takeover: bool = False
    generation: int = 0
    seal: bytes = b""


class Welcome(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: you are in. `epoch` grows with every start of the coordinator; `addresses` to remember.
    `generation` grows with every restore of a backup, and `seal` is the CA's signature of it."""

    epoch: int
    cluster: str
    cluster_name: str
    time: float
    version: str
    addresses: tuple[str, ...] = ()
    generation: int = 0
    seal: bytes = b""


class Denied(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: no, and why. `final`: asking again will not help until a person acts."""

    reason: str
    message: str
    final: bool = False
    retry_after: float = 0.0


class Report(Frame, frozen=True, array_like=True, gc=False):
    """node → coordinator: heartbeat and facts. `sequence` counts reports, `acked_seq` is the highest `seq` that
    `memory.reserved` already counts, `ping` echoes the newest Ping. `draining` is also true while `sharing.paused`: who
    does not know of pauses sends nothing new either."""

    sequence: int
    memory: Memory
    engine: EngineState
    models: tuple[Model, ...] = ()
    acked_seq: int = 0
    draining: bool = False
    ping: int = 0
    system: System = System()
    enforcement: Enforcement = Enforcement()
    video: VideoState = VideoState()
    sharing: Sharing = Sharing()


class Goodbye(Frame, frozen=True, array_like=True, gc=False):
    """node → coordinator, last frame: `stopping`, `asleep` or `leave`."""

    reason: str


class Ping(Frame, frozen=True, array_like=True, gc=False):
    """either way: are you there? Answered by the next report, or by Pong on the engine's socket."""

    nonce: int


class Pong(Frame, frozen=True, array_like=True, gc=False):
    """engine → agent: its second thread is alive. `busy`: seconds in the native call, `expected`: its length."""

    nonce: int
    busy: float = 0.0
    expected: float = 0.0


class Renew(Frame, frozen=True, array_like=True, gc=False):
    """node → coordinator: sign this request (DER), my certificate is two thirds through its life."""

    csr: bytes


class Renewed(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: the new certificate (DER); open a second link with it."""

    certificate: bytes


class Ask(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: give `limit` bytes of `what` (`logs`, `metrics`, `artifact:LEASE/NAME`) from `offset`; a
    negative one counts from the end.

    Long answers are asked for in windows, so a slow reader of one holds up nobody and fills no memory."""

    ask: int
    what: str
    offset: int = 0
    limit: int = 0


class Answer(Frame, frozen=True, array_like=True, gc=False):
    """node → coordinator: one piece of an answer. The last says where the next window begins (`next`, 0: no more), and
    where in the whole it ended (`end`): who follows a log asks again from there."""

    ask: int
    payload: bytes
    last: bool = False
    error: str = ""
    next: int = 0
    end: int = 0


class Fragment(Frame, frozen=True, array_like=True, gc=False):
    """either way: a piece of one long frame; the codec cuts and joins, nobody else sees these."""

    message: int
    payload: bytes
    last: bool = False


class Pause(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: take nothing new for so many `seconds` (None: until a person resumes you; 0: resume), `by`
    whom. Answered by the next report, whose `sharing` says how things stand; sent only to nodes that report it."""

    seconds: float | None
    by: str = ""


# requests


class ToolCall(Part, frozen=True, array_like=True, gc=False):
    """A call that the assistant made in an earlier turn; `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class Message(Part, frozen=True, array_like=True, gc=False):
    """One chat message. `tool_call_id` says which call a message of role `tool` answers; `reasoning` is what the
    assistant thought in an earlier turn."""

    role: str
    content: str = ""
    name: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    reasoning: str = ""


class Grammar(Part, frozen=True, array_like=True, gc=False):
    """What an answer has to be like; a node that cannot enforce it refuses. The model may think before it, as it likes.

    `kind`: `json_schema`, `json_object`, `regex`, `choice` (`value` is a JSON array of texts) or `lark`; empty for any
    text. `whitespace` is the pattern of the blanks that JSON may have in it (empty: a few of any).
    `calls`: `free` if the answer may instead be calls of the request's tools, as the model likes, `required` if it has
    to be; only of `tool` if that is named. Arguments are objects, those of a strict tool as its schema says."""

    kind: str = ""
    value: str = ""
    whitespace: str = ""
    calls: str = ""
    tool: str = ""


class Params(Part, frozen=True, array_like=True, gc=False):
    """How to generate. None means: the model's default. `logit_bias` by token id; `top_logprobs` alternatives are given
    beside each token where `logprobs` asks for them. `repetition_penalty` divides (1: none), the others subtract.
    `one_call`: an answer ends with its first tool call."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
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

    request: int
    seq: int
    request_id: str
    model: str
    messages: tuple[Message, ...]
    params: Params
    created: int
    expected: int = 256
    stream: bool = True
    tools: str = ""
    template: str = ""
    resume: tuple[tuple[int, ...], ...] = ()
    text: str = ""
    ids: tuple[int, ...] = ()
    owner: Owner = Owner()
    fingerprint: str = ""
    cache_scope: str = ""
    shared: bool = False

    def known(self, choice: int) -> tuple[int, ...]:
        """Give the ids of a choice that were heard already."""
        return self.resume[choice] if choice < len(self.resume) else ()


class Count(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → engine: of how many tokens is this prompt? Parts as in Generate. Answered by Finished, whose
    `prompt_tokens` say it, or by Refusal; the model need not be loaded, and nothing is computed or promised. `owner`:
    whose turn it takes where several wait to be tokenized."""

    request: int
    model: str
    messages: tuple[Message, ...]
    created: int
    tools: str = ""
    template: str = ""
    owner: Owner = Owner()


class Load(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → engine: load this model; answered by Finished, Refusal or Failed of this number."""

    request: int
    model: str


class Unload(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → engine: give this model's memory back; answered by Finished or Refusal (it is in use)."""

    request: int
    model: str


class Profile(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → engine: measure this model anew, from small forwards to the largest that fit, loading it if it is
    not loaded; answered by Finished (`measured` says what came of it), Refusal or Failed. Cancel ends it."""

    request: int
    model: str


class Cancel(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → engine: nobody waits for this any more."""

    request: int


class Admitted(Frame, frozen=True, array_like=True, gc=False):
    """engine → coordinator: committed, with the exact count."""

    request: int
    prompt_tokens: int
    cached_tokens: int = 0
    prompt_hash: bytes = b""


class Logprob(Part, frozen=True, array_like=True, gc=False):
    """One token's log probability and the likeliest alternatives at its place, tokens as bytes."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


class Delta(Part, frozen=True, array_like=True, gc=False):
    """What one step gave one choice: token ids and the text that became final, by channel.

    A piece of channel TOOL_CALL is one finished call as a JSON object: `index`, `id`, `name`, `arguments` (JSON text).
    """

    request: int
    choice: int
    ids: tuple[int, ...]
    pieces: tuple[tuple[int, str], ...]
    logprobs: tuple[Logprob, ...] = ()


class Deltas(Frame, frozen=True, array_like=True, gc=False):
    """engine → coordinator: one frame for a whole engine step."""

    deltas: tuple[Delta, ...]


class Timings(Part, frozen=True, array_like=True, gc=False):
    """Where a request's time went on the node, in seconds."""

    waiting: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0


class Finished(Frame, frozen=True, array_like=True, gc=False):
    """engine → coordinator: done. One reason (`stop`, `length`, `tool_calls`) per choice, and the exact usage; at the
    end of a Profile the model as it is now. `stops`: by choice the stop string that ended it, empty if none did (or
    nothing at all if none ended any); `thought` are those of the completion's tokens that were reasoning."""

    request: int
    reasons: tuple[str, ...]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    timings: Timings = Timings()
    measured: Model | None = None
    stops: tuple[str, ...] = ()
    thought: int = 0


class Refusal(Frame, frozen=True, array_like=True, gc=False):
    """engine → coordinator: this request was not begun, with the verdict and all its numbers."""

    request: int
    refused: Refused
    prompt_tokens: int | None = None


class Failed(Frame, frozen=True, array_like=True, gc=False):
    """engine or agent → coordinator: begun and broken, with a machine-readable reason."""

    request: int
    code: str
    message: str


# video: memory is lent for one job at a time, and the node alone decides


class Lease(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: lend `size` bytes to this job. Answered by LeaseGranted or LeaseRefused; once granted, by
    LeaseEnded, whatever happens. `generation` grows with every lease of a job: of two, the older is fenced off.

    `spec` is a JSON object for the worker: `prompt`, and as wanted `negative_prompt`, `width`, `height`, `frames`,
    `fps`, `steps`, `guidance`, `guidance_2`, `seed`, `timeout` and `stall` (seconds; the node's settings otherwise)."""

    lease: str
    generation: int
    job: str
    model: str
    size: int
    spec: bytes


class Release(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: give the lease back and end its worker (`cause` becomes the code of its end: `cancelled`,
    `worker_lost`, …); with cause `acknowledged`: its end was heard, forget it and its files."""

    lease: str
    generation: int
    cause: str


class RayHead(Frame, frozen=True, array_like=True, gc=False):
    """coordinator → node: take part in this Ray cluster while you can make video; an empty `address`: leave it.

    `address` is host:port of its head, `host` the address at which this node is reached, as its certificate says.
    `authority`, `certificate` and `key` are PEM (empty: no TLS), `token` is what every process of it has to show.
    `version` is the head's, which has to be the node's. `base_port` is where the ports of this node's Ray begin (0: as
    the node's own setting says), `environment` what all of its processes must agree on beside these."""

    address: str
    token: str = ""
    host: str = ""
    authority: bytes = b""
    certificate: bytes = b""
    key: bytes = b""
    version: str = ""
    base_port: int = 0
    environment: tuple[tuple[str, str], ...] = ()


class LeaseGranted(Frame, frozen=True, array_like=True, gc=False):
    """node → coordinator: the ceiling is lowered and the engine holds to it; the job may be started on this node.
    `folder` is what the actor has to be told to find the lease."""

    lease: str
    generation: int
    folder: str = ""


class LeaseRefused(Frame, frozen=True, array_like=True, gc=False):
    """node → coordinator: no. `need` and `headroom` in bytes, `retry_after` in seconds (0: it will not help),
    `waiting_for` says what would have to happen, for a person. Codes as in `wire.refusals`, or `lease_held`,
    `lease_superseded`, `guard_off`, `video_not_ready`."""

    lease: str
    generation: int
    code: str
    message: str
    need: int = 0
    headroom: int | None = None
    retry_after: float = 0.0
    waiting_for: str = ""


class LeaseEnded(Frame, frozen=True, array_like=True, gc=False):
    """node → coordinator: the memory is back, its worker dead. Code `completed`, or what went wrong: `cancelled`,
    `worker_crashed`, `worker_stalled`, `job_timeout`, `memory_lease_exceeded`, `monitor_failed`, `output_invalid`,
    `worker_lost`, … Said again on every new link until it is acknowledged. `peak` are the most bytes that were read,
    `seconds` the worker's life, `made` a JSON object of what was really made (width, height, frames, fps, seed, …)."""

    lease: str
    generation: int
    code: str
    message: str = ""
    artifacts: tuple[Artifact, ...] = ()
    peak: int = 0
    seconds: float = 0.0
    made: bytes = b""


# agent ↔ engine only


class Limits(Frame, frozen=True, array_like=True, gc=False):
    """agent → engine: the cap and ceiling in force, and the margin. `number` grows with every one, so that the engine
    can say which it holds. `margin_auto`: nobody set the margin, so that a profile of what is loaded may say a better
    one."""

    cap: int
    ceiling: int
    margin: int
    bound_by: str
    guard: bool = True
    leases: int = 0
    number: int = 0
    margin_auto: bool = False


class Enforce(Frame, frozen=True, array_like=True, gc=False):
    """agent → engine: at this poll you stood over a line. OVER_SOFT: give back what can be had again (free buffers,
    reusable cache, idle models). OVER_HARD: that, and if it is less than `excess` bytes, end the newest request."""

    poll: int
    level: Level
    excess: int = 0


class MakeRoom(Frame, frozen=True, array_like=True, gc=False):
    """agent → engine: let `size` bytes fit beside what must stay, by giving up what can be had again (free buffers,
    reusable cache, idle models that nobody pinned); nothing, where all of that would not do. `number` grows."""

    number: int
    size: int


class Ban(Part, frozen=True, array_like=True, gc=False):
    """A model that is not loaded for `seconds` more, and why."""

    model: str
    seconds: float
    cause: str


class Restore(Frame, frozen=True, array_like=True, gc=False):
    """agent → a new engine: load these models again, one by one, and keep those others out."""

    models: tuple[str, ...] = ()
    bans: tuple[Ban, ...] = ()


class Stop(Frame, frozen=True, array_like=True, gc=False):
    """agent → engine: end the process once the native call in flight has returned and all memory is given back, within
    so many seconds. Nothing follows it."""

    seconds: float


class EngineReport(Frame, frozen=True, array_like=True, gc=False):
    """engine → agent: the snapshot its inference thread published, judged by the limits that it holds: those of number
    `held`. `enforced` is the last `Enforce.poll` that it has acted on; `unreturned` are the bytes that did not
    come back after its last model had gone; `measures` is for who asks the agent for metrics; `roomed` is the last
    `MakeRoom.number` that it has acted on. `metal_limit` are the bytes that its device recommends at most (0: no Metal,
    or not known), `wired` those that MLX may keep wired."""

    memory: Memory
    models: tuple[Model, ...]
    running: int
    waiting: int
    queued_tokens: int = 0
    acked_seq: int = 0
    counts: Counts = Counts()
    cache: CacheState = CacheState()
    held: int = 0
    enforced: int = 0
    unreturned: int = 0
    measures: GateMeasures = GateMeasures()
    roomed: int = 0
    metal_limit: int = 0
    wired: int = 0


class Head(Part, frozen=True, array_like=True, gc=False):
    """The first field of every frame about one request: all that the agent decodes of what it forwards."""

    request: int


TAGS: dict[int, type[Frame]] = {
    1: EnrolStart, 2: EnrolAuthority, 3: Enrol, 4: EnrolPending, 5: Enrolled,
    10: Hello, 11: Welcome, 12: Denied, 13: Report, 14: Goodbye, 15: Ping, 16: Pong, 17: Renew, 18: Renewed,
    19: Ask, 20: Answer, 21: Fragment, 22: Pause,
    30: Generate, 31: Cancel, 32: Admitted, 33: Deltas, 34: Finished, 35: Refusal, 36: Failed,
    37: Load, 38: Unload, 39: Profile, 40: Count,
    50: Limits, 51: EngineReport, 52: Restore, 53: Enforce, 54: MakeRoom, 55: Stop,
    60: Lease, 61: Release, 62: RayHead, 63: LeaseGranted, 64: LeaseRefused, 65: LeaseEnded,
}  # fmt: skip
"""Never reuse a number."""

ENROLMENT = frozenset({EnrolStart, Enrol})
"""What a peer without a certificate may send."""
