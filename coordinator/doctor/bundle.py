"""Archive for a bug report: useful facts without secrets and without prompts or answers.

A log can quote anything, hence hiding text that resembles a secret is not enough: a prompt has no recognizable form.
The archive is therefore built from allowed content. From a log event it takes time, level, logger, the event's name if
this project logs it, numbers, booleans, and a few named texts. All other texts are replaced by `OMITTED`. From an
exception it takes the stack locations and the type, never the message. Lines that are no event of this project are
omitted and counted. The result also passes the secret filter of the logs.

Invariants: no file of the state folder is copied unchanged. No file with a secret is read (identity, authority, pepper,
run.json, database). The archive has mode 0600.
"""

import io
import json
import re
import tarfile
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from host.private_files import write_private
from host.redaction import HIDDEN, hide_secrets, redact_fields

MAX_LOG_BYTES = 512 * 1024
"""Maximum bytes that are read from the end of each log."""
MAX_LINES = 2000
"""Maximum events of each log in the archive."""
OMITTED = "[omitted]"
"""Replacement of a text that is not allowed."""
OWN_PACKAGES = ("coordinator", "node", "router", "host", "simulation", "wire")
"""Packages whose events the archive may name."""
KEPT_FIELDS = frozenset(
    {
        "timestamp",
        "level",
        "logger",
        "reason",
        "state",
        "node",
        "request",
        "code",
        "kind",
        "what",
        "bound_by",
        "phase",
        "version",
        "outcome",
        "tier",
        "guard",
        "device",
        "signal",
        "condition",
        "severity",
    }
)
"""Text fields of an event that are kept if their value has at most 64 characters: letters, digits or `.:+-_`.

Of all other fields, only numbers, booleans and null are kept.
"""
_WORD = re.compile(r"[\w.:+-]{1,64}")
_NAMED = re.compile(r"""\blog\.(?:debug|info|warning|error|exception|critical)\(\s*"([^"\\{]{1,60})\"""")
_FRAME = re.compile(r"[\w.<>-]+\.py:\d+ [\w.<>]+")
_KIND = re.compile(r"[A-Za-z_][\w.]{0,60}(?: from [A-Za-z_]\w{0,60})?")
_CONSOLE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) \[(\w+)\s*\] ([a-z][a-z0-9' -]{1,48}?)\s*(?:\w+=.*)?$")
README = """Contents of this archive: findings.json (findings of `cluster doctor`), versions.json, settings.json (with
origins), conditions.json and nodes.json (from the coordinator, if it answered), and logs/ (events with numbers; texts
by people or models are omitted). The archive contains no API key, no token, no private key, no prompt and no answer.
Review it before you send it: it contains names of machines and models.
"""
"""Text of the file README.txt in the archive."""


@cache
def find_own_events() -> frozenset[str]:
    """Return the names of all log events of this project, read from its source code."""
    events: set[str] = set()
    for name in OWN_PACKAGES:
        package = find_spec(name)
        for folder in package.submodule_search_locations or () if package else ():
            for file in Path(folder).rglob("*.py"):
                events |= set(_NAMED.findall(file.read_text(errors="replace")))
    return frozenset(events)


def parse_event(line: str) -> dict[str, Any] | None:
    """Return the fields of one log line in JSON, with `OMITTED` in place of texts that are not allowed.

    Return None if the line is not a JSON object.
    """
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    fields = cast("dict[str, Any]", record)
    own = str(fields.get("logger", "")).split(".")[0] in OWN_PACKAGES
    allowed: dict[str, Any] = {}
    for name, value in fields.items():
        if not _WORD.fullmatch(name):
            continue
        if name == "event":
            allowed[name] = value if own and isinstance(value, str) and value in find_own_events() else OMITTED
        elif name == "exception":
            allowed[name] = _filter_exception(str(value))
        else:
            allowed[name] = _filter_value(name, value)
    return dict(redact_fields(allowed))


def _filter_value(name: str, value: object) -> object:
    if value is None or isinstance(value, bool | int | float):
        return value
    return value if name in KEPT_FIELDS and isinstance(value, str) and _WORD.fullmatch(value) else OMITTED


def _filter_exception(exception: str) -> str:
    """Return an exception's type and the functions of its traceback."""
    first, *rest = exception.splitlines() or [""]
    kind = first.partition(":")[0]
    frames = [line for line in rest if _FRAME.fullmatch(line)]
    return "\n".join([kind if _KIND.fullmatch(kind) else OMITTED, *frames])


def render_log(lines: Iterable[str]) -> str:
    """Return the newest `MAX_LINES` events of a log, one JSON object with allowed fields per line.

    The last line has the number of omitted lines.
    """
    events: list[str] = []
    left_out = 0
    for line in lines:
        event = parse_event(line) or _parse_console_event(line)
        if event is None:
            left_out += 1
        else:
            events.append(json.dumps(event))
    return (
        "\n".join([*events[-MAX_LINES:], json.dumps({"lines_left_out": left_out + max(0, len(events) - MAX_LINES)})])
        + "\n"
    )


def _parse_console_event(line: str) -> dict[str, Any] | None:
    """Return time, level and name of an event of this project in console format, as the engine writes it; else None."""
    match = _CONSOLE.fullmatch(line)
    return (
        None
        if match is None or match[3] not in find_own_events()
        else {"timestamp": match[1], "level": match[2], "event": match[3]}
    )


def read_newest_lines(file: Path) -> list[str]:
    """Return the complete lines in the last `MAX_LOG_BYTES` bytes of a log; empty if the file cannot be read."""
    try:
        with file.open("rb") as opened:
            size = opened.seek(0, 2)
            opened.seek(max(0, size - MAX_LOG_BYTES))
            lines = opened.read(MAX_LOG_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
    return lines[1:] if size > MAX_LOG_BYTES else lines


def redact_value(value: object, home: str) -> Any:
    """Return a JSON value with possible secrets redacted at any depth, and with `~` for the home folder `home`."""
    if isinstance(value, str):
        return hide_secrets(value.replace(home, "~") if len(home) > 1 else value)
    if isinstance(value, Mapping):
        inner = {str(name): item for name, item in cast("Mapping[object, object]", value).items()}
        return redact_fields({name: redact_value(item, home) for name, item in inner.items()})
    if isinstance(value, list | tuple):
        return [redact_value(item, home) for item in cast("list[object]", value)]
    return value


def redact_settings(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return value and origin of each setting, by key. A text that is not a word, number or path becomes `HIDDEN`.

    Texts in lists, and names and texts in tables, are redacted likewise.
    """
    return {row["key"]: {"value": _redact_setting(row["value"]), "origin": row["origin"]} for row in rows}


def _redact_setting(value: object) -> object:
    if isinstance(value, str):
        return value if value == "" or re.fullmatch(r"[\w.%~/:…+-]{1,200}", value) else HIDDEN
    if isinstance(value, Mapping):
        table = cast("Mapping[str, object]", value)
        return {_redact_setting(name): _redact_setting(entry) for name, entry in table.items()}
    return [_redact_setting(item) for item in cast("list[object]", value)] if isinstance(value, list | tuple) else value


def write_bundle(file: Path, contents: Mapping[str, object], logs: Iterable[Path], home: Path) -> list[str]:
    """Write the archive (tar.gz, mode 0600) and return the names of its files.

    `contents` has JSON values by file name. `logs` are the files from which events are taken; a missing or empty file
    is omitted. `home` is the home folder, which is redacted. Raise `OSError` if the archive cannot be written.
    """
    parts = {"README.txt": README}
    parts |= {
        name: json.dumps(redact_value(value, str(home)), indent=1, default=str) + "\n"
        for name, value in contents.items()
    }
    parts |= {f"logs/{log.name}": hide_secrets(render_log(lines)) for log in logs if (lines := read_newest_lines(log))}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in parts.items():
            entry = tarfile.TarInfo(f"macpool-doctor/{name}")
            content = text.encode()
            entry.size, entry.mode = len(content), 0o600
            archive.addfile(entry, io.BytesIO(content))
    write_private(file, packed.getvalue())
    return list(parts)
