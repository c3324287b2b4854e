import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.admission.queue import (
    HOLD_HEADROOM_AFTER_SECONDS,
    MAX_OVERTAKES,
    MIN_KEY_SHARE,
    MIN_QUEUE_LENGTH,
    PACE_ROUNDS,
    QUANTUM_TOKENS,
    AdmissionQueue,
    QueuedRequest,
)
from wire.refusals import RefusalCode, Refused


def offer(
    queue: AdmissionQueue[str], item: str, key: str = "k", cost: int = 10, now: float = 0.0
) -> QueuedRequest[str]:
    entry = queue.offer(item, key, cost, now, now + 30, 2)
    assert isinstance(entry, QueuedRequest)
    return entry


def test_full_queue_returns_a_retry_time():
    queue: AdmissionQueue[str] = AdmissionQueue()
    for number in range(MIN_QUEUE_LENGTH):
        offer(queue, str(number), f"key{number}")
    refused = queue.offer("one more", "late", 1, 0.0, 30.0, 2)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.status) == (RefusalCode.QUEUE_FULL, 503)
    assert refused.retry_after is not None
    assert 1 <= refused.retry_after <= 60


def test_the_oldest_wait_is_that_of_the_request_that_came_first_of_all_keys():
    queue: AdmissionQueue[str] = AdmissionQueue()
    assert queue.get_longest_wait(5.0) == 0.0
    late = offer(queue, "late", "a", now=3.0)
    first = offer(queue, "first", "b", now=1.0)
    offer(queue, "later", "b", now=4.0)
    assert queue.get_longest_wait(5.0) == 4.0
    queue.remove(first)
    assert queue.get_longest_wait(5.0) == 2.0
    queue.remove(late)
    assert (queue.get_longest_wait(5.0), queue.count_queued("a"), queue.count_queued("b"), len(queue)) == (1.0, 0, 1, 1)


def test_retry_time_follows_from_the_pace_of_the_queue():
    queue: AdmissionQueue[str] = AdmissionQueue()
    for number in range(MIN_QUEUE_LENGTH):
        offer(queue, str(number), f"key{number % 8}")
    queue.place_waiting(1.0, lambda item, keep: item == "0")
    queue.place_waiting(2.0, lambda item, keep: item in ("1", "2"))
    queue.place_waiting(3.0, lambda item, keep: item in ("3", "4"))
    for number in range(5):
        offer(queue, str(number), "more")

    def get_retry_seconds(now: float) -> float:
        refused = queue.offer("one more", "late", 1, now, now + 30, 2)
        assert isinstance(refused, Refused)
        assert refused.retry_after is not None
        return refused.retry_after

    assert get_retry_seconds(3.0) == MIN_QUEUE_LENGTH * 0.5, "two left in each second"
    assert get_retry_seconds(3.7) > MIN_QUEUE_LENGTH * 0.5, "no entry has left since"
    assert get_retry_seconds(100.0) == 60.0


@pytest.mark.parametrize(("now", "seconds"), [(0.0, 15.0), (20.0, 5.0), (29.0, 1.0), (30.0, 1.0)])
def test_before_any_has_left_a_refusal_names_half_of_the_time_until_the_oldest_must(now: float, seconds: float):
    queue: AdmissionQueue[str] = AdmissionQueue(2)
    offer(queue, "late", "a", now=90.0)
    offer(queue, "first", "b", now=0.0)
    refused = queue.offer("one more", "c", 1, now, now + 30, 2)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.retry_after) == (RefusalCode.QUEUE_FULL, seconds)


def test_retry_time_excludes_the_time_without_queued_requests():
    queue: AdmissionQueue[str] = AdmissionQueue(2)
    offer(queue, "0", "k")
    offer(queue, "1", "k")
    queue.place_waiting(1.0, lambda item, keep: item == "0")
    queue.place_waiting(3.0, lambda item, keep: item == "1")
    for number in (2, 3):
        assert isinstance(queue.offer(str(number), f"k{number}", 1, 3600.0, 3630.0, 2), QueuedRequest)
    refused = queue.offer("one more", "late", 1, 3601.0, 3631.0, 2)
    assert isinstance(refused, Refused)
    assert refused.retry_after == 2 * 2.0, "one left in two seconds"


def test_a_round_without_placed_requests_does_not_raise_the_pace():
    queue: AdmissionQueue[str] = AdmissionQueue(6)
    for number in range(6):
        offer(queue, str(number), str(number))
    for now, leaving in ((1.0, ("0",)), (5.0, ()), (9.0, ("1", "2"))):
        queue.place_waiting(now, lambda item, keep, leaving=leaving: item in leaving)
    for number in range(3):
        offer(queue, str(number), "more")
    refused = queue.offer("one more", "late", 1, 9.0, 39.0, 2)
    assert isinstance(refused, Refused)
    assert refused.retry_after == 6 * 4.0, "two in eight seconds"


def test_the_pace_of_the_queue_is_averaged_over_four_rounds():
    queue: AdmissionQueue[str] = AdmissionQueue()
    for number in range(MIN_QUEUE_LENGTH):
        offer(queue, str(number), f"key{number % 8}")
    for now, leaving in ((1.0, ("0",)), (2.0, ("1", "2")), (3.0, ("3",))):
        queue.place_waiting(now, lambda item, keep, leaving=leaving: item in leaving)
    for number in range(4):
        offer(queue, str(number), "more")
    refused = queue.offer("one more", "late", 1, 3.0, 33.0, 2)
    assert isinstance(refused, Refused)
    assert refused.retry_after == MIN_QUEUE_LENGTH * (0.5 + (1.0 - 0.5) / PACE_ROUNDS)


def test_a_key_may_have_a_share_of_its_own():
    queue: AdmissionQueue[str] = AdmissionQueue()
    for number in range(2):
        assert isinstance(queue.offer(str(number), "k", 1, 0.0, 30.0, 2, share=2), QueuedRequest)
    refused = queue.offer("one more", "k", 1, 0.0, 30.0, 2, share=2)
    assert isinstance(refused, Refused)
    assert refused.code is RefusalCode.OVER_SHARE
    queue = moving()
    refused = queue.offer("one more", "k", 1, 3.0, 63.0, 2, share=2)
    assert isinstance(refused, Refused), "a free place is not for a key with a share of its own"
    assert refused.code is RefusalCode.OVER_SHARE


def test_a_key_over_its_share_waits_for_its_own_requests_only():
    queue: AdmissionQueue[str] = AdmissionQueue()
    for number in range(8):
        offer(queue, str(number), "other")
    for number in range(2):
        offer(queue, f"own {number}", "k")
    for now in (1.0, 3.0):
        queue.place_waiting(now, lambda item, keep, first=f"{now:.0f}": item == first)
    refused = queue.offer("one more", "k", 1, 3.0, 33.0, 2, share=2)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.retry_after) == (RefusalCode.OVER_SHARE, 2 * 2.0)


def test_a_request_that_was_begun_is_never_refused():
    queue: AdmissionQueue[str] = AdmissionQueue(1)
    offer(queue, "waits")
    assert isinstance(queue.offer("new", "other", 1, 0.0, 30.0, 2), Refused)
    for key in ("k", "other"):
        assert isinstance(queue.offer("begun", key, 1, 0.0, 30.0, 2, begun=True), QueuedRequest)
    assert len(queue) == 3


def test_extend_moves_a_deadline_to_a_later_time_only():
    entry = offer(AdmissionQueue(), "waits")
    assert [entry.extend(at) for at in (20.0, 45.0, 40.0)] == [30.0, 45.0, 45.0]
    assert entry.deadline == 45.0


def test_a_request_costs_a_token_at_least():
    queue: AdmissionQueue[str] = AdmissionQueue()
    assert [offer(queue, "item", cost=cost).cost for cost in (0, 1, 2)] == [1, 1, 2]


def place_one(queue: AdmissionQueue[str], order: list[str]) -> None:
    before = len(order)

    def attempt(item: str, keep: bool) -> bool:
        if len(order) == before:
            order.append(item)
            return True
        return False

    queue.place_waiting(1.0, attempt)


@pytest.mark.parametrize("weight", [1, 2, 4])
def test_queue_serves_keys_by_weight(weight: int):
    queue: AdmissionQueue[str] = AdmissionQueue()
    for number in range(30):
        queue.offer(f"heavy {number}", "heavy", QUANTUM_TOKENS, 0.0, 30.0, 20, weight=weight, share=100)
        queue.offer(f"light {number}", "light", QUANTUM_TOKENS, 0.0, 30.0, 20, share=100)
    order: list[str] = []
    for _ in range(20):
        place_one(queue, order)
    heavy = sum(item.startswith("heavy") for item in order)
    assert heavy == pytest.approx(20 * weight / (weight + 1), abs=1.5)


def test_changed_weight_applies_to_the_next_request():
    queue: AdmissionQueue[str] = AdmissionQueue()
    for number in range(30):
        weight = 16 if number < 29 else 1
        queue.offer(f"heavy {number}", "heavy", QUANTUM_TOKENS, 0.0, 30.0, 20, weight=weight, share=100)
        queue.offer(f"light {number}", "light", QUANTUM_TOKENS, 0.0, 30.0, 20, share=100)
    order: list[str] = []
    for _ in range(20):
        place_one(queue, order)
    assert sum(item.startswith("heavy") for item in order) == pytest.approx(10, abs=1)


def test_one_key_may_hold_a_quarter_but_at_least_sixteen():
    queue: AdmissionQueue[str] = AdmissionQueue()
    for number in range(MIN_KEY_SHARE):
        offer(queue, str(number))
    refused = queue.offer("one more", "k", 1, 0.0, 30.0, 2)
    assert isinstance(refused, Refused)
    assert (refused.code, refused.status) == (RefusalCode.OVER_SHARE, 429)
    assert queue.compute_share(100) == 100
    assert queue.compute_limit(100) == 400
    assert AdmissionQueue[str](10).compute_share(100) == MIN_KEY_SHARE
    offer(queue, "another key has its own share", "other")


def moving() -> AdmissionQueue[str]:
    """Make a queue of one key that loses two entries a second; ten entries are left."""
    queue: AdmissionQueue[str] = AdmissionQueue()
    for number in range(16):
        offer(queue, str(number))
    for now in (1.0, 2.0, 3.0):
        first = int(now) * 2 - 2
        queue.place_waiting(now, lambda item, keep, first=first: item in (str(first), str(first + 1)))
    assert len(queue) == 10
    return queue


def taken(queue: AdmissionQueue[str], patience: float) -> int:
    """Offer entries until one is refused; return the number of the key's queued entries."""
    for number in range(MIN_QUEUE_LENGTH):
        refused = queue.offer(f"new {number}", "k", 1, 3.0, 3.0 + patience, 2)
        if isinstance(refused, Refused):
            assert refused.code is RefusalCode.OVER_SHARE
            break
    return queue.count_queued("k")


def test_lone_key_may_queue_more_while_the_queue_moves():
    assert taken(moving(), 60.0) == MIN_QUEUE_LENGTH - MIN_KEY_SHARE, "other keys find the places of one share"
    assert taken(moving(), 15.0) == 30, "a later request would wait in vain"
    stuck: AdmissionQueue[str] = AdmissionQueue()
    assert taken(stuck, 60.0) == MIN_KEY_SHARE, "no entry has left yet"


def test_a_key_has_no_more_than_its_share_where_another_one_waits():
    queue = moving()
    offer(queue, "other", "other")
    assert taken(queue, 60.0) == MIN_KEY_SHARE


def test_deadlines_end_the_wait_oldest_first():
    queue: AdmissionQueue[str] = AdmissionQueue()
    offer(queue, "a", now=0.0)
    offer(queue, "b", "other", now=1.0)
    offer(queue, "c", now=5.0)
    assert queue.expire(29.9) == []
    assert queue.expire(31.0) == ["a", "b"]
    assert len(queue) == 1


def test_leaving_twice_counts_once():
    queue: AdmissionQueue[str] = AdmissionQueue()
    entry = offer(queue, "a")
    assert queue.remove(entry)
    assert not queue.remove(entry)
    assert len(queue) == 0
    offer(queue, "b")
    assert not queue.remove(entry), "its key has another one"
    assert len(queue) == 1


def test_request_without_room_does_not_block_the_queue():
    queue: AdmissionQueue[str] = AdmissionQueue()
    offer(queue, "large")
    offer(queue, "small")
    assert queue.place_waiting(0.1, lambda item, keep: item == "small") == 1
    assert len(queue) == 1


def test_headroom_is_held_after_eight_overtakes():
    queue: AdmissionQueue[str] = AdmissionQueue()
    large = offer(queue, "large")
    kept: list[bool] = []

    def attempt(item: str, keep: bool) -> bool:
        if item == "large":
            kept.append(keep)
        return item != "large"

    for number in range(8):
        offer(queue, f"small{number}", f"key{number}")
        queue.place_waiting(0.1, attempt)
    assert not any(kept)
    assert large.overtaken == MAX_OVERTAKES == 8
    queue.place_waiting(0.1, attempt)
    assert kept[-1]


def test_overtakes_count_earlier_requests_only():
    queue: AdmissionQueue[str] = AdmissionQueue()
    waiting = (("oldest", 10), ("small", 10), ("long", 2 * QUANTUM_TOKENS), ("late", 10))
    entries = [offer(queue, item, item, cost) for item, cost in waiting]
    tried: list[str] = []
    assert queue.place_waiting(0.1, lambda item, keep: tried.append(item) or item in ("small", "long")) == 2
    assert tried == ["oldest", "small", "late", "long"]
    assert [entry.overtaken for entry in entries] == [2, 0, 0, 0]


def test_headroom_is_held_for_one_request_of_a_key_in_each_round():
    queue: AdmissionQueue[str] = AdmissionQueue()
    for item in ("a0", "a1", "b0", "b1"):
        offer(queue, item, item[0])
    for _ in range(2):
        kept: list[str] = []
        queue.place_waiting(HOLD_HEADROOM_AFTER_SECONDS, lambda item, keep, kept=kept: bool(keep and kept.append(item)))
        assert kept == ["a0", "b0"]


def test_headroom_is_held_after_five_seconds_or_eight_overtaking_arrivals():
    queue: AdmissionQueue[str] = AdmissionQueue()
    entry = offer(queue, "large", now=100.0)
    assert not queue.needs_room(entry, 100.0 + HOLD_HEADROOM_AFTER_SECONDS - 0.1)
    assert queue.needs_room(entry, 100.0 + HOLD_HEADROOM_AFTER_SECONDS)
    for _ in range(MAX_OVERTAKES):
        assert not queue.needs_room(entry, 100.1)
        queue.count_overtake()
    assert queue.needs_room(entry, 100.1)


def drain(queue: AdmissionQueue[str]) -> list[str]:
    """Place exactly one entry at each wake, as when capacity returns one request at a time."""
    order: list[str] = []
    while len(queue):
        free = [True]

        def attempt(item: str, keep: bool, free: list[bool] = free) -> bool:
            if not free[0]:
                return False
            free[0] = False
            order.append(item)
            return True

        assert queue.place_waiting(0.1, attempt) == 1
    return order


ORDERS = [
    ([("a", QUANTUM_TOKENS, 3), ("b", QUANTUM_TOKENS, 3)], "abbaab"),
    ([("a", QUANTUM_TOKENS // 4, 8), ("b", QUANTUM_TOKENS, 2)], "aaaabbaaaa"),
    ([("a", 2 * QUANTUM_TOKENS, 2), ("b", QUANTUM_TOKENS, 4)], "bbabba"),
]


@pytest.mark.parametrize(("waiting", "order"), ORDERS)
def test_keys_leave_in_the_order_of_a_deficit_round_robin(waiting: list[tuple[str, int, int]], order: str):
    queue: AdmissionQueue[str] = AdmissionQueue()
    for key, cost, count in waiting:
        for _ in range(count):
            offer(queue, key, key, cost)
    assert "".join(drain(queue)) == order


def test_later_key_has_no_precedence():
    queue: AdmissionQueue[str] = AdmissionQueue()
    for _ in range(12):
        offer(queue, "a", "a", QUANTUM_TOKENS)
        offer(queue, "b", "b", QUANTUM_TOKENS)
    before: list[str] = []
    for _ in range(12):
        place_one(queue, before)
    for _ in range(6):
        offer(queue, "c", "c", QUANTUM_TOKENS)
    after: list[str] = []
    for _ in range(12):
        place_one(queue, after)
    assert sorted(after) == ["a"] * 4 + ["b"] * 4 + ["c"] * 4


def test_a_key_earns_nothing_while_none_of_its_requests_fits():
    queue: AdmissionQueue[str] = AdmissionQueue()
    for _ in range(MIN_KEY_SHARE):
        offer(queue, "a", "a", QUANTUM_TOKENS)
        offer(queue, "b", "b", QUANTUM_TOKENS)
    for _ in range(8):
        first: list[str] = []
        queue.place_waiting(0.1, lambda item, keep, first=first: item == "a" and not first and not first.append(item))
    order: list[str] = []
    for _ in range(8):
        place_one(queue, order)
    assert sorted(order) == ["a"] * 4 + ["b"] * 4


def test_saved_credit_of_a_large_request_costs_other_keys_nothing():
    queue: AdmissionQueue[str] = AdmissionQueue()
    for item, key, cost in (("a0", "a", 9), ("a1", "a", 9), ("large", "b", 9), ("b0", "b", 1), ("b1", "b", 1)):
        offer(queue, item, key, cost * QUANTUM_TOKENS)
    order: list[str] = []
    for _ in range(2):
        left = len(order)
        queue.place_waiting(
            0.1, lambda item, keep, left=left: item != "large" and len(order) == left and not order.append(item)
        )
    offer(queue, "c0", "c", 9 * QUANTUM_TOKENS)
    order += drain(queue)
    assert sorted(order[:4]) == ["a0", "b0", "b1", "large"]
    assert order[4:] == ["a1", "c0"], "both wait for nine rounds, and a1 came first"


def test_a_request_that_is_removed_while_it_is_placed_leaves_the_others_in_order():
    queue: AdmissionQueue[str] = AdmissionQueue()
    entries = {item: offer(queue, item, item) for item in "ab"}
    assert queue.place_waiting(0.1, lambda item, keep: queue.remove(entries[item])) == 2
    assert (len(queue), queue.count_queued("a"), queue.count_queued("b")) == (0, 0, 0)


@given(st.integers(1, 12), st.integers(1, 12))
def test_two_keys_with_equal_requests_take_turns(first: int, second: int):
    queue: AdmissionQueue[str] = AdmissionQueue()
    for number in range(first):
        offer(queue, f"a{number}", "a", QUANTUM_TOKENS)
    for number in range(second):
        offer(queue, f"b{number}", "b", QUANTUM_TOKENS)
    order = [item[0] for item in drain(queue)]
    both = order[: 2 * min(first, second)]
    assert abs(both.count("a") - both.count("b")) <= 1


@given(st.lists(st.integers(1, 4 * QUANTUM_TOKENS), min_size=1, max_size=12))
def test_a_key_of_long_prompts_gets_no_more_tokens_than_a_key_of_short_ones(costs: list[int]):
    queue: AdmissionQueue[str] = AdmissionQueue()
    for number, cost in enumerate(costs):
        offer(queue, f"long{number}", "long", cost)
    for number in range(15):
        offer(queue, f"short{number}", "short", 256)
    weight = {f"long{number}": cost for number, cost in enumerate(costs)}
    served = {"long": 0, "short": 0}
    waiting = {"long": len(costs), "short": 15}
    for item in drain(queue):
        key = item.rstrip("0123456789")
        served[key] += weight.get(item, 256)
        waiting[key] -= 1
        if all(waiting.values()):
            assert abs(served["long"] - served["short"]) <= max(costs) + 2 * QUANTUM_TOKENS


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 5000)), max_size=40), st.data())
def test_every_request_is_tried_once_and_the_count_stays_true(requests: list[tuple[str, int]], data: st.DataObject):
    queue: AdmissionQueue[str] = AdmissionQueue()
    inside: list[str] = []
    for number, (key, cost) in enumerate(requests):
        if isinstance(queue.offer(f"{key}{number}", key, cost, 0.0, 30.0, 1), QueuedRequest):
            inside.append(f"{key}{number}")
    fitting = set(data.draw(st.sets(st.sampled_from(inside)))) if inside else set()
    tried: list[str] = []

    def attempt(item: str, keep: bool) -> bool:
        tried.append(item)
        return item in fitting

    assert queue.place_waiting(0.0, attempt) == len(fitting)
    assert sorted(tried) == sorted(inside)
    assert len(queue) == len(inside) - len(fitting) == sum(queue.count_queued(key) for key in "abc")


@pytest.mark.parametrize("limit", [1, 10, 1000])
def test_a_limit_that_is_set_is_the_limit(limit: int):
    assert AdmissionQueue(limit).compute_limit(50) == limit
