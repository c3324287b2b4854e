"""Forms of video requests: the bytes of all fields together."""

import pytest

from coordinator.video.multipart import MAX_TEXT_BYTES, read_form
from router.errors import build_body_too_long
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
