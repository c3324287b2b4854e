"""The connection to the transport: manual steps, pending events, and abandoned streams."""

import asyncio
from typing import Any

import pytest

from router.dialects.openai.chat_response import ChatChunks
from router.dispatch.answer import MAX_DELTAS_TAKEN, StreamedAnswer
from router.dispatch.request import SLOW, RequestFailure, RequestSpec
from router.errors import Problem
from router.http.coroutine_driver import CoroutineDriver
from router.http.sse import EventStream, Message, StreamPump
from router.placement.candidate import ResourceDemand
from tests.support.cluster.manual_pool import turn
from wire.frames import Delta, Finished, GenerationParams

FINISHED = Finished(1, ("stop",), 1, 1)


class Transport:
    """An ASGI `send` that can block."""

    def __init__(self) -> None:
        self.free = asyncio.Event()
        self.free.set()
        self.bodies: list[bytes] = []
        self.ended = False
        self.broken = False

    async def send(self, message: Message) -> None:
        if self.broken:
            raise OSError("gone")
        await self.free.wait()
        if message["type"] == "http.response.body":
            self.bodies.append(message["body"])
            self.ended = not message["more_body"]


JOB = RequestSpec(ResourceDemand("m"), "k", "r", (), GenerationParams(), 0, stream=True)


def pumped(transport: Transport, chunks: ChatChunks | None = None) -> tuple[StreamedAnswer, EventStream]:
    ticket, stream = StreamedAnswer(), EventStream(transport.send)
    ticket.mark_opened()
    StreamPump(ticket, chunks or ChatChunks(JOB), stream)
    return ticket, stream


def say(ticket: StreamedAnswer, text: str) -> None:
    ticket.add(Delta(1, 0, (), ((0, text),)))
    ticket.flush()


async def test_events_leave_in_the_call_that_brings_them():
    transport = Transport()
    ticket, stream = pumped(transport)
    say(ticket, "one")
    assert len(transport.bodies) == 1
    assert b'"role":"assistant"' in transport.bodies[0]
    assert not ticket.blocked
    say(ticket, "two")
    assert b'"content":"two"' in transport.bodies[1]
    assert b"role" not in transport.bodies[1]
    ticket.end(FINISHED)
    assert transport.bodies[2].endswith(b"data: [DONE]\n\n")
    assert transport.ended
    assert stream.done.done()


async def test_an_answer_that_is_ready_at_once_is_one_write():
    transport = Transport()
    ticket, stream = StreamedAnswer(), EventStream(transport.send)
    ticket.add(Delta(1, 0, (), ((0, "all"),)))
    ticket.end(FINISHED)
    StreamPump(ticket, ChatChunks(JOB), stream)
    assert len(transport.bodies) == 1
    assert transport.bodies[0].count(b"data: ") == 4


async def test_nothing_is_sent_after_the_end_of_a_stream():
    transport = Transport()
    ticket, _ = pumped(transport)
    say(ticket, "one")
    ticket.end(FINISHED)
    sent = list(transport.bodies)
    ticket.request_keepalive()
    say(ticket, "late")
    assert transport.bodies == sent


async def test_a_full_transport_holds_this_stream_alone_and_order_is_kept():
    transport = Transport()
    ticket, stream = pumped(transport)
    transport.free.clear()
    say(ticket, "one")
    assert ticket.blocked
    assert stream.busy
    for number in range(600):
        say(ticket, f"n{number}.")
    assert transport.bodies == []
    assert ticket.buffered > 600 * 256
    ticket.end(FINISHED)
    transport.free.set()
    await stream.done
    text = b"".join(transport.bodies)
    assert [text.index(f"n{number}.".encode()) for number in range(600)] == sorted(
        text.index(f"n{number}.".encode()) for number in range(600)
    )
    assert text.endswith(b"[DONE]\n\n")
    assert ticket.buffered == 0
    assert len(transport.bodies) > 2, "much is given out in pieces, so that a slow reader shows progress"


async def test_a_blocked_transport_gets_no_second_part_before_the_first_and_is_then_free():
    transport = Transport()
    ticket, stream = StreamedAnswer(), EventStream(transport.send)
    transport.free.clear()
    for number in range(2 * MAX_DELTAS_TAKEN):
        say(ticket, f"n{number}.")
    StreamPump(ticket, ChatChunks(JOB), stream)
    assert (ticket.blocked, ticket.takes, len(ticket.pending)) == (True, 1, MAX_DELTAS_TAKEN)
    transport.free.set()
    await turn()
    say(ticket, "last")
    text = b"".join(transport.bodies)
    assert all(text.count(f'"n{number}."'.encode()) == 1 for number in range(2 * MAX_DELTAS_TAKEN))
    assert not ticket.blocked
    assert b'"content":"last"' in transport.bodies[-1]


async def test_a_keepalive_that_is_due_with_a_delta_replaces_no_text():
    transport = Transport()
    ticket, _ = pumped(transport)
    say(ticket, "one")
    transport.free.clear()
    say(ticket, "two")
    ticket.request_keepalive()
    say(ticket, "three")
    transport.free.set()
    await turn()
    assert [b"waiting" in body for body in transport.bodies] == [False, False, False]
    assert b'"content":"three"' in transport.bodies[2]


async def test_a_nudge_is_a_comment():
    transport = Transport()
    ticket, _ = pumped(transport)
    ticket.request_keepalive()
    assert transport.bodies == [b": waiting\n\n"]
    ticket.announce_wait("waiting for a model swap")
    ticket.request_keepalive()
    assert transport.bodies[1:] == [b": waiting for a model swap\n\n"]
    say(ticket, "one")
    assert b'"role":"assistant"' in transport.bodies[2]


async def test_failed_sse_stream_has_an_error_and_no_done():
    transport = Transport()
    ticket, _ = pumped(transport)
    say(ticket, "one")
    ticket.end(RequestFailure("node_lost", "studio was lost"))
    assert b'"code":"node_lost"' in transport.bodies[-1]
    assert b"[DONE]" not in b"".join(transport.bodies)
    assert transport.ended


class Storing(ChatChunks):
    """Chunks of a route that stores the answer so far at its end."""

    stored: str = ""

    def encode_failure(self, problem: Problem) -> bytes:
        self.stored += problem.code
        return super().encode_failure(problem)


async def test_a_reader_that_is_given_up_frees_the_step_that_waits():
    transport, chunks = Transport(), Storing(JOB)
    ticket, stream = pumped(transport, chunks)
    transport.free.clear()
    say(ticket, "one")
    ticket.end(SLOW)
    await stream.done
    assert chunks.stored == "cancelled", "a later request may refer to this answer"
    transport.free.set()
    await asyncio.sleep(0)
    assert transport.bodies == []


async def test_a_transport_that_breaks_ends_this_stream_alone():
    transport = Transport()
    ticket, stream = pumped(transport)
    transport.broken = True
    for text in ("one", "two"):  # the second failure raises nothing in the decode step of all streams
        say(ticket, text)
    with pytest.raises(OSError, match="gone"):
        await stream.done


# the stepper


async def test_a_coroutine_that_never_waits_ends_at_once():
    ended: list[Any] = []

    async def seven() -> int:
        return 7

    CoroutineDriver(ended.append).run(seven())
    assert ended == [7]


async def test_driver_resumes_a_coroutine_when_its_future_is_done():
    ended: list[Any] = []
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def work() -> int:
        await asyncio.sleep(0)
        return await future + 1

    CoroutineDriver(ended.append).run(work())
    await asyncio.sleep(0)
    assert ended == []
    future.set_result(1)
    await asyncio.sleep(0)
    assert ended == [2]


async def test_closed_driver_cleans_up_without_a_report():
    ended: list[Any] = []
    cleaned: list[bool] = []

    async def work() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cleaned.append(True)

    stepper = CoroutineDriver(ended.append)
    stepper.run(work())
    stepper.close()
    stepper.close()
    assert cleaned == [True]
    assert ended == []


async def test_driver_reports_an_exception_to_the_loop():
    ended: list[Any] = []
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context))

    async def work() -> None:
        await asyncio.sleep(0)
        raise ValueError("broken")

    CoroutineDriver(ended.append).run(work())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert ended == [None]
    assert str(told[0]["exception"]) == "broken"
