"""A settings file as a person wrote it: what it sets, what is wrong in it, and on which line. Pure.

The parser that reads settings gives values without lines, so the lines are found again by a reading of tables and keys
alone. Where that is not sure (a key in an inline table), the line of what holds it is told.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from host.settings_loader import Fault

_TABLE = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")
_KEY = re.compile(r"\s*((?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*'))*)\s*=")
_SYNTAX = re.compile(r"\(at line (\d+), column (\d+)\)")
HIDDEN = "(set, not shown)"
ADDRESSES = frozenset({"conditions.webhook"})
"""Settings that hold an address, which may hold a secret: of these only scheme and host are shown."""


@dataclass(frozen=True, slots=True)
class Wrong:
    """One thing that is wrong: where (line 0: not known), which key, what, the nearest key, what is meant there."""

    origin: str
    line: int
    key: str
    text: str
    near: str = ""
    meaning: str = ""

    def told(self) -> str:
        """Give it as one line for a person."""
        where = f"{self.origin}:{self.line}" if self.line else self.origin
        hint = f"; did you mean {self.near}?" if self.near else ""
        expected = f"; it means: {self.meaning}" if self.meaning else ""
        return f"{where}: {self.key}: {self.text}{hint}{expected}" if self.key else f"{where}: {self.text}"


def lines_of(text: str) -> dict[str, int]:
    """Find the line, from 1, on which each table and key of a TOML text stands, by dotted name."""
    found: dict[str, int] = {}
    table, closing = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        if closing:  # within a text of several lines there are no keys
            closing = "" if closing in line else closing
            continue
        heading = _TABLE.match(line)
        if heading:
            table = _plain(heading[1])
            found.setdefault(table, number)
            continue
        key = _KEY.match(line)
        if key is None:
            continue
        name = _plain(key[1])
        found.setdefault(f"{table}.{name}" if table else name, number)
        rest = line[key.end() :]
        closing = next((quote for quote in ('"""', "'''") if rest.count(quote) == 1), "")
    return found


def _plain(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))


def line_of(key: str, lines: Mapping[str, int]) -> int:
    """Give the line of a key, or of the nearest table that holds it; 0 when neither is known."""
    parts = key.split(".")
    for count in range(len(parts), 0, -1):
        if (number := lines.get(".".join(parts[:count]))) is not None:
            return number
    return 0


def syntax(origin: str, message: str) -> Wrong:
    """Put the parser's own complaint into our shape."""
    found = _SYNTAX.search(message)
    return Wrong(origin, int(found[1]) if found else 0, "", f"this is no TOML: {_SYNTAX.sub('', message).strip()}")


def located(origin: str, faults: Sequence[Fault], text: str = "") -> list[Wrong]:
    """Say where faults stand, in the order of the file."""
    lines = lines_of(text)
    found = [Wrong(origin, line_of(one.key, lines), one.key, one.text, one.near, one.meaning) for one in faults]
    return sorted(found, key=lambda one: (one.line, one.key))


def shown(key: str, value: object) -> object:
    """Give a setting's value without what could be a secret in it."""
    if key not in ADDRESSES or not value:
        return value
    parts = urlsplit(str(value))
    return f"{parts.scheme}://{parts.hostname}/…" if parts.scheme and parts.hostname else HIDDEN


def rows_shown(rows: Iterable[Mapping[str, object]]) -> tuple[dict[str, object], ...]:
    """Give settings (rows of `host.settings_loader.explained`) so that they may be shown to anybody who administers."""
    return tuple({**row, "value": shown(str(row["key"]), row["value"])} for row in rows)
