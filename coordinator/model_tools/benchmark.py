"""Measurement of the speeds of a model on one node, with requests of low priority that only this node may take.

The requests pass the queue, placement and the gate of the node like clients' requests. A prompt consists of token ids
that differ in every request, so that no prefix cache shortens it. The node measures the times (`Timings`).
"""

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from coordinator.model_tools.benchmark_records import BenchmarkRecord, BenchmarkRun
from router.admission.rate_limits import KeyLimits
from router.dispatch.active_request import ActiveRequest
from router.dispatch.answer import CollectedAnswer
from router.dispatch.request import Outcome, RequestFailure, RequestSpec
from router.placement.candidate import ResourceDemand
from router.placement.cluster_view import NodeView
from wire.capacity.arithmetic import compute_max_context
from wire.frames import Finished, GenerationParams
from wire.identity import NodeId
from wire.refusals import RefusalCode, Refused

PROMPT_TOKENS = (512, 2048)
"""Lengths of the measured prompts, in tokens. Each is measured with each number in `PARALLEL`."""
PARALLEL = (1, 4)
"""Numbers of requests that run at the same time."""
ANSWER_TOKENS = 128
"""Maximum generated tokens of a measured request."""
WARM_UP_TOKENS = 16
"""Prompt tokens of the request that loads the model before the measurement."""
TOKEN_IDS = range(32, 480)
"""Token ids of the prompts, which are ordinary tokens in most vocabularies: control tokens have lower ids."""
MIN_GENERATED_TOKENS = 8
"""Minimum average of generated tokens per request for which the decode speed is computed."""
BENCHMARK_KEY = "benchmark"
"""Id of the API key under which the requests are counted and queued. No real API key has this id."""
BENCHMARK_LIMITS = KeyLimits(priority="low", upstreams=False)
"""Limits of `BENCHMARK_KEY`: low priority, and no upstream."""
_SKIPPED = frozenset({RefusalCode.TOO_LARGE, RefusalCode.CONTEXT, RefusalCode.NO_ROOM})


class RequestSender(Protocol):
    """Part of the dispatcher that a benchmark uses."""

    def submit(self, spec: RequestSpec) -> ActiveRequest:
        """Submit a request and return it. A refused request has already ended.

        The caller must `close` the request.
        """
        ...

    def close(self, request: ActiveRequest) -> None:
        """Close a request from `submit`. Cancel the request if it has not ended."""
        ...


def add_benchmark_key(get_limits: Callable[[str], KeyLimits | None]) -> Callable[[str], KeyLimits | None]:
    """Return a function like `get_limits` that returns `BENCHMARK_LIMITS` for `BENCHMARK_KEY`."""
    return lambda key: BENCHMARK_LIMITS if key == BENCHMARK_KEY else get_limits(key)


class _LeftError(Exception):
    """The node or its model is no longer in the pool."""


class Benchmark:
    """Measurement of a model on a node.

    `sender` submits requests. `get_view` returns the newest view of the node; it raises `KeyError` if the node is not
    in the pool.
    """

    def __init__(self, sender: RequestSender, get_view: Callable[[], NodeView], model: str) -> None:
        self._sender = sender
        self._get_view = get_view
        self._model = model

    async def measure(self, host: tuple[str, str, str]) -> BenchmarkRecord | Refused | RequestFailure:
        """Load the model if necessary, and measure it. `host` is chip, operating system and version of Macpool.

        A run is recorded as skipped if it exceeds the model's context, or if the node refuses it for its size or
        memory. Any other refusal or failure of a request ends the measurement and is returned. If the node or the model
        leaves the pool meanwhile, a refusal is returned. A cancellation cancels the requests.
        """
        try:
            return await self._measure_runs(host)
        except _LeftError:
            text = f"the node or its model {self._model} left the pool during the measurement: look at `cluster models`"
            return Refused(RefusalCode.NO_MODEL, text)

    async def _measure_runs(self, host: tuple[str, str, str]) -> BenchmarkRecord | Refused | RequestFailure:
        warm = (await self._send(WARM_UP_TOKENS, 1, 1))[0]
        if not isinstance(warm, Finished):
            return warm
        runs: list[BenchmarkRun] = []
        for tokens in PROMPT_TOKENS:
            for parallel in PARALLEL:
                run = await self._measure_run(tokens, parallel)
                if not isinstance(run, BenchmarkRun):
                    return run
                runs.append(run)
        view = self._find_node()
        model = view.models[self._model]
        chip, system, software = host
        return BenchmarkRecord(
            node=view.id,
            model=self._model,
            fingerprint=model.fingerprint,
            content=model.content,
            chip=chip,
            system=system,
            software=software,
            measured=time.time(),
            max_prompt=model.max_context if model.profiled else compute_max_context(view.memory, model),
            runs=tuple(runs),
        )

    def _find_node(self) -> NodeView:
        """Return the newest view of the node. Raise `_LeftError` if the node or its model is not in the pool."""
        try:
            view = self._get_view()
        except KeyError:
            raise _LeftError from None
        if self._model not in view.models:
            raise _LeftError
        return view

    async def _measure_run(self, tokens: int, parallel: int) -> BenchmarkRun | Refused | RequestFailure:
        context = self._find_node().models[self._model].context
        if context and tokens + ANSWER_TOKENS > context:
            text = f"the context of the model is {context} tokens"
            return BenchmarkRun(prompt_tokens=tokens, parallel=parallel, skipped=text)
        outcomes = await self._send(tokens, ANSWER_TOKENS, parallel)
        finished = [outcome for outcome in outcomes if isinstance(outcome, Finished)]
        failed = next((outcome for outcome in outcomes if not isinstance(outcome, Finished)), None)
        if isinstance(failed, Refused) and failed.code in _SKIPPED:
            return BenchmarkRun(prompt_tokens=tokens, parallel=parallel, skipped=failed.message)
        return failed or summarize_run(tokens, finished)

    async def _send(self, tokens: int, answer: int, parallel: int) -> list[Outcome]:
        """Send requests at the same time, and return their outcomes. Close all of them on every path."""
        requests = [self._sender.submit(self._build_spec(tokens, answer)) for _ in range(parallel)]
        try:
            return list(await asyncio.gather(*(_wait(request) for request in requests)))
        finally:
            for request in requests:
                self._sender.close(request)

    def _build_spec(self, tokens: int, answer: int) -> RequestSpec:
        node: NodeId = self._find_node().id
        demand = ResourceDemand(model=self._model, prompt_tokens=tokens, max_tokens=answer, node=node)
        return RequestSpec(
            demand=demand,
            key=BENCHMARK_KEY,
            request_id=f"bench-{secrets.token_hex(8)}",
            messages=(),
            params=GenerationParams(max_tokens=answer, temperature=1.0),
            created=int(time.time()),
            stream=False,
            ids=tuple(random.choices(TOKEN_IDS, k=tokens)),  # noqa: S311  a prompt, not a secret
        )


async def _wait(request: ActiveRequest) -> Outcome:
    assert isinstance(request.answer, CollectedAnswer)  # noqa: S101  the request is not streamed
    return await request.answer.wait_for_outcome()


def summarize_run(tokens: int, finished: Sequence[Finished]) -> BenchmarkRun:
    """Return the speeds of requests that ran at the same time, with prompts of `tokens` tokens.

    `finished`, which must not be empty, are the ends of the requests. The duration of prefill is the maximum, over the
    requests, of the wait on the node plus the prefill. The duration of decode is the maximum decode time of a request.
    The first token of an answer belongs to prefill. A speed is 0 if its duration is 0. The decode speed is also 0 if
    answers are too short (`MIN_GENERATED_TOKENS`).
    """
    prefill = max(answer.timings.waiting + answer.timings.prefill for answer in finished)
    decode = max(answer.timings.decode for answer in finished)
    read = sum(answer.prompt_tokens - answer.cached_tokens for answer in finished)
    generated = sum(answer.completion_tokens for answer in finished)
    has_decode = decode > 0 and generated >= MIN_GENERATED_TOKENS * len(finished)
    return BenchmarkRun(
        prompt_tokens=tokens,
        parallel=len(finished),
        generated=generated,
        prefill_speed=round(read / prefill, 1) if prefill > 0 else 0.0,
        decode_speed=round((generated - len(finished)) / decode, 1) if has_decode else 0.0,
    )
