"""Enforce the limits of each API key: models, requests and tokens per minute, and concurrent requests. Pure.

Every key, with or without limits, has bounds on its open requests, prompt tokens and prompt bytes
(`router.max_*_per_key`). They are far above the needs of a household, and prevent one key from filling the
coordinator's memory.

Theory. Requests and tokens per minute are token buckets. After a minute without requests, a key may use the amount of a
whole minute in one burst. On arrival, a request is charged an estimate: its prompt, and at most `DEFAULT_ANSWER_TOKENS`
per answer. At its end, the difference to the tokens used is refunded or charged. Answers that are longer than estimated
leave a debt, and the key waits until the debt is paid. Over time, a key therefore cannot exceed its rate. Open requests
can exceed it temporarily, by the tokens of their answers (docs/decisions/0063). A request of more than a whole minute's
tokens is admitted when the bucket is full, and leaves a debt.
"""

import fnmatch
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from router.placement.candidate import ResourceDemand
from router.settings import RouterSettings
from wire.refusals import RefusalCode, Refused
from wire.units import show_count, show_size

MINUTE_SECONDS = 60.0
DEFAULT_ANSWER_TOKENS = 256
"""Assumed tokens of an answer for which the client sets no limit, or a higher limit."""
BYTES_PER_TOKEN = 4
"""Assumed bytes of text per prompt token, until a node has counted the prompt."""
VIDEO_RETRY_SECONDS = 30.0
"""Retry-After in seconds for a key that has reached its limit of open or queued videos."""
WEIGHTS = {"low": 1, "normal": 4, "high": 16}
"""Weight of a key in the queue by its priority."""

PerMinute = Annotated[int, Meta(ge=1, le=10**9)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Limits of an API key. None means no limit of the key's own: only the bounds for every key apply."""

    models: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    """Names or patterns of models (`qwen*`); empty allows all."""
    labels: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    """Labels that a node must have to serve the key, each of them; empty allows all nodes."""
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    concurrency: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    """Maximum open requests, and maximum open videos, which are counted separately."""
    waiting: Annotated[int, Meta(ge=0, le=10_000)] | None = None
    """Maximum queued requests, and maximum queued videos; a key may always queue one video."""
    priority: Literal["low", "normal", "high"] = "normal"
    upstreams: bool | None = None
    """Whether prompts of the key may be sent to upstreams; None for the default of the pool (`may_use_upstreams`)."""

    def allows(self, model: str) -> bool:
        """Return whether the key may use a model of this name."""
        return not self.models or any(fnmatch.fnmatchcase(model, pattern) for pattern in self.models)

    def may_use_upstreams(self, default: bool) -> bool:
        """Return whether prompts of the key may be sent to upstreams.

        If `upstreams` is None, `default` decides for a key without model and label limits. A key with such limits may
        then not use upstreams.
        """
        return default and not (self.models or self.labels) if self.upstreams is None else self.upstreams

    @property
    def has_rate(self) -> bool:
        """Whether the key has a limit of requests or tokens per minute."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None

    @property
    def weight(self) -> int:
        """Weight of the key in the queue, from its priority (`WEIGHTS`)."""
        return WEIGHTS[self.priority]


NO_LIMITS = KeyLimits()


class RateState(NamedTuple):
    """State of one rate limit of a key, as sent in the `x-ratelimit-*` headers."""

    unit: str
    """Unit of the other fields: `requests` or `tokens`."""
    limit: int
    """Requests or tokens allowed per minute."""
    remaining: int
    """Requests or tokens available now."""
    reset: float
    """Seconds from now until the whole `limit` is available."""


@dataclass(slots=True)
class _Bucket:
    """Token bucket that fills at `rate` per minute. A `level` below 0 is a debt."""

    rate: int
    level: float
    at: float

    def fill(self, now: float) -> None:
        self.level = min(float(self.rate), self.level + max(0.0, now - self.at) * self.rate / MINUTE_SECONDS)
        self.at = now

    def compute_wait(self, wanted: float) -> float:
        """Return the seconds until `wanted` is available; more than a minute's worth needs a full bucket."""
        missing = min(wanted, float(self.rate)) - self.level
        return max(0.0, missing) * MINUTE_SECONDS / self.rate

    def take(self, amount: float) -> None:
        """Take `amount`, also into debt. A negative amount is returned to the bucket."""
        self.level -= amount


@dataclass(slots=True)
class _KeyMeter:
    running: int = 0
    prompt_tokens: int = 0
    prompt_bytes: int = 0
    requests: _Bucket | None = None
    tokens: _Bucket | None = None
    has_rate: bool = False
    """Whether the key had a limit of requests or tokens per minute at its last request."""

    def fill(self, limits: KeyLimits, now: float) -> None:
        """Fill both buckets for the time since their last use. A changed rate begins with a full bucket."""
        requests, tokens = limits.requests_per_minute, limits.tokens_per_minute
        self.requests = None if requests is None else _fill_bucket(self.requests, requests, now)
        self.tokens = None if tokens is None else _fill_bucket(self.tokens, tokens, now)
        self.has_rate = limits.has_rate

    def add(self, prompt_tokens: int, prompt_bytes: int, charge: int) -> None:
        """Count a request as open, with the tokens and bytes of its prompt, and charge `charge` tokens."""
        self.running += 1
        self.prompt_tokens += prompt_tokens
        self.prompt_bytes += prompt_bytes
        if not self.has_rate:
            return
        if self.requests is not None:
            self.requests.take(1)
        if self.tokens is not None:
            self.tokens.take(charge)

    def remove(self, demand: ResourceDemand) -> None:
        """Count an open request as ended."""
        self.running -= 1
        self.prompt_tokens -= _estimate_prompt_tokens(demand)
        self.prompt_bytes -= demand.prompt_bytes + demand.other_bytes


class RateLimits:
    """Meters of the requests and tokens of all API keys, which decide whether requests are admitted.

    `limits_of(id)` returns the limits of a key; None for a key without limits. Limits may change while the key has open
    requests. `settings` has the bounds that apply to every key; None for the defaults. All times are in monotonic
    seconds.
    """

    def __init__(
        self,
        limits_of: Callable[[str], KeyLimits | None] = lambda _: None,
        settings: RouterSettings | None = None,
    ) -> None:
        self._limits_of = limits_of
        self._settings = settings or RouterSettings()
        self._meters: dict[str, _KeyMeter] = {}

    def get_limits(self, key: str) -> KeyLimits:
        """Return the limits of a key; `NO_LIMITS` if it has none."""
        return self._limits_of(key) or NO_LIMITS

    def admit(self, key: str, demand: ResourceDemand, now: float, limits: KeyLimits | None = None) -> int | Refused:
        """Admit a request and return the tokens that it is charged; or return the refusal.

        `limits` are the limits of the key, if the caller has them; None looks them up. A refusal names the exceeded
        limit and the wait, or a model that the key may not use. The charge is 0 for a key without a limit of tokens.
        After an admission, the caller must call `record_end`.
        """
        limits = limits or self.get_limits(key)
        if limits.models and not limits.allows(demand.model):
            return refuse_model(demand.model, limits)
        meter = self._fill_meter(key, limits, now)
        tokens, size = _estimate_prompt_tokens(demand), demand.prompt_bytes + demand.other_bytes
        crowded = self._describe_exceeded_bound(meter, limits, tokens, size)
        if crowded:
            return Refused(RefusalCode.RATE_LIMITED, f"{crowded}: wait for an answer", None, 1.0)
        charge = 0 if meter.tokens is None else estimate_probable_tokens(demand)
        refused = _find_exceeded_rate(meter, charge) if meter.has_rate else None
        if refused is not None:
            return refused
        meter.add(tokens, size, charge)
        return charge

    def refuse_prompts(self, key: str, count: int) -> Refused | None:
        """Return the refusal of a body with `count` prompts that the limits of the key can never admit together.

        Return None if the limits can admit them. Each prompt counts as a request.
        """
        limits = self.get_limits(key)
        for most, unit in (
            (limits.concurrency or self._settings.max_requests_per_key, "open"),
            (limits.requests_per_minute, "per minute"),
        ):
            if most is not None and count > most:
                text = f"{count} prompts are {count} requests, and the limit of this API key is {most} {unit}"
                return Refused(RefusalCode.INVALID, f"{text}: send at most {show_count(most, 'prompt')} in one body")
        return None

    def admit_video(self, key: str, model: str, open_videos: int, queued: int, now: float) -> Refused | None:
        """Admit a new video and return None; or return the refusal.

        The key has `open_videos` videos, of which `queued` are in the queue. An admitted video is charged to the rate
        of requests as one request. A refusal names an exceeded limit, or a model that the key may not use. Videos use
        no tokens and end hours later. They therefore do not count as open requests, and need no `record_end`.
        """
        limits = self.get_limits(key)
        if not limits.allows(model):
            return refuse_model(model, limits)
        bounds = (limits.concurrency, open_videos, "open"), (limits.waiting, queued, "queued")
        for most, has, where in bounds:
            if most is not None and has >= max(1, most):
                text = (
                    f"the limit of this API key is {show_count(max(1, most), f'{where} video')}, and it has {has}: "
                    "wait for one to end"
                )
                return Refused(RefusalCode.RATE_LIMITED, text, None, VIDEO_RETRY_SECONDS)
        requests = self._fill_meter(key, limits, now).requests
        if requests is None:
            return None
        if wait := requests.compute_wait(1):
            most = show_count(requests.rate, "request")
            text = f"the limit of this API key is {most} per minute: retry in {math.ceil(wait)} s"
            return Refused(RefusalCode.RATE_LIMITED, text, None, wait)
        requests.take(1)
        return None

    def _describe_exceeded_bound(
        self, meter: _KeyMeter, limits: KeyLimits, prompt_tokens: int, prompt_bytes: int
    ) -> str:
        """Describe the bound that a request would exceed with its key's open requests; empty if it fits.

        A request alone exceeds no bound of tokens or bytes.
        """
        running, settings = meter.running, self._settings
        most = limits.concurrency or settings.max_requests_per_key
        if running >= most:
            return f"the limit of this API key is {show_count(most, 'open request')}, and all are in use"
        if not running:
            return ""
        tokens, size = meter.prompt_tokens + prompt_tokens, meter.prompt_bytes + prompt_bytes
        if tokens > settings.max_prompt_tokens_per_key:
            return (
                f"the limit of this API key is {settings.max_prompt_tokens_per_key} prompt tokens in open requests; "
                f"with this request it would have {tokens}"
            )
        if size > settings.max_body_bytes_per_key:
            most_size = show_size(settings.max_body_bytes_per_key)
            has = show_size(size)
            return f"the limit of this API key is {most_size} of open prompts; with this one it would have {has}"
        return ""

    def list_rates(self, key: str, now: float) -> tuple[RateState, ...]:
        """Return the state of a key's limits per minute at `now`; empty for a key without such limits."""
        meter = self._fill_meter(key, self.get_limits(key), now)
        return tuple(
            RateState(unit, bucket.rate, max(0, math.floor(bucket.level)), bucket.compute_wait(bucket.rate))
            for unit, bucket in (("requests", meter.requests), ("tokens", meter.tokens))
            if bucket is not None
        )

    def record_end(self, key: str, demand: ResourceDemand, charged: int, used: int, now: float) -> None:
        """Record the end of an admitted request, and refund or charge the difference of its tokens.

        `demand` must have the same prompt tokens and bytes as in the call of `admit`. `charged` is the result of that
        call, `used` the number of tokens that the request has used.
        """
        meter = self._meters[key]
        meter.remove(demand)
        if meter.tokens is not None:
            meter.tokens.fill(now)
            meter.tokens.take(used - charged)

    def _fill_meter(self, key: str, limits: KeyLimits, now: float) -> _KeyMeter:
        """Return the meter of a key, with its buckets filled up to now."""
        meter = self._meters.get(key)
        if meter is None:
            meter = self._meters[key] = _KeyMeter()
        if limits is not NO_LIMITS or meter.has_rate:
            meter.fill(limits, now)
        return meter

    def count_open(self, key: str) -> int:
        """Return the number of open requests of a key, without its videos."""
        meter = self._meters.get(key)
        return 0 if meter is None else meter.running


def _find_exceeded_rate(meter: _KeyMeter, charge: int) -> Refused | None:
    """Return the refusal of a request that costs more than a bucket of its key has; None if both have enough."""
    for bucket, cost, unit in ((meter.requests, 1, "requests"), (meter.tokens, charge, "tokens")):
        if bucket is not None and (wait := bucket.compute_wait(cost)):
            text = f"the limit of this API key is {bucket.rate} {unit} per minute, and this request costs {cost}"
            return Refused(RefusalCode.RATE_LIMITED, f"{text}: retry in {math.ceil(wait)} s", None, wait)
    return None


def refuse_model(model: str, limits: KeyLimits) -> Refused:
    """Return the refusal of a model that a key with these limits may not use."""
    text = f"this API key may not use the model {model[:200]!r}, only {', '.join(limits.models)}"
    return Refused(RefusalCode.NOT_ALLOWED, text)


def estimate_probable_tokens(demand: ResourceDemand) -> int:
    """Return the expected tokens of a request: its prompt, and for each choice its limit or `DEFAULT_ANSWER_TOKENS`.

    The lower of these two numbers is used, because few answers reach a high limit.
    """
    most = demand.max_tokens or DEFAULT_ANSWER_TOKENS
    answer = most if most < DEFAULT_ANSWER_TOKENS else DEFAULT_ANSWER_TOKENS
    return _estimate_prompt_tokens(demand) + demand.choices * answer


def _estimate_prompt_tokens(demand: ResourceDemand) -> int:
    tokens = demand.prompt_tokens
    return (demand.prompt_bytes + demand.other_bytes) // BYTES_PER_TOKEN if tokens is None else tokens


def _fill_bucket(bucket: _Bucket | None, rate: int, now: float) -> _Bucket:
    """Return the bucket filled up to now if its rate is unchanged, else a full one for the new rate."""
    if bucket is None or bucket.rate != rate:
        return _Bucket(rate, float(rate), now)
    bucket.fill(now)
    return bucket
