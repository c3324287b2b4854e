"""Streaming parser of multipart forms, which keeps text fields and stops with a 400 problem at a file.

OpenAI's library sends every video request as such a form. A reference image would be a part with a file name. Limits
apply while bytes arrive: number of parts, their headers, and all texts together.
"""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from router.dialects.openai.video_schema import INSTEAD
from router.dialects.shared.validation import build_unsupported
from router.errors import Problem, build_body_too_long, build_invalid
from router.http.exchange import Exchange

MAX_PARTS = 32
"""Maximum parts of a form. A form with more is refused with 400."""
MAX_TEXT_BYTES = 64 * 1024
"""Maximum bytes of all fields together, names included. A form with more is refused as too long."""
MAX_HEADERS = 8
"""Maximum headers of a part. A form with more is refused with 400."""
MAX_HEADER_BYTES = 1024
"""Maximum bytes of a header of a part. A form with a longer header is refused with 400."""


class _StopParsing(Exception):
    """Raised to stop reading a form because of `problem`."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass(slots=True)
class _Form:
    """State of the parser."""

    fields: dict[str, str] = field(default_factory=dict[str, str])
    size: int = 0
    parts: int = 0
    ended: bool = False
    name: str = ""
    text: bytearray = field(default_factory=bytearray)
    header: bytearray = field(default_factory=bytearray)
    value: bytearray = field(default_factory=bytearray)
    disposition: bytes = b""

    def get_callbacks(self) -> Any:
        return {
            "on_part_begin": self._begin_part,
            "on_header_begin": self._begin_header,
            "on_header_field": self._add_header_name,
            "on_header_value": self._add_header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._add_data,
            "on_part_end": self._end_part,
            "on_end": self._end_form,
        }

    def _begin_part(self) -> None:
        self.parts += 1
        self.text.clear()
        self.disposition = b""
        if self.parts > MAX_PARTS:
            raise _StopParsing(build_invalid(f"a form here may have {MAX_PARTS} fields"))

    def _begin_header(self) -> None:
        self.header.clear()
        self.value.clear()

    def _add_header_name(self, data: bytes, start: int, end: int) -> None:
        self.header += data[start:end]

    def _add_header_value(self, data: bytes, start: int, end: int) -> None:
        self.value += data[start:end]

    def _end_header(self) -> None:
        if bytes(self.header).lower() == b"content-disposition":
            self.disposition = bytes(self.value)

    def _end_headers(self) -> None:
        kind, options = parse_options_header(self.disposition)
        name = options.get(b"name", b"")
        if kind != b"form-data" or not name:
            raise _StopParsing(build_invalid("a part of the form has no name"))
        try:
            self.name = name.decode()
        except UnicodeDecodeError:
            raise _StopParsing(build_invalid("the name of a field is not UTF-8")) from None
        if b"filename" in options:
            known = self.name in INSTEAD
            raise _StopParsing(
                build_unsupported(self.name, INSTEAD)
                if known
                else build_invalid("files are not read here", self.name[:64])
            )
        if self.name in self.fields:
            raise _StopParsing(build_invalid(f"the field {self.name[:64]!r} appears twice", self.name[:64]))
        self._count_bytes(len(name))

    def _add_data(self, data: bytes, start: int, end: int) -> None:
        self._count_bytes(end - start)
        self.text += data[start:end]

    def _end_part(self) -> None:
        try:
            self.fields[self.name] = bytes(self.text).decode()
        except UnicodeDecodeError:
            raise _StopParsing(build_invalid(f"the field {self.name[:64]!r} is not UTF-8", self.name[:64])) from None

    def _end_form(self) -> None:
        self.ended = True

    def _count_bytes(self, size: int) -> None:
        self.size += size
        if self.size > MAX_TEXT_BYTES:
            raise _StopParsing(build_body_too_long(MAX_TEXT_BYTES))


async def read_form(
    exchange: Exchange, boundary: bytes, max_bytes: int, timeout_seconds: float
) -> dict[str, str] | Problem | None:
    """Read a form of at most `max_bytes` bytes within `timeout_seconds`, and return its fields by name.

    Return a problem if the form is invalid, too large or late. Return None if the client has disconnected.
    """
    declared = exchange.get_header(b"content-length") or b"0"
    if not declared.isdigit() or len(declared) > 18 or int(declared) > max_bytes:
        return build_body_too_long(max_bytes)
    form = _Form()
    try:
        parser = MultipartParser(
            boundary, form.get_callbacks(), max_header_count=MAX_HEADERS, max_header_size=MAX_HEADER_BYTES
        )
        async with asyncio.timeout(timeout_seconds):
            return await _feed_parser(exchange, parser, form, max_bytes)
    except TimeoutError:
        return Problem(408, "request_timeout", f"the body did not arrive within {timeout_seconds:.0f} s")
    except _StopParsing as enough:
        return enough.problem
    except FormParserError as error:
        return build_invalid(f"the form cannot be read: {str(error)[:200]}")


async def _feed_parser(
    exchange: Exchange, parser: MultipartParser, form: _Form, limit: int
) -> dict[str, str] | Problem | None:
    read = 0
    while True:
        part = await exchange.receive()
        if part["type"] != "http.request":
            return None
        piece: bytes = part.get("body", b"")
        read += len(piece)
        if read > limit:
            return build_body_too_long(limit)
        parser.write(piece)
        if not part.get("more_body", False):
            parser.finalize()
            return form.fields if form.ended else build_invalid("the form has no end: its last boundary is missing")


def get_boundary(content_type: bytes) -> bytes | None:
    """Return the boundary in a content type; None if it is not that of a multipart form with a boundary."""
    kind, options = parse_options_header(content_type)
    return options.get(b"boundary") if kind == b"multipart/form-data" else None
