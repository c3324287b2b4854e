"""The shape of a request, and refusals before any commitment."""

import pytest
from msgspec.structs import replace

from node.engine.memory.gate import GateSite, MemoryGate
from node.engine.requests.preflight import (
    RequestShape,
    compute_shape,
    refuse_impossible,
    refuse_too_large,
    refuse_without_room,
)
from wire.capacity import arithmetic
from wire.frames import Generate, GenerationParams, GrammarSpec, MemoryLimits, Message
from wire.refusals import RefusalCode
from wire.report import Memory, Model
from wire.units import GIB, MIB

MODEL = Model("m", loaded=True, weights=4 * GIB, kv_per_token=MIB, context=4096, transient=64 * MIB)
MEMORY = Memory(
    cap=12 * GIB,
    ceiling=12 * GIB,
    margin=GIB,
    phys=5 * GIB,
    current=5 * GIB,
    headroom=6 * GIB,
    reserved=2 * MIB,
    base=128 * MIB,
    bound_by="static",
)


def request(max_tokens: int | None = None, *, expected: int = 0, n: int = 1, **fields: object) -> Generate:
    params = GenerationParams(max_tokens=max_tokens, n=n)
    return Generate(1, 1, "r", "m", (Message("user", "hi"),), params, 0, expected, **fields)  # pyright: ignore


@pytest.mark.parametrize(
    ("asked", "limit", "promised"),
    [
        (request(100, expected=30), 100, 30),
        (request(100, expected=300), 100, 100),
        (request(100), 100, 1),
        (request(expected=30), 512, 30),
        (request(expected=900), 512, 512),
        (request(100, expected=30, resume=((1,) * 50,)), 100, 51),
        (request(100, expected=30, resume=((1,), (1,) * 99)), 100, 100),
        (request(expected=30, resume=((1,) * 600,)), 601, 601),
        (request(expected=30, resume=((1,) * 512,)), 512, 512),
        (request(10, resume=((1,) * 20,)), 10, 10),
        (request(0), 0, 1),
    ],
)
def test_what_is_promised_is_what_is_expected_within_the_limit_and_beyond_what_is_known(
    asked: Generate, limit: int, promised: int
):
    assert compute_shape(asked, 7, 512, 4096) == RequestShape(7, limit, promised, asked.params.n)


def test_an_answer_ends_with_the_context_also_if_max_tokens_is_higher():
    asked = replace(request(expected=400), params=GenerationParams(max_tokens=32_000))
    assert compute_shape(asked, 4000, 512, 4096) == RequestShape(4000, 96, 96, 1)
    assert compute_shape(asked, 4096, 512, 4096).limit == 1
    assert compute_shape(replace(asked, context_limit=4010), 4000, 512, 4096).limit == 10
    resumed = replace(asked, resume=(tuple(range(120)),))
    assert compute_shape(resumed, 4000, 512, 4096).limit == 121, "a node with a longer context began the answer"
    ended = replace(resumed, params=GenerationParams(max_tokens=120))
    assert compute_shape(ended, 4000, 512, 4096).limit == 96


def test_without_a_limit_an_answer_ends_with_the_context():
    assert compute_shape(request(expected=400), 4000, 512, 4096) == RequestShape(4000, 96, 96, 1)
    assert compute_shape(request(expected=400), 4096, 512, 4096).limit == 1
    assert compute_shape(request(expected=400, context_limit=4010), 4000, 512, 4096).limit == 10
    assert compute_shape(request(expected=400, context_limit=5000), 4000, 512, 4096).limit == 96
    assert RequestShape(4000, 96, 90, 3).length == 4090
    assert RequestShape(4000, 96, 90, 3).replace_choices(1) == RequestShape(4000, 96, 90, 1)


@pytest.mark.parametrize(
    ("asked", "shape", "code"),
    [
        (request(), RequestShape(7, 10, 5, 1), None),
        (request(), RequestShape(4000, 96, 5, 1), None),
        (request(), RequestShape(4000, 97, 5, 1), RefusalCode.CONTEXT),
        (request(), RequestShape(7, 10, 5, 8), None),
        (request(), RequestShape(7, 10, 5, 9), RefusalCode.UNSUPPORTED),
        (request(), RequestShape(7, 0, 5, 1), RefusalCode.INVALID),
        (request(), RequestShape(7, 10, 5, 0), RefusalCode.INVALID),
        (replace(request(), model="other"), RequestShape(7, 10, 5, 1), RefusalCode.NO_MODEL),
        (
            replace(request(), params=GenerationParams(grammar=GrammarSpec("json_object"))),
            RequestShape(7, 10, 5, 1),
            RefusalCode.UNSUPPORTED,
        ),
    ],
)
def test_what_no_memory_helps_is_refused(asked: Generate, shape: RequestShape, code: RefusalCode | None):
    found = refuse_impossible(asked, shape, MODEL, batch=8)
    assert (found and found.code) == code


def test_a_request_that_can_never_fit_is_refused_with_what_it_needs_and_what_there_is():
    # margin 1 GiB and 128 MiB of the engine itself leave 10.875 GiB, of which the weights take 4
    assert refuse_too_large(RequestShape(3000, 50, 40, 2), MEMORY, MODEL) is None
    for shape in (RequestShape(3000, 50, 40, 3), RequestShape(4000, 3096, 3000, 1)):
        refused = refuse_too_large(shape, MEMORY, MODEL)
        assert refused is not None
        needed = arithmetic.estimate_alone_bytes(MODEL, shape.prompt, shape.answer_tokens, shape.choices)
        assert refused.code is RefusalCode.TOO_LARGE
        assert refused.numbers is not None
        assert refused.numbers.estimate == needed - MODEL.weights
        assert refused.numbers.predicted == needed + MEMORY.margin
        assert (refused.numbers.ceiling, refused.numbers.cap) == (MEMORY.cap, MEMORY.cap)
        assert (refused.numbers.current, refused.numbers.reserved, refused.numbers.headroom) == (
            5 * GIB,
            2 * MIB,
            6 * GIB,
        )
        assert f"{shape.length} tokens × {shape.choices}" in refused.message
        assert "this node can give 10.9 GiB" in refused.message


@pytest.mark.parametrize(
    ("cost", "shape", "code"),
    [
        (MIB, RequestShape(10, 5, 5, 1), None),
        (7 * GIB, RequestShape(10, 5, 5, 1), RefusalCode.NO_ROOM),
        (7 * GIB, RequestShape(4000, 3096, 3000, 1), RefusalCode.TOO_LARGE),
    ],
)
def test_a_refusal_distinguishes_no_room_now_from_never(cost: int, shape: RequestShape, code: RefusalCode | None):
    gate = MemoryGate()
    gate.set_limits(MemoryLimits(MEMORY.cap, MEMORY.ceiling, MEMORY.margin, "static"))
    found = refuse_without_room(shape, MEMORY, MODEL, cost, gate)
    assert (found and found.code) == code
    assert gate.checks == {GateSite.PREFLIGHT: 1}


def test_where_the_memory_cannot_be_read_nothing_is_called_too_large():
    gate = MemoryGate()
    gate.set_limits(MemoryLimits(MEMORY.cap, MEMORY.ceiling, MEMORY.margin, "static"))
    blind = replace(MEMORY, phys=None, current=None, headroom=None)
    found = refuse_without_room(RequestShape(4000, 3096, 3000, 1), blind, MODEL, GIB, gate)
    assert found is not None
    assert found.code is RefusalCode.UNREADABLE
