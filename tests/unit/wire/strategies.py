"""Hypothesis strategies that fill any wire struct from its annotations, within their bounds."""

import types
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

from wire.report import WireStruct

TEXT = st.text(st.characters(codec="utf-8"), max_size=12)


def of(hint: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for the values of an annotation. Raise AssertionError for an annotation without a strategy."""
    if isinstance(hint, type) and issubclass(hint, WireStruct):
        return structs(hint)
    if isinstance(hint, type) and issubclass(hint, (StrEnum, IntEnum)):
        return st.sampled_from(list(hint))
    if get_origin(hint) is Annotated:
        return _within(*get_args(hint))
    plain = {
        bool: st.booleans(),
        str: TEXT,
        bytes: st.binary(max_size=16),
        type(None): st.none(),
    }
    if hint in plain:
        return plain[hint]
    arguments = get_args(hint)
    if get_origin(hint) in (Union, types.UnionType):
        return st.one_of([of(argument) for argument in arguments])
    if get_origin(hint) is tuple and len(arguments) == 2 and arguments[1] is Ellipsis:
        return st.lists(of(arguments[0]), max_size=3).map(tuple)
    if get_origin(hint) is tuple:
        return st.tuples(*[of(argument) for argument in arguments])
    raise AssertionError(f"no strategy for {hint}")


def _within(kind: Any, meta: msgspec.Meta) -> st.SearchStrategy[Any]:
    if kind is int:
        return st.integers(meta.ge, meta.le)  # pyright: ignore[reportArgumentType]
    if kind is float:
        return st.floats(meta.ge, meta.le)
    return of(kind)


def structs(kind: type[WireStruct]) -> st.SearchStrategy[Any]:
    """Return a strategy for the instances of a wire struct. Raise AssertionError if a field has no strategy."""
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{field.name: of(hints[field.name]) for field in msgspec.structs.fields(kind)})
