"""Names and types of the fields of all structures of the protocol, in their order. `python -m
tests.unit.wire.field_order` writes them to `field_order.json`.

Peers read fields by position. Bytes alone do not show that two fields of one type were exchanged.
"""

import json
import sys
from pathlib import Path

from msgspec import inspect

from wire.frames import TAGS
from wire.histogram import NodeMeasures

FILE = Path(__file__).with_suffix(".json")


def list_fields() -> dict[str, list[str]]:
    """Return name and type of each field of all frames, of `NodeMeasures`, and of structures in them, by structure."""
    found: dict[str, list[str]] = {}
    for kind in (*TAGS.values(), NodeMeasures):
        _collect(inspect.type_info(kind), found)
    return dict(sorted(found.items()))


def _collect(part: inspect.Type, found: dict[str, list[str]]) -> None:
    if isinstance(part, inspect.StructType) and part.cls.__name__ not in found:
        found[part.cls.__name__] = [f"{field.name}: {_describe(field.type)}" for field in part.fields]
        for field in part.fields:
            _collect(field.type, found)
    for inner in _list_inner(part):
        _collect(inner, found)


def _list_inner(part: inspect.Type) -> tuple[inspect.Type, ...]:
    if isinstance(part, inspect.UnionType):
        return part.types
    if isinstance(part, inspect.TupleType):
        return part.item_types
    return (part.item_type,) if isinstance(part, inspect.VarTupleType) else ()


def _describe(part: inspect.Type) -> str:
    if isinstance(part, inspect.StructType):
        return part.cls.__name__
    inner = ", ".join(_describe(one) for one in _list_inner(part))
    name = type(part).__name__.removesuffix("Type")
    return f"{name}[{inner}]" if inner else name


def main() -> int:
    """Write the fields of today. Return the exit code 0."""
    FILE.write_text(json.dumps(list_fields(), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
