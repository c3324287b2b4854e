"""The room of a key for long bodies that are received and parsed at once."""

import asyncio

import pytest

from router.admission.body_intake import BodyIntake


async def started(*takes: asyncio.Task[None]) -> list[bool]:
    """Run the loop; return which takes are done."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    return [take.done() for take in takes]


async def test_bodies_of_a_key_wait_in_order_and_those_of_another_key_do_not() -> None:
    intake = BodyIntake(10)
    await intake.take("a", 6)
    large, small = asyncio.create_task(intake.take("a", 5)), asyncio.create_task(intake.take("a", 1))
    other = asyncio.create_task(intake.take("b", 10))
    assert await started(large, small, other) == [False, False, True], "a small body does not overtake a large one"
    intake.release("a", 6)
    assert await started(large, small) == [True, True]


async def test_a_body_that_waits_gets_its_turn_when_exactly_its_room_is_free() -> None:
    intake = BodyIntake(10)
    for size in (4, 3, 3):
        await intake.take("a", size)
    waiting = asyncio.create_task(intake.take("a", 6))
    await started(waiting)
    intake.release("a", 3)
    assert await started(waiting) == [False]
    intake.release("a", 3)
    assert await started(waiting) == [True], "4 and 6 are 10"


async def test_a_body_that_does_not_fit_yet_keeps_its_place() -> None:
    intake = BodyIntake(10)
    order: list[int] = []

    async def take(size: int) -> None:
        await intake.take("a", size)
        order.append(size)

    for size in (5, 4):
        await intake.take("a", size)
    waiting = [asyncio.create_task(take(size)) for size in (7, 3)]
    await started(*waiting)
    intake.release("a", 4)
    assert await started(*waiting) == [False, False]
    intake.release("a", 5)
    assert await started(*waiting) == [True, True]
    assert order == [7, 3]


async def test_a_single_body_always_fits() -> None:
    intake = BodyIntake(10)
    await asyncio.wait_for(intake.take("a", 100), 30)
    waiting = asyncio.create_task(intake.take("a", 1))
    assert await started(waiting) == [False]
    intake.release("a", 100)
    assert await started(waiting) == [True]


@pytest.mark.parametrize("admitted", [False, True])
async def test_a_body_that_stops_waiting_takes_nothing(admitted: bool) -> None:
    """Also when it gets its room and is cancelled in the same turn of the loop."""
    intake = BodyIntake(10)
    await intake.take("a", 10)
    waiting, behind = asyncio.create_task(intake.take("a", 10)), asyncio.create_task(intake.take("a", 10))
    await started(waiting)
    if admitted:
        intake.release("a", 10)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    if not admitted:
        intake.release("a", 10)
    assert await started(behind) == [True]
    intake.release("a", 10)
    assert not intake.keys


async def test_a_body_behind_one_that_stopped_waiting_gets_its_turn_at_once() -> None:
    intake = BodyIntake(10)
    await intake.take("a", 8)
    large, small = asyncio.create_task(intake.take("a", 5)), asyncio.create_task(intake.take("a", 2))
    assert await started(large, small) == [False, False]
    large.cancel()
    await started(large)
    assert await started(small) == [True]


async def test_a_body_that_stopped_waiting_is_passed_over_before_its_task_has_run() -> None:
    intake = BodyIntake(10)
    await intake.take("a", 10)
    waiting, behind = asyncio.create_task(intake.take("a", 10)), asyncio.create_task(intake.take("a", 10))
    await started(waiting)
    waiting.cancel()
    intake.release("a", 10)
    assert await started(waiting, behind) == [True, True]
    intake.release("a", 10)
    assert not intake.keys


async def test_a_body_that_stopped_waiting_leaves_the_reserved_bytes_of_a_later_one() -> None:
    intake = BodyIntake(10)
    await intake.take("a", 10)
    waiting = asyncio.create_task(intake.take("a", 10))
    await started(waiting)
    waiting.cancel()
    intake.release("a", 10)
    await intake.take("a", 10)
    assert await started(waiting) == [True]
    assert intake.keys == {"a"}
    intake.release("a", 10)
    assert not intake.keys
