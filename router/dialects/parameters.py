"""What a dialect does with every field of its body, in one table; and the reading of a body by that table.

A field is honoured (it stands in the pydantic model), ignored (it changes nothing here, and the table says why), or
refused by name, unless it has a value that asks for nothing. Any other field is unknown, which is a 400 too.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from pydantic import ValidationError

from router.dialects.fields import Strict
from router.dialects.limits import MAX_VALUES
from router.dialects.strict_json import Body, read_object
from router.dialects.validation import from_validation, unsupported
from router.problems import Problem

B = TypeVar("B", bound=Strict)


class Row(NamedTuple):
    """One line of the manual's table: the field, `honoured`, `ignored` or `refused`, and what there is to say."""

    name: str
    verdict: str
    note: str


@dataclass(frozen=True, slots=True)
class Parameters(Generic[B]):
    """See the module. `neutral` are the values of a refused field that ask for nothing, `instead` what to do."""

    body: type[B]
    ignored: Mapping[str, str]
    neutral: Mapping[str, tuple[object, ...]]
    instead: Mapping[str, str]
    max_values: int = MAX_VALUES

    @property
    def known(self) -> frozenset[str]:
        """Every field that is not unknown."""
        return frozenset(self.body.model_fields) | self.ignored.keys() | self.neutral.keys()

    def read(self, raw: bytes) -> tuple[B, Body] | Problem:
        """Read a body (UTF-8 JSON): as it was understood, and as it was written; or the 400 that says why not."""
        found = read_object(raw, self.max_values)
        return found if isinstance(found, Problem) else self.understand(found)

    def understand(self, found: Body) -> tuple[B, Body] | Problem:
        """Read a body, or a part of one that has a table of its own, that was read as JSON already."""
        asked = self._strip(found)
        if isinstance(asked, Problem):
            return asked
        try:
            return self.body.model_validate(asked), asked
        except ValidationError as error:
            return from_validation(error, self.known, self.instead)

    def rows(self) -> Iterator[Row]:
        """Give the table, by name."""
        for name in sorted(self.known):
            if name in self.ignored:
                yield Row(name, "ignored", self.ignored[name])
            elif name in self.neutral:
                yield Row(name, "refused", self.instead.get(name, "not offered by the models of a cluster"))
            else:
                yield Row(name, "honoured", self.instead.get(name, ""))

    def _strip(self, found: Body) -> Body | Problem:
        """Take out what changes nothing; refuse what is not offered."""
        asked: Body = {}
        for name, value in found.items():
            if name in self.neutral:
                if not _neutral(value, self.neutral[name]):
                    return unsupported(name, self.instead)
            elif name not in self.ignored:
                asked[name] = value
        return asked


def _neutral(value: object, allowed: tuple[object, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in allowed)
