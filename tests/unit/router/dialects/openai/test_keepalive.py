"""Keep-alives of every dialect: no client reads one as an answer, and server-sent ones state the reason of the wait."""

import json

import pytest

from router.dialects.anthropic.response import MessageChunks
from router.dialects.ollama.response import AnswerShape, OllamaChunks
from router.dialects.openai.chat_response import ChatChunks
from router.dialects.openai.completion_response import CompletionChunks
from router.dialects.shared.interface import Chunks
from tests.unit.router.dialects.openai.test_chat_response import a_job

WHY = "waiting for a model swap on studio (one -> two)"
SERVER_SENT: dict[str, Chunks] = {
    "chat": ChatChunks(a_job()),
    "completions": CompletionChunks(a_job(), [""]),
    "messages": MessageChunks(a_job(), 0, False),
}


@pytest.mark.parametrize("chunks", SERVER_SENT.values(), ids=SERVER_SENT)
def test_sse_keepalive_comment_names_the_wait(chunks: Chunks):
    assert chunks.encode_keepalive(WHY).startswith(f": {WHY}\n\n".encode())
    assert WHY.encode() not in chunks.encode_keepalive("")
    for why in ("", WHY):
        shown = [line for line in chunks.encode_keepalive(why).splitlines() if line and not line.startswith(b":")]
        assert shown in ([], [b"event: ping", b'data: {"type":"ping"}'])


def test_ndjson_keepalive_has_no_comment():
    line = OllamaChunks(AnswerShape(a_job(), chat=True)).encode_keepalive(WHY)
    assert json.loads(line)["message"]["content"] == ""
    assert WHY.encode() not in line
