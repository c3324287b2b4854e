"""Table of the fields of a body, and the parser that applies it.

A field is honoured, ignored or refused. An honoured field is in the pydantic model. An ignored field has no effect
here, for the reason that the table has. A refused field is accepted only with a neutral value. A field in no table is
ignored, or gives a 400 problem with `router.unknown_fields = "refuse"`. The answer names the ignored fields
(docs/decisions/0029).

A name that is nearly the name of a field in the table is a typing error. It is refused, because the intended field
would have changed the answer.
"""

import difflib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar, cast

from pydantic import BaseModel, ValidationError

from router.admission.request_limits import MAX_IGNORED, MAX_NAME_CHARS, MAX_VALUES
from router.dialects.shared.common_fields import ForeignPart, StrictPart
from router.dialects.shared.strict_json import PROMPT_FIELDS, Body, read_object
from router.dialects.shared.validation import build_unsupported, from_validation, has_only_unknown_fields
from router.errors import Problem

B = TypeVar("B", bound=StrictPart)
MIN_TYPO_SIMILARITY = 0.87
"""Minimum similarity (`difflib`) of an unknown name to a field for a typing error.

`temprature` has 0.95, and `max_new_tokens` has 0.83.
"""
_NAME = re.compile(r"[A-Za-z0-9_.\[\]=-]{1,80}")


class FieldRow(NamedTuple):
    """Row of the manual's table of fields."""

    name: str
    """Name of the field."""
    verdict: str
    """`honoured`, `ignored` or `refused`."""
    note: str
    """Explanation of the verdict; may be empty for an honoured field."""


class ParsedBody(NamedTuple, Generic[B]):
    """Result of `FieldTable.read`: a valid body."""

    body: B
    """Body as the pydantic model."""
    fields: Body
    """Decoded body with only its honoured and unknown fields."""
    ignored: tuple[str, ...]
    """Names of the fields without an effect, which are unknown or are in the table's `ignored`.

    A field of the table is not named if its value is null, false, 0 or empty.
    """


@dataclass(frozen=True, slots=True)
class FieldTable(Generic[B]):
    """Table of the fields of one body, with the parser of that body."""

    body: type[B]
    """Pydantic model of the honoured fields."""
    ignored: Mapping[str, str]
    """Ignored fields, each with the reason."""
    neutral: Mapping[str, tuple[object, ...]]
    """Refused fields, each with its accepted neutral values."""
    instead: Mapping[str, str]
    """Alternatives to refused fields, and notes on honoured fields."""
    max_values: int = MAX_VALUES
    """Maximum number of values in one body, counted by its commas and opening brackets."""

    @property
    def known(self) -> frozenset[str]:
        """Names of all fields in the table."""
        return frozenset(self.body.model_fields) | self.ignored.keys() | self.neutral.keys()

    def read(self, raw: bytes, *, strict: bool = False) -> ParsedBody[B] | Problem:
        """Parse a body (JSON in UTF-8), or return a 400 problem with the reason.

        `strict` refuses every unknown field. Otherwise unknown fields are ignored, with exceptions. Typing errors,
        overlong names and more than `MAX_IGNORED` names are refused. Fields of the prompt, of the answer's format and
        of unsupported features such as audio are refused as well.
        """
        raw_fields = read_object(raw, self.max_values, PROMPT_FIELDS)
        return raw_fields if isinstance(raw_fields, Problem) else self.parse(raw_fields, strict=strict)

    def parse(self, raw_fields: Body, *, strict: bool = False) -> ParsedBody[B] | Problem:
        """Validate the decoded JSON of a body, or of a part with its own table. Return a 400 problem if it is invalid.

        Unknown fields are ignored or refused by the rules of `read`, which has `strict` as well.
        """
        fields = self._strip(raw_fields)
        if isinstance(fields, Problem):
            return fields
        ignored = [name for name in raw_fields if name in self.ignored and raw_fields[name]]
        try:
            return ParsedBody(self.body.model_validate(fields), fields, tuple(ignored))
        except ValidationError as error:
            if strict or not has_only_unknown_fields(error) or _has_mistakes(fields, self.known):
                return from_validation(error, self.known, self.instead)
        try:
            body = self.body.model_validate(fields, extra="allow")
        except ValidationError as error:
            return from_validation(error, self.known, self.instead)
        return ParsedBody(body, fields, tuple(dict.fromkeys([*ignored, *_find_unknown_fields(body)])))

    def list_rows(self) -> Iterator[FieldRow]:
        """Yield the rows of the manual's table, in the order of their names."""
        for name in sorted(self.known):
            if name in self.ignored:
                yield FieldRow(name, "ignored", self.ignored[name])
            elif name in self.neutral:
                yield FieldRow(name, "refused", self.instead.get(name, "not supported"))
            else:
                yield FieldRow(name, "honoured", self.instead.get(name, ""))

    def _strip(self, raw_fields: Body) -> Body | Problem:
        """Return a body without ignored and neutral fields, and without unknown fields that are null.

        Return a 400 problem for a refused field whose value is not neutral.
        """
        fields: Body = {}
        for name, value in raw_fields.items():
            if name in self.neutral:
                if not _is_neutral(value, self.neutral[name]):
                    return build_unsupported(name, self.instead)
            elif name not in self.ignored and (value is not None or name in self.known):
                fields[name] = value  # an unknown field that is null is no field
        return fields


def sanitize_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return names for a header, without duplicates. At most `MAX_IGNORED` of them are returned.

    A name with unusual characters becomes `(unprintable)`. If names are omitted, an additional last text says how many.
    """
    distinct = dict.fromkeys(name if _NAME.fullmatch(name) else "(unprintable)" for name in names)
    texts = tuple(distinct)
    return texts if len(texts) <= MAX_IGNORED else (*texts[:MAX_IGNORED], f"and-{len(texts) - MAX_IGNORED}-more")


def _is_neutral(value: object, allowed: tuple[object, ...]) -> bool:
    return any(type(value) is type(candidate) and value == candidate for candidate in allowed)


def _has_mistakes(fields: Body, known: Collection[str]) -> bool:
    """Return whether a body has more than `MAX_IGNORED` unknown fields, or one with an overlong or mistyped name."""
    strange = [name for name in fields if name not in known]
    if len(strange) > MAX_IGNORED or any(len(name) > MAX_NAME_CHARS for name in strange):
        return True
    return any(difflib.get_close_matches(name, known, 1, MIN_TYPO_SIMILARITY) for name in strange)


def _find_unknown_fields(part: BaseModel, path: str = "") -> Iterator[str]:
    """Yield the names of the unknown fields of a part and of the parts in it. Names have no list positions."""
    for name in part.model_extra or ():
        yield path + name
    for name in part.model_fields_set.intersection(type(part).model_fields):
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            yield from _find_unknown_fields(value, f"{path}{name}.")
        elif isinstance(value, list):
            for item in cast("list[Any]", value):
                if isinstance(item, BaseModel) and not isinstance(item, ForeignPart):
                    yield from _find_unknown_fields(item, f"{path}{name}[].")
