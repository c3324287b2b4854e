"""Forms of video requests: their fields, limits and faults."""

import asyncio

import pytest

from coordinator.video.multipart import MAX_PARTS, MAX_TEXT_BYTES, get_boundary, read_form
from router.errors import Problem, build_body_too_long
from router.http.exchange import Exchange
from router.http.sse import Message


async def send(event: Message) -> None:
    raise AssertionError(f"{event} was sent")


def a_form(fields: dict[str, str]) -> Exchange:
    """Return the request of a form with these fields."""
    parts = (f'--b\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{text}\r\n' for name, text in fields.items())
    body = ("".join(parts) + "--b--\r\n").encode()

    async def receive() -> Message:
        return {"type": "http.request", "body": body}

    return Exchange({"method": "POST", "path": "/v1/videos", "headers": []}, receive, send)


@pytest.mark.parametrize("others", [{}, {"model": "wan"}], ids=["one field", "two fields"])
async def test_names_and_texts_have_one_limit_together(others: dict[str, str]):
    left = MAX_TEXT_BYTES - len("prompt") - sum(len(name + text) for name, text in others.items())
    largest, larger = (others | {"prompt": "x" * size} for size in (left, left + 1))
    assert await read_form(a_form(largest), b"b", 2 * MAX_TEXT_BYTES, 30.0) == largest
    assert await read_form(a_form(larger), b"b", 2 * MAX_TEXT_BYTES, 30.0) == build_body_too_long(MAX_TEXT_BYTES)


NAMED = b'content-disposition: form-data; name="prompt"'


def part(*headers: bytes, text: bytes = b"a fox") -> bytes:
    return b"--b\r\n" + b"".join(header + b"\r\n" for header in headers) + b"\r\n" + text + b"\r\n"


def raw(*pieces: bytes, gone: bool = False, length: str | None = None) -> Exchange:
    """Return a request with these pieces as its body. If `gone`, the client disconnects after them."""
    messages: list[Message] = [
        {"type": "http.request", "body": piece, "more_body": gone or number < len(pieces)}
        for number, piece in enumerate(pieces, 1)
    ]
    messages += [{"type": "http.disconnect"}] if gone else []
    queue = iter(messages)

    async def receive() -> Message:
        return next(queue)

    headers = [] if length is None else [(b"content-length", length.encode())]
    return Exchange({"method": "POST", "path": "/v1/videos", "headers": headers}, receive, send)


async def read(exchange: Exchange, limit: int = 2 * MAX_TEXT_BYTES) -> dict[str, str] | str | None:
    """Return the fields of a form, or status and message of the problem."""
    found = await read_form(exchange, b"b", limit, 30.0)
    return f"{found.status} {found.message}" if isinstance(found, Problem) else found


@pytest.mark.parametrize(
    ("body", "found"),
    [
        (part(NAMED) + b"--b--\r\n", {"prompt": "a fox"}),
        (part(NAMED, b"content-type: text/plain") + b"--b--\r\n", {"prompt": "a fox"}),
        (part(b"content-type: form-data; name=x", NAMED.upper().replace(b"PROMPT", b"prompt")) + b"--b--\r\n", None),
        (part(b"x-more: 1", NAMED, text="ü".encode()) + b"--b--\r\n", {"prompt": "ü"}),
        (part(NAMED) + part(b"content-disposition: form-data; name=model", text=b"") + b"--b--\r\n", None),
        (part(b"content-type: text/plain") + b"--b--\r\n", "400 a part of the form has no name"),
        (part(NAMED) + part(b"content-type: text/plain") + b"--b--\r\n", "400 a part of the form has no name"),
        (part(b"content-disposition: form-data") + b"--b--\r\n", "400 a part of the form has no name"),
        (part(b"content-disposition: attachment; name=x") + b"--b--\r\n", "400 a part of the form has no name"),
        (part(NAMED + b"; filename=x") + b"--b--\r\n", "400 files are not read here"),
        (part(NAMED) * 2 + b"--b--\r\n", "400 the field 'prompt' appears twice"),
        (part(NAMED, text=b"\xff") + b"--b--\r\n", "400 the field 'prompt' is not UTF-8"),
        (part(NAMED), "400 the form has no end: its last boundary is missing"),
    ],
)
async def test_the_fields_of_a_form_are_read_or_their_fault_is_named(body: bytes, found: object):
    result = await read(raw(body))
    assert result == found if found is not None else isinstance(result, dict) and result["prompt"] == "a fox"
    for cut in range(0, len(body), 7):
        assert await read(raw(body[:cut], body[cut:])) == result, "the pieces of a body change nothing"


@pytest.mark.parametrize("count", [MAX_PARTS, MAX_PARTS + 1])
async def test_a_form_has_a_maximum_of_fields(count: int):
    result = await read(a_form({f"field{number}": "x" for number in range(count)}))
    if count == MAX_PARTS:
        assert isinstance(result, dict)
        assert len(result) == count
    else:
        assert result == f"400 a form here may have {MAX_PARTS} fields"


@pytest.mark.parametrize(("length", "fits"), [("100", True), ("101", False), ("-1", False), ("1" * 19, False)])
async def test_a_body_has_its_limit_before_and_while_it_arrives(length: str, fits: bool):
    body = part(NAMED) + b"--b--\r\n"
    result = await read(raw(body, length=length), 100)
    assert isinstance(result, dict) is fits
    assert isinstance(await read(raw(body), len(body)), dict)
    assert str(await read(raw(body[:40], body[40:]), len(body) - 1)).startswith("413 ")


async def test_a_client_that_leaves_gets_no_answer_and_a_slow_one_a_408():
    assert await read(raw(part(NAMED), gone=True)) is None

    async def wait() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    slow = Exchange({"method": "POST", "path": "/v1/videos", "headers": []}, wait, send)
    problem = await read_form(slow, b"b", 100, 0.001)
    assert isinstance(problem, Problem)
    assert problem.status == 408


@pytest.mark.parametrize(
    ("kind", "boundary"),
    [
        (b"multipart/form-data; boundary=abc", b"abc"),
        (b"multipart/form-data", None),
        (b"multipart/mixed; boundary=abc", None),
        (b"application/json", None),
    ],
)
def test_only_forms_have_a_boundary(kind: bytes, boundary: bytes | None):
    assert get_boundary(kind) == boundary
