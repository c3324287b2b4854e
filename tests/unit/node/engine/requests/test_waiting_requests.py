from node.engine.models.model_stats import ModelUsage
from node.engine.requests.prepared import PreparedRequest
from node.engine.requests.waiting_requests import WaitingForModel, WaitingRequests
from wire.frames import Generate, GenerationParams, Message


def waiting_for(number: int, model: str, tokens: int = 3) -> WaitingForModel:
    request = Generate(number, number, "r", model, (Message("user", "hi"),), GenerationParams(), 0)
    return WaitingForModel(PreparedRequest(request, tuple(range(tokens))), 1.0, 100 * number)


def test_requests_are_taken_one_by_one_and_the_others_stay_reserved():
    waiting = WaitingRequests()
    for number, model in ((1, "a"), (2, "b"), (3, "a")):
        waiting.add(number, waiting_for(number, model))
    assert (len(waiting), waiting.count_tokens(), waiting.compute_reserved_bytes()) == (3, 9, 600)
    assert waiting.find_first("a") == 1
    first = waiting.take_next("a")
    assert first is not None
    assert first.prepared.request.request == 1
    assert (1 in waiting, 3 in waiting, waiting.compute_reserved_bytes()) == (False, True, 500)
    assert waiting.take_next("a") is not None
    assert waiting.take_next("a") is None
    assert (waiting.is_awaited("a"), waiting.is_awaited("b"), waiting.find_first("a")) == (False, True, 0)


def test_a_cancelled_request_reserves_nothing():
    waiting = WaitingRequests()
    waiting.add(1, waiting_for(1, "a"))
    assert waiting.remove(1)
    assert not waiting.remove(1)
    assert waiting.compute_reserved_bytes() == 0


def test_a_prompt_in_tokenization_holds_its_model_and_its_memory():
    waiting, usage = WaitingRequests(), ModelUsage()
    waiting.begin_tokenization(7, usage.hold())
    assert waiting.compute_reserved_bytes() == 0
    waiting.reserve(7, 50)
    assert (waiting.compute_reserved_bytes(), usage.users, list(waiting.in_tokenization), len(waiting)) == (
        50,
        1,
        [7],
        1,
    )
    waiting.end_tokenization(7)
    waiting.end_tokenization(7)
    assert (waiting.compute_reserved_bytes(), usage.users, len(waiting)) == (0, 0, 0)
