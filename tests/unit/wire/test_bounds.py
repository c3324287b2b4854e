"""Every value on the wire has bounds, and an honest peer stays within them."""

import math
from collections.abc import Iterator

import pytest
from msgspec import inspect

from wire.codec import WireError, decode, encode
from wire.frames import TAGS, Finished, Frame, Report
from wire.histogram import NodeMeasures
from wire.report import EngineState, Memory

FREE = {("Fragment", "payload")}
"""Fields that are bounded by the length of their frame on the wire (`codec.MAX_FRAME_BYTES`)."""


def _unbounded(kind: inspect.Type, where: tuple[str, str], seen: set[type]) -> Iterator[tuple[str, str]]:
    match kind:
        case inspect.IntType() | inspect.FloatType():
            if kind.ge is None or kind.le is None:
                yield where
        case inspect.StrType() | inspect.BytesType():
            if kind.max_length is None:
                yield where
        case inspect.VarTupleType():
            if kind.max_length is None:
                yield where
            yield from _unbounded(kind.item_type, where, seen)
        case inspect.TupleType():
            for item in kind.item_types:
                yield from _unbounded(item, where, seen)
        case inspect.UnionType():
            for one in kind.types:
                yield from _unbounded(one, where, seen)
        case inspect.StructType():
            if kind.cls not in seen:
                seen.add(kind.cls)
                for field in kind.fields:
                    yield from _unbounded(field.type, (kind.cls.__name__, field.name), seen)
        case inspect.BoolType() | inspect.NoneType() | inspect.EnumType():
            pass
        case _:
            yield where


@pytest.mark.parametrize("kind", [*TAGS.values(), NodeMeasures], ids=lambda kind: kind.__name__)
def test_every_field_of_every_frame_has_bounds(kind: type) -> None:
    assert set(_unbounded(inspect.type_info(kind), ("", ""), set())) <= FREE


@pytest.mark.parametrize(
    "frame",
    [
        Finished(1, ("stop",), 2**63, 1),
        Finished(1, ("stop",), 1, -1),
        Finished(1, ("stop",), 1, 2**31),
        Report(1, Memory(phys=2**50 + 1), EngineState()),
        Report(1, Memory(age=math.inf), EngineState()),
        Report(1, Memory(age=math.nan), EngineState()),
    ],
)
def test_a_value_out_of_its_bounds_is_a_wire_error(frame: Frame) -> None:
    encoded = encode(frame)
    with pytest.raises(WireError, match=f"bad {type(frame).__name__}"):
        decode(encoded[4], encoded[5:])


def test_a_report_that_is_too_long_is_refused_before_it_is_decoded() -> None:
    tag = next(tag for tag, kind in TAGS.items() if kind is Report)
    with pytest.raises(WireError, match="Report of 300000 bytes, the limit is 262144"):
        decode(tag, bytes(300_000))
