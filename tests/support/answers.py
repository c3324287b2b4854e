"""One answer in the frames of a node, complete and as deltas, for the tests of every dialect."""

import json
from dataclasses import dataclass
from typing import Any

import msgspec

from router.dialects.shared.interface import Dialect, ParsedRequest
from router.dispatch.request import CompleteAnswer, RequestSpec
from router.errors import Problem
from router.placement.candidate import ResourceDemand
from wire.frames import Channel, Delta, Finished, Timings
from wire.refusals import MemoryNumbers

CREATED = 1_700_000_000
CALL = '{"index":0,"id":"call_1","name":"weather","arguments":"{\\"city\\":\\"Ulm\\"}"}'
FINISHED = Finished(7, ("stop",), 20, 9, 12, Timings(0.5, 1.25, 2.0), reasoning_tokens=4)
"""20 prompt tokens, 12 of them cached, 9 generated, 4 of these reasoning; 0.5 s queued, 1.25 s prefill, 2 s decode."""
CUT = msgspec.structs.replace(FINISHED, reasons=("length",))
SAID = ((Channel.REASONING, "let me"), (Channel.CONTENT, "I look."), (Channel.TOOL_CALL, CALL))
WHOLE = CompleteAnswer({(0, Channel.REASONING): "let me", (0, Channel.CONTENT): "I look."}, {0: (CALL,)}, {}, "tiny-1")
TEXT_ONLY = CompleteAnswer({(0, Channel.CONTENT): "I look."}, {}, {}, "tiny-1")
CROWDED = Problem(503, "no_headroom", "no room", None, MemoryNumbers(9, 8, 7, 6, 5, 4, 3, 2, "dynamic"), 2.0)


@dataclass(frozen=True)
class Reading:
    """A request after a node has counted its prompt tokens."""

    spec: RequestSpec
    demand: ResourceDemand
    fingerprint: str = "tiny-1"


def asked(dialect: Dialect, **body: Any) -> tuple[ParsedRequest, RequestSpec]:
    """Parse a body of the model `tiny`; return the request and its only job."""
    found = dialect.parse(json.dumps({"model": "tiny", **body}).encode(), "k1")
    assert not isinstance(found, Problem), found
    (job,) = found.to_specs("k1", "r1", CREATED)
    return found, job


def whole(
    dialect: Dialect, answer: CompleteAnswer = WHOLE, finished: Finished = FINISHED, **body: Any
) -> dict[str, Any]:
    """Return the JSON of an answer that is not streamed."""
    request, job = asked(dialect, **body)
    return json.loads(request.render_complete(job, answer, finished))


def streamed(
    dialect: Dialect,
    *said: tuple[int, str],
    finished: Finished = FINISHED,
    broken: Problem | None = None,
    **body: Any,
) -> str:
    """Return the complete text of a stream: its opening, one delta for each piece, and its end."""
    request, job = asked(dialect, stream=True, **body)
    demand = msgspec.structs.replace(job.demand, prompt_tokens=finished.prompt_tokens)
    chunks = request.create_chunk_encoder(Reading(job, demand))
    raw = chunks.encode_opening()
    for channel, text in said:
        raw += chunks.encode_deltas([Delta(7, 0, (1,), ((int(channel), text),))])
    return (raw + (chunks.encode_end(finished) if broken is None else chunks.encode_failure(broken))).decode()


def events(raw: str) -> list[tuple[str, Any]]:
    """Return name and data of each server-sent event except `[DONE]`. An event without a name has an empty one."""
    found: list[tuple[str, Any]] = []
    for block in raw.split("\n\n")[:-1]:
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        if lines["data"] != "[DONE]":
            found.append((lines.get("event", ""), json.loads(lines["data"])))
    return found
