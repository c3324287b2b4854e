"""What each API key may take: models, nodes, requests and tokens per minute, requests at once. Pure.

Every key, with limits or without, has bounds on what it has under way: requests, prompt tokens and prompt bytes
(`router.key_*`). They are far above what a household needs and keep one key from filling the coordinator's memory.

Theory. Requests and tokens per minute are buckets that fill evenly: one minute's worth may come at once after a quiet
minute. A request takes its tokens by estimate when it comes, prompt and the answer that it may write, and at its end
the difference to what it really took is given back or taken; so a key cannot outrun its rate by asking before it has
been answered. A request larger than a whole minute's tokens is let through when the bucket is full, and leaves a debt.
"""

import fnmatch
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from router.placement.place import Demand
from router.settings import RouterSettings
from wire.refusals import Code, Refused
from wire.units import show_size

MINUTE = 60.0
ANSWER = 256
"""Tokens of an answer whose length the client has not bounded."""
BYTES_PER_TOKEN = 4
VIDEO_RETRY_SECONDS = 30.0
"""Seconds after which a key that has all its videos under way may ask again."""
WEIGHTS = {"low": 1, "normal": 4, "high": 16}
"""A key's part of the queue beside others, by its priority (`queue`)."""

PerMinute = Annotated[int, Meta(ge=1, le=10**9)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]


class KeyLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a key may use; None: no bound. `models` are names or patterns (`qwen*`), empty: all; `labels` are those that
    a node must have; `waiting` is the most requests that may wait in line."""

    models: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()
    labels: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    requests_per_minute: PerMinute | None = None
    tokens_per_minute: PerMinute | None = None
    concurrency: Annotated[int, Meta(ge=1, le=10_000)] | None = None
    waiting: Annotated[int, Meta(ge=0, le=10_000)] | None = None
    priority: Literal["low", "normal", "high"] = "normal"

    def allows(self, model: str) -> bool:
        """Say whether the key may use a model."""
        return not self.models or any(fnmatch.fnmatchcase(model, pattern) for pattern in self.models)

    @property
    def weight(self) -> int:
        """The key's part in the queue."""
        return WEIGHTS[self.priority]


NO_LIMITS = KeyLimits()


class Rate(NamedTuple):
    """Where a key stands with one of its rates: of `what`, the `limit` a minute, how many are left, and seconds until
    all are."""

    what: str
    limit: int
    remaining: int
    reset: float


@dataclass(slots=True)
class _Bucket:
    """So many a minute. `level` may be below 0: a debt."""

    rate: int
    level: float
    at: float

    def fill(self, now: float) -> None:
        self.level = min(float(self.rate), self.level + max(0.0, now - self.at) * self.rate / MINUTE)
        self.at = now

    def wait_for(self, wanted: float) -> float:
        """Give seconds until `wanted` are there, 0 when they are; more than a minute's worth is asked of a full one."""
        missing = min(wanted, float(self.rate)) - self.level
        return max(0.0, missing) * MINUTE / self.rate


@dataclass(slots=True)
class _Meter:
    running: int = 0
    prompt_tokens: int = 0
    prompt_bytes: int = 0
    requests: _Bucket | None = None
    tokens: _Bucket | None = None


class Quotas:
    """The meters of all keys: one without limits may be given some while its requests run. `limits_of` gives a key's
    limits by its id, None where it has none."""

    def __init__(
        self,
        limits_of: Callable[[str], KeyLimits | None] = lambda _: None,
        settings: RouterSettings | None = None,
    ) -> None:
        self._limits_of = limits_of
        self._settings = settings or RouterSettings()
        self._meters: dict[str, _Meter] = {}

    def limits(self, key: str) -> KeyLimits:
        """Give a key's limits."""
        return self._limits_of(key) or NO_LIMITS

    def take(self, key: str, demand: Demand, now: float) -> int | Refused:
        """Let a request in, and give the tokens that it was charged; `settle` must follow. Or say which limit it is
        over, and until when."""
        limits = self.limits(key)
        if not limits.allows(demand.model):
            return not_allowed(demand.model, limits)
        meter = self._filled(key, limits, now)
        crowded = self._crowded(meter, limits, demand)
        if crowded:
            return Refused(Code.RATE_LIMITED, f"{crowded}: wait for an answer", None, 1.0)
        charge = 0 if meter.tokens is None else estimate(demand)
        for bucket, cost, what in ((meter.requests, 1, "requests"), (meter.tokens, charge, "tokens")):
            if bucket is not None and (wait := bucket.wait_for(cost)):
                text = f"this API key may take {bucket.rate} {what} a minute, and this asks for {cost}"
                return Refused(Code.RATE_LIMITED, f"{text}: retry in {math.ceil(wait)} s", None, wait)
        meter.running += 1
        meter.prompt_tokens += _prompt(demand)
        meter.prompt_bytes += demand.prompt_bytes
        if meter.requests is not None:
            meter.requests.level -= 1
        if meter.tokens is not None:
            meter.tokens.level -= charge
        return charge

    def take_video(self, key: str, model: str, open_videos: int, queued: int, now: float) -> Refused | None:
        """Count a video that a key asks for, which has `open_videos` under way, of these `queued` in line; return the
        limit that it is over, None where it is within all. Videos use no tokens, and end hours later: they are counted
        apart from requests for text."""
        limits = self.limits(key)
        if not limits.allows(model):
            return not_allowed(model, limits)
        bounds = (limits.concurrency, open_videos, "under way"), (limits.waiting, queued, "in line")
        for most, has, where in bounds:
            if most is not None and has >= max(1, most):
                text = f"this API key may have {max(1, most)} videos {where} and has {has}: wait for one to end"
                return Refused(Code.RATE_LIMITED, text, None, VIDEO_RETRY_SECONDS)
        requests = self._filled(key, limits, now).requests
        if requests is None:
            return None
        if wait := requests.wait_for(1):
            text = f"this API key may send {requests.rate} requests a minute: retry in {math.ceil(wait)} s"
            return Refused(Code.RATE_LIMITED, text, None, wait)
        requests.level -= 1
        return None

    def _crowded(self, meter: _Meter, limits: KeyLimits, demand: Demand) -> str:
        """Return which bound a request would exceed beside those of its key under way; empty where it fits."""
        most, settings = limits.concurrency or self._settings.key_requests, self._settings
        if meter.running >= most:
            return f"this API key may have {most} requests at once"
        tokens, size = meter.prompt_tokens + _prompt(demand), meter.prompt_bytes + demand.prompt_bytes
        if meter.running and tokens > settings.key_tokens:
            return f"this API key may have {settings.key_tokens} prompt tokens under way, and this makes it {tokens}"
        if meter.running and size > settings.key_bytes:
            most_size = show_size(settings.key_bytes)
            return f"this API key may have {most_size} of prompts under way, and this makes it {show_size(size)}"
        return ""

    def rates(self, key: str, now: float) -> tuple[Rate, ...]:
        """Return where a key stands with its rates; nothing for a key without any."""
        meter = self._filled(key, self.limits(key), now)
        return tuple(
            Rate(what, bucket.rate, max(0, math.floor(bucket.level)), bucket.wait_for(bucket.rate))
            for what, bucket in (("requests", meter.requests), ("tokens", meter.tokens))
            if bucket is not None
        )

    def settle(self, key: str, demand: Demand, charged: int, used: int, now: float) -> None:
        """Count the end of a request that was let in with this demand: it used so many tokens."""
        meter = self._meters[key]
        meter.running -= 1
        meter.prompt_tokens -= _prompt(demand)
        meter.prompt_bytes -= demand.prompt_bytes
        if meter.tokens is not None:
            meter.tokens.fill(now)
            meter.tokens.level += charged - used

    def _meter(self, key: str) -> _Meter:
        meter = self._meters.get(key)
        if meter is None:
            meter = self._meters[key] = _Meter()
        return meter

    def _filled(self, key: str, limits: KeyLimits, now: float) -> _Meter:
        meter = self._meter(key)
        meter.requests = _kept(meter.requests, limits.requests_per_minute, now)
        meter.tokens = _kept(meter.tokens, limits.tokens_per_minute, now)
        return meter

    def running(self, key: str) -> int:
        """Give how many requests of a key are here."""
        meter = self._meters.get(key)
        return 0 if meter is None else meter.running


def not_allowed(model: str, limits: KeyLimits) -> Refused:
    """Give the refusal of a model that a key may not use."""
    text = f"this API key may not use the model {model[:200]!r}, only {', '.join(limits.models)}"
    return Refused(Code.NOT_ALLOWED, text)


def estimate(demand: Demand) -> int:
    """Give the tokens that a request may take: its prompt, and for each choice what it may write."""
    return _prompt(demand) + demand.choices * (demand.max_tokens or ANSWER)


def work(demand: Demand) -> int:
    """Give the tokens that a request probably takes, to be weighed beside others: few answers use all they may."""
    return _prompt(demand) + demand.choices * min(demand.max_tokens or ANSWER, ANSWER)


def _prompt(demand: Demand) -> int:
    return demand.prompt_tokens if demand.prompt_tokens is not None else demand.prompt_bytes // BYTES_PER_TOKEN


def _kept(bucket: _Bucket | None, rate: int | None, now: float) -> _Bucket | None:
    """Keep a bucket whose rate is as it was, filled up to now; begin a full one where the rate is new."""
    if rate is None:
        return None
    if bucket is None or bucket.rate != rate:
        return _Bucket(rate, float(rate), now)
    bucket.fill(now)
    return bucket
