"""The one memory arithmetic: its identity, its monotony, padding, and readings that count as unreadable."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace

from wire.capacity.arithmetic import (
    TOKENIZE_BYTES_PER_TEXT_BYTE,
    TOKENIZE_BYTES_PER_TOKEN,
    TOKENIZE_SLACK,
    TOKENIZE_SLICE_CHARS,
    TOKENIZER_CODE_BYTES,
    TOKENIZER_GUIDE_FACTOR,
    TOKENIZER_LOAD_FACTOR,
    UNCHECKED_TOKENIZE_BYTES,
    UNREADABLE,
    Fits,
    build_shed_refusal,
    can_ever_fit,
    compute_current,
    compute_default_margin,
    compute_excess,
    compute_hard_limit,
    compute_headroom,
    compute_last_chunk_tokens,
    compute_level,
    compute_max_batch,
    compute_max_context,
    compute_most_bytes,
    compute_most_weights,
    compute_occupied,
    compute_profiled_margin,
    estimate_alone_bytes,
    estimate_prefill_transient,
    estimate_request_need,
    estimate_request_transient,
    estimate_step_transient,
    estimate_tokenize_bytes,
    exceeds_headroom,
    judge,
    judge_load,
)
from wire.capacity.batches import (
    can_join,
    compute_join_bytes,
    compute_padded_bytes,
    compute_row_bytes,
    compute_waste_bytes,
)
from wire.refusals import STATUS, MemoryNumbers, RefusalCode, Refused
from wire.report import BatchGroup, KvParameters, Memory, MemoryLevel, Model, TransientModel
from wire.units import GIB, MIB

SIZE = st.integers(0, 2**40)
MEMORY = st.builds(Memory, cap=SIZE, ceiling=SIZE, margin=SIZE, phys=SIZE, active=SIZE, recent=SIZE, reserved=SIZE)
GROUPS = st.lists(st.builds(BatchGroup, rows=st.integers(1, 64), longest=st.integers(1, 100_000)), max_size=4)


@given(MEMORY, SIZE, SIZE)
def test_fits_exactly_when_the_estimate_is_within_headroom(memory: Memory, estimate: int, promised: int) -> None:
    room = compute_headroom(
        memory.ceiling, memory.margin, compute_current(memory.active, memory.phys, memory.recent), memory.reserved
    )
    assert room is not None
    verdict = judge(memory, estimate, unacknowledged=promised)
    assert isinstance(verdict, Fits) == (estimate <= room - promised)


@given(MEMORY, SIZE)
def test_the_level_is_ok_exactly_where_headroom_is_not_negative(memory: Memory, leases: int) -> None:
    memory = replace(memory, leases=leases)
    room = compute_headroom(
        memory.ceiling, memory.margin, compute_current(memory.active, memory.phys, memory.recent), memory.reserved
    )
    assert room is not None
    assert (compute_level(memory) is MemoryLevel.OK) == (room >= 0)
    assert (compute_level(memory) is MemoryLevel.OK) == isinstance(judge(memory, 0), Fits), (
        "a node above a limit admits nothing"
    )
    if compute_level(memory) is MemoryLevel.OVER_HARD:
        assert max(memory.active, memory.phys or 0) > max(1, memory.cap - leases)


@pytest.mark.parametrize(
    ("phys", "expected"),
    [
        (80, MemoryLevel.OK),
        (84, MemoryLevel.OK),
        (85, MemoryLevel.OK),
        (86, MemoryLevel.OVER_SOFT),
        (96, MemoryLevel.OVER_SOFT),
        (100, MemoryLevel.OVER_SOFT),
        (101, MemoryLevel.OVER_HARD),
    ],
)
def test_levels_follow_from_margin_and_cap(phys: int, expected: MemoryLevel) -> None:
    memory = Memory(cap=100 * GIB, ceiling=100 * GIB, margin=15 * GIB, phys=phys * GIB)
    assert compute_level(memory) is expected
    assert compute_level(replace(memory, phys=None)) is MemoryLevel.UNKNOWN


def test_unreadable_ceiling_gives_no_level_below_the_hard_limit():
    memory = Memory(cap=100 * GIB, ceiling=1, margin=GIB, phys=50 * GIB, bound_by=UNREADABLE)
    assert compute_level(memory) is MemoryLevel.UNKNOWN
    assert compute_level(replace(memory, phys=101 * GIB)) is MemoryLevel.OVER_HARD, (
        "the cap was read, and so was the footprint"
    )
    assert compute_level(replace(memory, bound_by="dynamic")) is MemoryLevel.OVER_SOFT


def test_room_is_lacking_only_where_the_memory_was_read():
    memory = Memory(cap=100, ceiling=100, margin=10, phys=80)
    assert not exceeds_headroom(memory, 10)
    assert exceeds_headroom(memory, 11)
    assert not exceeds_headroom(replace(memory, phys=None), 11)
    assert not exceeds_headroom(replace(memory, ceiling=1, bound_by=UNREADABLE), 11)
    assert not exceeds_headroom(replace(memory, guard=False), 11)


def test_one_byte_makes_a_level():
    memory = Memory(cap=100, ceiling=100, margin=15, phys=85)
    assert compute_level(memory) is MemoryLevel.OK
    assert compute_level(replace(memory, phys=86)) is MemoryLevel.OVER_SOFT
    assert compute_level(replace(memory, phys=100)) is MemoryLevel.OVER_SOFT
    assert compute_level(replace(memory, phys=101)) is MemoryLevel.OVER_HARD


def test_the_excess_is_over_the_cap_less_leases_which_is_never_less_than_a_byte():
    assert compute_excess(Memory(cap=100, leases=20, phys=90, active=70)) == 10
    assert compute_excess(Memory(cap=100, leases=20, phys=70, active=90)) == 10
    assert compute_excess(Memory(cap=100, leases=20, phys=None, active=90)) == 10
    assert compute_hard_limit(Memory(cap=100, leases=20)) == 80
    assert compute_hard_limit(Memory(cap=100, leases=100)) == compute_hard_limit(Memory(cap=100, leases=200)) == 1
    assert compute_excess(Memory(cap=100, leases=100, phys=90)) == 89
    assert compute_excess(Memory(cap=100, leases=200, phys=90)) == 89
    assert compute_excess(Memory(cap=100, phys=None)) == -100, "an unreadable footprint adds nothing"


def test_freed_memory_does_not_delay_the_next_request():
    memory = Memory(cap=100, ceiling=100, margin=10, phys=80, active=30, recent=20)
    assert compute_occupied(memory) == 80
    assert compute_occupied(replace(memory, reusable=30)) == 50
    assert compute_occupied(replace(memory, reusable=90)) == 0
    assert compute_occupied(replace(memory, phys=None, reusable=30)) is None
    assert judge(replace(memory, reusable=30), 40) == Fits(100, 0)
    assert isinstance(judge(replace(memory, reusable=30), 41), Refused)
    assert judge(replace(memory, reusable=90), 90) == Fits(100, 0), "free memory is never negative"


def test_reservations_and_peaks_give_the_soft_level_only() -> None:
    memory = Memory(cap=100 * GIB, ceiling=100 * GIB, margin=15 * GIB, phys=50 * GIB)
    for change in ({"reserved": 40 * GIB}, {"ceiling": 1}, {"recent": 120 * GIB}):
        assert compute_level(replace(memory, **change)) is MemoryLevel.OVER_SOFT
    assert compute_level(replace(memory, leases=40 * GIB, ceiling=60 * GIB)) is MemoryLevel.OVER_SOFT
    assert compute_level(replace(memory, leases=60 * GIB, ceiling=40 * GIB)) is MemoryLevel.OVER_HARD
    assert compute_excess(replace(memory, leases=60 * GIB)) == 10 * GIB
    assert compute_level(replace(memory, active=101 * GIB)) is MemoryLevel.OVER_HARD


def test_a_shed_carries_numbers_that_add_up() -> None:
    memory = Memory(cap=8 * GIB, ceiling=8 * GIB, margin=GIB, phys=9 * GIB, reserved=MIB, bound_by="setting")
    refused = build_shed_refusal(memory, GIB)
    numbers = refused.numbers
    assert numbers is not None
    assert numbers.current is not None
    assert numbers.predicted == numbers.current + numbers.reserved + numbers.margin
    assert numbers.headroom == -2 * GIB - MIB
    assert "1.0 GiB over its cap" in refused.message


def test_a_verdict_carries_every_number():
    memory = Memory(cap=120, ceiling=100, margin=10, phys=40, active=30, recent=35, reserved=20, bound_by="dynamic")
    assert judge(memory, 25) == Fits(95, 5)
    assert judge(memory, 25, unacknowledged=4) == Fits(99, 1)
    refused = judge(memory, 2 * GIB, unacknowledged=4, node="studio")
    numbers = MemoryNumbers(2 * GIB + 74, 100, 40, 24, 2 * GIB, 10, 120, 26, "dynamic")
    assert isinstance(refused, Refused)
    assert refused == Refused(RefusalCode.NO_ROOM, refused.message, numbers, None, "studio")
    assert refused.message.startswith("needs 2.0 GiB, headroom is 0.0 KiB (of 0.1 KiB, ")


def test_a_verdict_is_never_changed_afterwards():
    with pytest.raises(AttributeError):
        Fits(95, 5).spare = 6  # type: ignore[misc]


def test_refusal_of_an_unreadable_footprint_has_the_known_numbers():
    memory = Memory(cap=120, ceiling=100, margin=10, phys=None, active=30, reserved=20, bound_by="static")
    refused = judge(memory, 25, node="studio")
    assert isinstance(refused, Refused)
    assert "the footprint of the engine cannot be read" in refused.message
    assert refused.numbers == MemoryNumbers(None, 100, None, 20, 25, 10, 120, None, "static")
    assert (refused.retry_after, refused.node) == (2.0, "studio")
    assert judge(memory, 25).node == "", "the node itself gives no name"  # type: ignore[union-attr]
    refused = judge(replace(memory, phys=40, ceiling=1, bound_by=UNREADABLE), 25)
    assert isinstance(refused, Refused)
    assert "the available memory of its system cannot be read" in refused.message
    assert refused.retry_after == 2.0


def test_with_the_guard_off_by_name_everything_fits_and_nothing_is_spare():
    memory = Memory(cap=10, ceiling=1, margin=10, phys=40, reserved=20, guard=False)
    assert judge(memory, 25, unacknowledged=4) == Fits(89, 0)
    assert judge(replace(memory, phys=None), 25) == Fits(45, 0)


def test_shed_of_an_unreadable_node_has_the_known_numbers():
    memory = Memory(cap=8 * GIB, ceiling=7 * GIB, margin=GIB, phys=9 * GIB, reserved=MIB, bound_by="setting")
    known = MemoryNumbers(10 * GIB + MIB, 7 * GIB, 9 * GIB, MIB, 0, GIB, 8 * GIB, -3 * GIB - MIB, "setting")
    assert build_shed_refusal(memory, GIB).numbers == known
    assert build_shed_refusal(replace(memory, reusable=GIB), GIB).numbers == known, "reusable bytes are in use"
    assert build_shed_refusal(memory, GIB).code is RefusalCode.NO_ROOM
    blind = MemoryNumbers(None, 7 * GIB, None, MIB, 0, GIB, 8 * GIB, None, "setting")
    assert build_shed_refusal(replace(memory, phys=None), GIB).numbers == blind


def test_a_system_that_cannot_be_read_refuses_as_unreadable() -> None:
    memory = Memory(cap=8 * GIB, ceiling=1, phys=GIB, bound_by=UNREADABLE)
    refused = judge(memory, 0)
    assert isinstance(refused, Refused)
    assert refused.code is RefusalCode.UNREADABLE
    assert refused.retry_after


@given(MEMORY, SIZE, SIZE)
def test_judge_is_monotonic_in_the_estimate(memory: Memory, estimate: int, less: int) -> None:
    assume(less <= estimate)
    if isinstance(judge(memory, estimate), Fits):
        assert isinstance(judge(memory, less), Fits)


@given(MEMORY, SIZE)
def test_a_refusal_carries_numbers_that_add_up(memory: Memory, estimate: int) -> None:
    verdict = judge(memory, estimate)
    if isinstance(verdict, Refused):
        numbers = verdict.numbers
        assert numbers is not None
        assert numbers.current is not None
        assert numbers.predicted == numbers.current + numbers.reserved + numbers.estimate + numbers.margin
        assert numbers.predicted is not None
        assert numbers.predicted > numbers.ceiling
        assert numbers.headroom == numbers.ceiling - numbers.margin - numbers.current - numbers.reserved


def test_the_seed_case_is_refused_with_the_seed_numbers() -> None:
    gib = 1000
    verdict = judge(Memory(cap=107_520 * gib, ceiling=107_520 * gib, margin=12_000 * gib, phys=97_655 * gib), 0)
    assert isinstance(verdict, Refused)
    assert verdict.numbers is not None
    assert verdict.numbers.predicted == 109_655 * gib


def test_every_term_takes_from_the_headroom() -> None:
    memory = Memory(cap=100, ceiling=100, margin=10, phys=40, reserved=20)
    assert isinstance(judge(memory, 30), Fits)
    assert isinstance(judge(memory, 31), Refused)
    assert isinstance(judge(memory, 30, unacknowledged=1), Refused)
    assert isinstance(judge(Memory(cap=100, ceiling=99, margin=10, phys=40, reserved=20), 30), Refused)


@given(SIZE)
def test_an_unreadable_footprint_refuses_everything(estimate: int) -> None:
    verdict = judge(Memory(cap=2**50, ceiling=2**50, phys=None), estimate)
    assert isinstance(verdict, Refused)
    assert verdict.code is RefusalCode.UNREADABLE


@given(MEMORY, SIZE)
def test_only_the_named_switch_turns_the_guard_off(memory: Memory, estimate: int) -> None:
    off = Memory(cap=memory.cap, ceiling=1, margin=memory.margin, phys=memory.phys, guard=False)
    assert isinstance(judge(off, estimate), Fits)


def test_current_is_the_highest_of_its_three_readings() -> None:
    assert compute_current(3, 5, 4) == 5
    assert compute_current(3, 2, 4) == 4
    assert compute_current(9, 2, 4) == 9
    assert compute_current(9, None, 4) is None


def test_the_default_margin_is_the_measured_share_within_its_bounds() -> None:
    assert abs(compute_default_margin(int(107.52 * GIB)) - 12 * GIB) <= 1
    assert compute_default_margin(512 * GIB) == 12 * GIB
    assert compute_default_margin(2 * GIB) == 512 * MIB
    assert compute_default_margin(24 * GIB) == int(24 * GIB * 12 / 107.52)


def test_the_margin_of_a_profile_is_the_measured_share_of_its_residual_and_at_least_two_percent():
    assert compute_profiled_margin(100 * GIB, 0) == 2 * GIB
    assert compute_profiled_margin(100 * GIB, GIB) == 2 * GIB
    assert compute_profiled_margin(100 * GIB, 10 * GIB) == int(10 * GIB * 12 / 10.6)


def test_a_padded_batch_costs_rows_times_its_longest_row() -> None:
    assert compute_padded_bytes(BatchGroup(8, 6000), KvParameters(2)) == 8 * 6000 * 2


def test_a_short_row_does_not_join_where_padding_wastes_more_than_its_worth() -> None:
    kv = KvParameters(131_072)
    short, long = BatchGroup(7, 20, 140), BatchGroup(7, 6000, 42_000)
    assert not can_join(short, 6000, kv)
    assert compute_join_bytes([short], 6000, kv) == 6000 * kv.per_token
    assert can_join(long, 5000, kv)
    assert compute_join_bytes([long], 5000, kv) == 6000 * kv.per_token
    assert can_join(short, 200, kv), "256 MiB of padding or less is not worth a second batch"
    assert not can_join(short, 200, replace(kv, waste=MIB)), "less under a small cap"
    assert compute_waste_bytes(96 * GIB) == 256 * MIB
    assert compute_waste_bytes(GIB) == GIB // 100
    assert compute_join_bytes([short], 200, kv) == (8 * 200 - 7 * 20) * kv.per_token


def test_padding_may_waste_a_quarter_or_256_mib_to_the_token():
    assert can_join(BatchGroup(1, 100, 100), 50, KvParameters(GIB))
    assert not can_join(BatchGroup(1, 100, 100), 49, KvParameters(GIB))
    assert can_join(BatchGroup(1, 400, 400), 144, KvParameters(MIB))
    assert not can_join(BatchGroup(1, 400, 400), 143, KvParameters(MIB))
    assert can_join(BatchGroup(2, 100, 200), 134, KvParameters(GIB)), "a longer row pads the others"
    assert can_join(BatchGroup(1, 50, 50), 100, KvParameters(GIB))
    assert not can_join(BatchGroup(1, 49, 49), 100, KvParameters(GIB))


def test_a_row_joins_where_it_adds_least():
    kv, near, far = KvParameters(1000), BatchGroup(1, 100, 100), BatchGroup(1, 140, 140)
    assert compute_join_bytes([near, far], 100, kv) == compute_join_bytes([far, near], 100, kv) == 100 * 1000
    assert compute_join_bytes([near], 120, kv) == (2 * 120 - 100) * 1000
    assert compute_join_bytes([near, far], 120, kv) == compute_join_bytes([far, near], 120, kv) == 140 * 1000
    assert compute_join_bytes([], 120, kv) == 120 * 1000


@given(GROUPS, st.integers(1, 100_000), st.integers(1, 10**6))
def test_joining_never_costs_more_than_a_batch_of_its_own_unless_nothing_else_is_allowed(
    groups: list[BatchGroup], length: int, per_token: int
) -> None:
    kv = KvParameters(per_token)
    cost = compute_join_bytes(groups, length, kv)
    assert cost == length * per_token or any(can_join(group, length, kv) for group in groups)
    assert cost >= length * per_token


def test_row_bytes_are_tokens_growth_window_and_fixed_state() -> None:
    kv = KvParameters(per_token=10, step=256, fixed=1000, window=512, window_per_token=3)
    assert compute_row_bytes(kv, 0) == compute_row_bytes(kv, -1) == 0
    assert compute_row_bytes(kv, 1) == 1000 + 256 * 10 + 256 * 3
    assert compute_row_bytes(kv, 6000) == 1000 + 6255 * 10 + 512 * 3


@given(
    st.builds(KvParameters, st.integers(0, 10**6), st.integers(1, 512), st.integers(0, 10**6), st.integers(0, 4096)),
    SIZE,
)
def test_a_longer_row_never_takes_less(kv: KvParameters, tokens: int) -> None:
    assert compute_row_bytes(kv, tokens) <= compute_row_bytes(kv, tokens + 1)


@given(st.integers(0, 10**6), st.integers(0, 10**5), st.integers(1, 8))
def test_the_need_counts_the_whole_prompt_every_choice_and_absent_weights(prompt: int, output: int, n: int) -> None:
    loaded = Model("m", loaded=True, weights=GIB, kv_per_token=10, transient=7)
    absent = Model("m", loaded=False, weights=GIB, kv_per_token=10, transient=7)
    assert estimate_request_need(loaded, prompt, output, n) == n * (prompt + output) * 10 + 7
    assert estimate_request_need(absent, prompt, output, n) - estimate_request_need(loaded, prompt, output, n) == GIB


@given(MEMORY, st.integers(0, 10**6))
def test_fit_now_implies_can_ever_fit(memory: Memory, prompt: int) -> None:
    model = Model("m", loaded=True, weights=0, kv_per_token=1000)
    assume(memory.ceiling <= memory.cap)
    if isinstance(judge(memory, estimate_request_need(model, prompt, 100)), Fits):
        assert can_ever_fit(memory, model, prompt, 100)


def test_memory_of_the_engine_before_any_model_is_available_to_no_request() -> None:
    memory, model = Memory(cap=100, ceiling=100, margin=10, base=20), Model("m", weights=30, kv_per_token=1)
    assert compute_most_bytes(memory) == 70
    assert can_ever_fit(memory, model, 30, 10)
    assert not can_ever_fit(memory, model, 31, 10)


TRANSIENT = TransientModel(
    fixed=1000, token=20, pair=0.5, seen=3, least=30, logits=400, step_fixed=50, step_row=7, step_seen=3, floor=256
)


def test_transient_grows_with_attended_tokens_up_to_the_window():
    assert estimate_prefill_transient(TRANSIENT, 100, 0) == 1000 + 2000 + 5000 + 300
    assert estimate_prefill_transient(TRANSIENT, 100, 900) == 1000 + 2000 + 50_000 + 3000
    assert estimate_prefill_transient(TRANSIENT, 100, 0, last=True) == 1000 + 40_000
    assert estimate_prefill_transient(TransientModel(least=30, pair=0.01), 100, 0) == 3000, (
        "layers without attention take more"
    )
    windowed = replace(TRANSIENT, window=64)
    assert estimate_prefill_transient(windowed, 100, 900) == estimate_prefill_transient(windowed, 100, 64)
    assert estimate_prefill_transient(TRANSIENT, 100, 900, grows=False) == 1000 + 2000 + 50_000
    assert estimate_step_transient(TRANSIENT, 4, 1000, grows=False) == 50 + 4 * (7 + 3000)
    assert estimate_step_transient(TRANSIENT, 4, 1000) == 50 + 4 * (7 + 3000 + 2 * 3000)
    assert estimate_step_transient(TRANSIENT, 0, 1000) == 0
    assert estimate_step_transient(windowed, 4, 1000) == estimate_step_transient(windowed, 4, 64)


def test_a_request_needs_the_smallest_chunk_at_its_end_or_the_step_that_it_joins_but_not_both():
    model = Model("m", loaded=True, kv_per_token=10, forward=TRANSIENT)
    end = estimate_prefill_transient(TRANSIENT, 256, 10_000 - 256)
    assert estimate_request_transient(model, 10_000, 1) == end
    assert estimate_request_need(model, 10_000, 1) == 10_001 * 10 + end
    assert estimate_request_transient(model, 100, 1) == estimate_prefill_transient(TRANSIENT, 100, 0, last=True), (
        "a short prompt is one"
    )
    many = replace(model, groups=(BatchGroup(64, 10_000, 640_000),))
    assert estimate_request_transient(many, 10_000, 1) == estimate_step_transient(TRANSIENT, 65, 10_001)
    assert estimate_request_transient(many, 1, 1) == estimate_step_transient(TRANSIENT, 65, 10_000), (
        "its step is that of all"
    )
    assert estimate_alone_bytes(many, 10_000, 1) == estimate_alone_bytes(model, 10_000, 1), "a lone row decodes alone"
    assert estimate_request_transient(model, 1, 300, 64) == estimate_step_transient(TRANSIENT, 64, 301)


def test_batch_beyond_the_profile_is_charged_the_margin_reduction():
    model = Model("m", loaded=True, kv_per_token=10, forward=TRANSIENT, covered_rows=4, uncovered=GIB)
    model = replace(model, groups=(BatchGroup(3, 100, 300),))
    plain = replace(model, uncovered=0)
    assert estimate_request_transient(model, 50, 50) == estimate_request_transient(plain, 50, 50), (
        "the fourth row is covered"
    )
    wider = replace(model, groups=(BatchGroup(4, 100, 400),))
    assert (
        estimate_request_transient(wider, 50, 50)
        == estimate_request_transient(replace(wider, uncovered=0), 50, 50) + GIB
    )
    assert estimate_request_transient(model, 50, 50, 6) == estimate_request_transient(plain, 50, 50, 6) + GIB, (
        "five rows have a batch of their own"
    )
    assert estimate_request_need(wider, 50, 50) - estimate_request_need(replace(wider, uncovered=0), 50, 50) == GIB


def test_a_part_of_a_byte_is_a_byte():
    assert estimate_prefill_transient(TransientModel(fixed=0.25), 1, 0) == 1
    assert estimate_prefill_transient(TransientModel(logits=0.25), 1, 0, last=True) == 1
    assert estimate_step_transient(TransientModel(step_fixed=0.25), 1, 1) == 1


def test_only_so_many_tokens_share_the_last_forward_that_their_logits_take_16_mib():
    assert compute_last_chunk_tokens(TransientModel(logits=16 * 1024)) == 1024
    assert compute_last_chunk_tokens(TransientModel(logits=3 * MIB)) == 5
    assert compute_last_chunk_tokens(TransientModel(logits=64 * MIB)) == 1, (
        "the last token needs its logits whatever they take"
    )
    assert (
        compute_last_chunk_tokens(TransientModel()) == compute_last_chunk_tokens(TransientModel(logits=0.5)) == 16 * MIB
    )
    costly = replace(TRANSIENT, logits=2 * MIB)
    model = Model("m", loaded=True, forward=costly)
    assert (
        estimate_request_transient(model, 100, 1)
        == estimate_prefill_transient(costly, 8, 92, last=True)
        == 1000 + 16 * MIB
    )
    assert estimate_request_transient(model, 3, 1) == estimate_prefill_transient(costly, 3, 0, last=True)
    far = replace(costly, pair=50)
    assert estimate_request_transient(replace(model, forward=far), 10_000, 1) == estimate_prefill_transient(
        far, 256, 9744
    ), "the chunk"


def test_a_request_without_a_prompt_or_without_chunks_takes_a_step():
    model = Model("m", loaded=True, forward=TRANSIENT)
    assert estimate_request_transient(model, 0, 5) == estimate_step_transient(TRANSIENT, 1, 5)
    assert estimate_request_transient(model, 1, 0) == estimate_prefill_transient(TRANSIENT, 1, 0, last=True) == 1400
    unchunked = replace(model, forward=replace(TRANSIENT, floor=0))
    assert estimate_request_transient(unchunked, 100, 1) == estimate_step_transient(TRANSIENT, 1, 101)


def test_the_rows_of_a_request_step_in_the_batch_that_one_joins_and_in_one_of_their_own():
    forward = TransientModel(step_row=1000, step_seen=1)
    busy = Model(
        "m", loaded=True, kv_per_token=GIB, forward=forward, groups=(BatchGroup(2, 1000, 2000), BatchGroup(3, 50, 150))
    )
    assert estimate_request_transient(busy, 0, 40) == 4 * (1000 + 50), "it joins the shorter rows"
    assert estimate_request_transient(busy, 0, 40, 5) == 4 * (1000 + 50), "four of its own step by themselves"
    assert estimate_request_transient(busy, 0, 40, 7) == 6 * (1000 + 40)
    assert estimate_request_transient(busy, 0, 60) == 4 * (1000 + 60)
    equal = (BatchGroup(2, 100, 200), BatchGroup(3, 100, 300))
    assert estimate_request_transient(replace(busy, groups=equal), 0, 100) == 3 * (1000 + 100), "of equals the first"
    assert estimate_request_transient(replace(busy, groups=equal[::-1]), 0, 100) == 4 * (1000 + 100)
    alone = replace(busy, groups=())
    assert estimate_request_transient(alone, 0, 40, 5) == 5 * (1000 + 40)
    assert estimate_request_need(busy, 0, 40, 3) == (4 * 50 - 3 * 50 + 2 * 40) * GIB + 4 * (1000 + 50)


def test_alone_a_request_takes_weights_every_row_and_its_forward():
    model = Model("m", loaded=True, weights=5000, kv_per_token=10, forward=TRANSIENT)
    assert estimate_alone_bytes(model, 100, 20) == 5000 + 1200 + 41_000
    assert estimate_alone_bytes(model, 100, 20, 3) == 5000 + 3600 + 41_000
    memory = Memory(cap=50_000, margin=2000, base=800)
    assert can_ever_fit(memory, model, 100, 20)
    assert can_ever_fit(memory, model, 100, 19)
    assert not can_ever_fit(memory, model, 100, 20, 3)
    assert can_ever_fit(replace(memory, guard=False), model, 100, 20, 3)
    assert can_ever_fit(replace(memory, cap=52_400), model, 100, 20, 3)
    assert not can_ever_fit(replace(memory, cap=52_399), model, 100, 20, 3)


def test_the_longest_row_that_fits_is_prompt_and_answer_up_to_the_models_context():
    memory, model = Memory(cap=1000, margin=100, base=50), Model("m", weights=250, kv_per_token=2, context=4096)
    assert compute_max_context(memory, model) == 300
    assert compute_max_context(replace(memory, cap=1001), model) == 300
    assert compute_max_context(replace(memory, cap=1002), model) == 301
    assert compute_max_context(memory, replace(model, context=128)) == 128
    assert compute_max_context(memory, replace(model, context=0)) == 0
    assert compute_max_context(memory, replace(model, weights=850)) == 0
    assert compute_max_context(memory, replace(model, weights=2000)) == 0
    assert compute_max_context(memory, replace(model, weights=848)) == 1
    forward = TransientModel(token=3, floor=8)
    assert compute_max_context(memory, replace(model, forward=forward)) == 288, "a chunk of 8 takes 24 for a moment"


def test_a_batch_is_counted_in_rows_of_2048_tokens_or_of_the_models_context():
    model = Model("m", weights=500, kv_per_token=1, context=100_000)
    memory = Memory(cap=500 + 3 * 2048)
    assert compute_max_batch(memory, model, 8) == 3
    assert compute_max_batch(replace(memory, cap=memory.cap - 1), model, 8) == 2
    assert compute_max_batch(memory, model, 2) == 2
    assert compute_max_batch(memory, replace(model, context=1024), 8) == 6
    assert compute_max_batch(memory, replace(model, context=0), 8) == 3, "an unknown context"
    assert compute_max_batch(Memory(cap=500), model, 8) == 0
    forward = TransientModel(token=3, floor=4096)
    assert compute_max_batch(Memory(cap=500 + 2048 + 3 * 2047), replace(model, forward=forward), 8) == 1, (
        "the prompt is shorter"
    )
    assert compute_max_batch(Memory(cap=499 + 2048 + 3 * 2047), replace(model, forward=forward), 8) == 0


def test_estimate_request_need_uses_the_transient_of_older_nodes():
    assert estimate_request_need(Model("m", loaded=True, transient=7), 100, 1) == 7


def test_every_code_has_a_status() -> None:
    assert set(STATUS) == set(RefusalCode)
    assert Refused(RefusalCode.OVER_SHARE, "").status == 429
    assert Refused(RefusalCode.TOO_LARGE, "").final
    assert not Refused(RefusalCode.NO_ROOM, "").final


def test_a_load_is_judged_without_the_margin():
    memory = Memory(cap=100, ceiling=100, margin=10, phys=20, active=20, recent=20, reserved=5)
    assert isinstance(judge_load(memory, 75), Fits)
    refused = judge_load(memory, 76)
    assert isinstance(refused, Refused)
    assert refused.code is RefusalCode.NO_ROOM
    assert isinstance(judge(memory, 75), Refused)


def test_weights_may_take_the_cap_without_the_engines_own_base():
    assert compute_most_weights(Memory(cap=100, margin=10, base=7)) == 93


def test_reading_bytes_count_every_byte_of_a_text_as_a_token_and_the_tokenizers_files():
    assert estimate_tokenize_bytes(10_000) == TOKENIZE_BYTES_PER_TOKEN * 10_000
    assert estimate_tokenize_bytes(10_000, 5_000) == TOKENIZE_BYTES_PER_TOKEN * 10_000
    assert (
        estimate_tokenize_bytes(10_000, 5_000, loads=True)
        == TOKENIZE_BYTES_PER_TOKEN * 10_000 + TOKENIZER_LOAD_FACTOR * 5_000 + TOKENIZER_CODE_BYTES
    )
    assert (
        estimate_tokenize_bytes(10_000, 5_000, guides=True)
        == TOKENIZE_BYTES_PER_TOKEN * 10_000 + TOKENIZER_GUIDE_FACTOR * 5_000
    )
    both = estimate_tokenize_bytes(10_000, 5_000, loads=True, guides=True)
    assert (
        both
        == TOKENIZE_BYTES_PER_TOKEN * 10_000
        + (TOKENIZER_LOAD_FACTOR + TOKENIZER_GUIDE_FACTOR) * 5_000
        + TOKENIZER_CODE_BYTES
    )


def test_reading_bytes_beyond_the_context_count_as_rendered_text():
    context, text = 100_000, 2_000_000
    most = int(context * TOKENIZE_SLACK) + TOKENIZE_SLICE_CHARS
    assert estimate_tokenize_bytes(
        text, context=context
    ) == TOKENIZE_BYTES_PER_TOKEN * most + TOKENIZE_BYTES_PER_TEXT_BYTE * (text - most)
    assert estimate_tokenize_bytes(most, context=context) == TOKENIZE_BYTES_PER_TOKEN * most
    assert estimate_tokenize_bytes(10_000, context=context) == TOKENIZE_BYTES_PER_TOKEN * 10_000
    assert estimate_tokenize_bytes(text) == TOKENIZE_BYTES_PER_TOKEN * text


def test_estimate_tokenize_bytes_is_zero_below_the_unchecked_size():
    files = UNCHECKED_TOKENIZE_BYTES // TOKENIZER_GUIDE_FACTOR
    assert estimate_tokenize_bytes(0, files, guides=True) == 0
    assert estimate_tokenize_bytes(0, files + 1, guides=True) == UNCHECKED_TOKENIZE_BYTES + TOKENIZER_GUIDE_FACTOR
    assert estimate_tokenize_bytes(UNCHECKED_TOKENIZE_BYTES // TOKENIZE_BYTES_PER_TOKEN) == 0
    assert estimate_tokenize_bytes(0, loads=True) == TOKENIZER_CODE_BYTES


def test_rows_beyond_the_profile_are_charged_the_margin_reduction():
    model = Model("m", "f", True, GIB, 10, transient=100, covered_rows=2, uncovered=1000)
    assert estimate_request_transient(model, 10, 10, choices=2) == 100
    assert estimate_request_transient(model, 10, 10, choices=3) == 1100
    joins = replace(model, groups=(BatchGroup(rows=2, longest=20),))
    assert estimate_request_transient(joins, 10, 10, choices=1) == 1100
    assert estimate_request_transient(replace(joins, covered_rows=3), 10, 10, choices=1) == 100


def test_one_choice_adds_one_row():
    model = Model("m", "f", True, GIB, 10)
    assert estimate_request_need(model, 10, 10, choices=1) == compute_row_bytes(model.kv, 20)
    assert estimate_request_need(model, 10, 10, choices=3) == 3 * compute_row_bytes(model.kv, 20)


def test_window_limits_attended_tokens_to_existing_ones():
    transient = TransientModel(seen=1.0, step_seen=1.0, window=100)
    assert estimate_prefill_transient(transient, 10, 30) == 10 + 30
    assert estimate_prefill_transient(transient, 10, 300) == 10 + 100
    assert estimate_step_transient(transient, 2, 30, grows=False) == 2 * 30
    assert estimate_step_transient(transient, 2, 300, grows=False) == 2 * 100


def test_layers_count_where_they_take_more_than_the_logits():
    assert estimate_prefill_transient(TransientModel(token=10.0, logits=1.0), 5, 0, last=True) == 50
    assert estimate_prefill_transient(TransientModel(token=1.0, logits=10.0), 5, 0, last=True) == 50
    assert estimate_prefill_transient(TransientModel(token=1.0, logits=10.0), 5, 0) == 5


def test_a_known_transient_counts_where_no_forward_takes_more():
    model = Model("m", "f", True, GIB, 10, transient=5000, forward=TransientModel(token=1.0, floor=16))
    assert estimate_request_transient(model, 64, 8) == 5000
