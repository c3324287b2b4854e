"""Faults of a settings file with their lines, and settings without secrets for output. No I/O.

The TOML parser returns values without lines. This module finds the lines with a second scan of tables and keys. A key
in an inline table has the line of its table.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from host.settings_loader import InvalidSetting

_TABLE = re.compile(r"\s*\[\s*([^\[\]]+?)\s*\]\s*(?:#.*)?$")
_KEY = re.compile(r"\s*((?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*')(?:\s*\.\s*(?:[A-Za-z0-9_-]+|\"[^\"]*\"|'[^']*'))*)\s*=")
_SYNTAX = re.compile(r"\(at line (\d+), column (\d+)\)")
HIDDEN = "(set, not shown)"
"""Replacement of a value that is not shown."""
URL_SETTINGS = frozenset({"alerts.webhook_url"})
"""Settings with a URL that may contain a secret. Only scheme and host are shown."""


@dataclass(frozen=True, slots=True)
class ConfigFault:
    """One fault in the settings of a file or of another source."""

    origin: str
    """Path of the file, or name of the other source."""
    line: int
    """Line number, from 1; 0 if unknown."""
    key: str
    """Dotted name of the setting; empty for a fault of TOML syntax."""
    text: str
    """Description of the fault, without the name of the setting."""
    near: str = ""
    """Known setting with a similar name, as a hint; empty if there is none."""
    meaning: str = ""
    """Description of the setting; empty if unknown."""

    def render(self) -> str:
        """Render the fault as one line of text."""
        where = f"{self.origin}:{self.line}" if self.line else self.origin
        hint = f"; did you mean {self.near}?" if self.near else ""
        expected = f"; it means: {self.meaning}" if self.meaning else ""
        return f"{where}: {self.key}: {self.text}{hint}{expected}" if self.key else f"{where}: {self.text}"


def find_line_numbers(text: str) -> dict[str, int]:
    """Return the line number, from 1, of each table and key in a TOML text, by dotted name."""
    numbers: dict[str, int] = {}
    table, closing = "", ""
    for number, line in enumerate(text.splitlines(), 1):
        if closing:  # a multi-line string contains no keys
            closing = "" if closing in line else closing
            continue
        heading = _TABLE.match(line)
        if heading:
            table = _normalize_key(heading[1])
            numbers.setdefault(table, number)
            continue
        key = _KEY.match(line)
        if key is None:
            continue
        name = _normalize_key(key[1])
        numbers.setdefault(f"{table}.{name}" if table else name, number)
        rest = line[key.end() :]
        closing = next((quote for quote in ('"""', "'''") if rest.count(quote) == 1), "")
    return numbers


def _normalize_key(name: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in name.split("."))


def find_line_number(key: str, lines: Mapping[str, int]) -> int:
    """Return the line number of a key, or of the nearest table that contains it; 0 if neither is known."""
    parts = key.split(".")
    for count in range(len(parts), 0, -1):
        if (number := lines.get(".".join(parts[:count]))) is not None:
            return number
    return 0


def build_syntax_fault(origin: str, message: str) -> ConfigFault:
    """Convert the message of a `TOMLDecodeError` into a `ConfigFault`. `origin` is the path of the file."""
    match = _SYNTAX.search(message)
    return ConfigFault(origin, int(match[1]) if match else 0, "", f"not valid TOML: {_SYNTAX.sub('', message).strip()}")


def locate_faults(origin: str, faults: Sequence[InvalidSetting], text: str = "") -> list[ConfigFault]:
    """Convert the faults of `origin` into `ConfigFault`s with line numbers, sorted by line and key.

    `text` is the TOML of `origin`. If it is empty, every line number is 0.
    """
    lines = find_line_numbers(text)
    located = [
        ConfigFault(origin, find_line_number(fault.key, lines), fault.key, fault.text, fault.near, fault.meaning)
        for fault in faults
    ]
    return sorted(located, key=lambda fault: (fault.line, fault.key))


def redact_value(key: str, value: object) -> object:
    """Return the value of the setting `key` for output.

    Of a URL that may contain a secret, return only scheme and host. Return `HIDDEN` if the URL is not valid, or has no
    scheme or host.
    """
    if key not in URL_SETTINGS or not value:
        return value
    try:
        parts = urlsplit(str(value))
    except ValueError:  # such as a bracket that is not closed
        return HIDDEN
    return f"{parts.scheme}://{parts.hostname}/…" if parts.scheme and parts.hostname else HIDDEN


def redact_rows(rows: Iterable[Mapping[str, object]]) -> tuple[dict[str, object], ...]:
    """Return rows of `host.settings_loader.build_setting_rows` with `redact_value` applied to each value."""
    return tuple({**row, "value": redact_value(str(row["key"]), row["value"])} for row in rows)
