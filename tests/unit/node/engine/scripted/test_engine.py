from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.engine.memory.gate import GateSite
from node.engine.process.crash_recorder import CrashRecorder
from node.engine.process.interface import MAX_CANCELLED_REMEMBERED
from node.engine.scripted.engine import ScriptedEngine
from node.settings import ScriptedSettings
from wire.capacity import arithmetic
from wire.capacity.arithmetic import KV_GROWTH_TOKENS, UNREADABLE
from wire.capacity.fairness import WeightedKey
from wire.codec import encode
from wire.frames import (
    Admitted,
    Cancel,
    CountTokens,
    Deltas,
    EngineReport,
    Failed,
    Finished,
    Frame,
    Generate,
    GenerationParams,
    LoadModel,
    MemoryLimits,
    Message,
    ProfileModel,
    ReclaimMemory,
    ReduceMemory,
    Refusal,
    UnloadModel,
)
from wire.refusals import FailureCode, RefusalCode
from wire.report import MemoryLevel
from wire.units import GIB, MIB, parse_size

STEP = 0.02
ROOMY = MemoryLimits(96 * GIB, 96 * GIB, 2 * GIB, "metal")


class CrashedError(Exception):
    pass


class Crashing(CrashRecorder):
    """A recorder that does not end the process."""

    def crash(self, model: str, request: int) -> None:
        raise CrashedError(model, request)


class Bench:
    """Drives the engine like its loop, with a clock of its own, and keeps all frames."""

    def __init__(self, limits: MemoryLimits | None = ROOMY, **changes: Any) -> None:
        self.settings = msgspec.convert(changes, ScriptedSettings)
        self.engine = ScriptedEngine(self.settings, Crashing())
        self.now = 1000.0
        self.said: dict[int, list[Frame]] = defaultdict(list)
        self.text: dict[tuple[int, int], str] = defaultdict(str)
        self.ids: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.steps: list[float] = []
        self.number = 0
        if limits is not None:
            self.engine.handle(limits, self.now)

    def ask(self, content: str = "hello there", number: int = 0, **fields: Any) -> int:
        self.number = number or self.number + 1
        params = GenerationParams(**{name: fields.pop(name) for name in list(fields) if name in PARAMS})
        request = Generate(
            self.number,
            self.number,
            f"r{self.number}",
            fields.pop("model", self.settings.model),
            (Message("user", content),),
            params,
            0,
            **fields,
        )
        self.keep(self.engine.handle(request, self.now))
        return self.number

    def cancel(self, number: int) -> None:
        self.keep(self.engine.handle(Cancel(number), self.now))

    def keep(self, frames: Iterable[Frame]) -> None:
        for frame in frames:
            encode(frame)
            if isinstance(frame, Deltas):
                self.steps.append(self.now)
                for delta in frame.deltas:
                    self.said[delta.request].append(frame)
                    self.ids[delta.request, delta.choice] += delta.ids
                    self.text[delta.request, delta.choice] += "".join(text for _, text in delta.pieces)
            else:
                self.said[frame.request].append(frame)  # type: ignore[attr-defined]

    def turn(self) -> bool:
        """Advance the clock to the next turn of the engine, and run it. Return False if only a frame can bring work."""
        due = self.engine.next_step_at(self.now)
        if due is None:
            return False
        self.now = max(self.now, due)
        for frames in self.engine.step(self.now):
            self.keep(frames)
        return True

    def run(self) -> None:
        while self.turn():
            pass

    def last(self, number: int) -> Frame:
        return self.said[number][-1]

    def finished(self, number: int) -> Finished:
        end = self.last(number)
        assert isinstance(end, Finished)
        return end

    def refused(self, number: int) -> Refusal:
        (end,) = [frame for frame in self.said[number] if isinstance(frame, Refusal)]
        return end

    def report(self) -> EngineReport:
        return self.engine.report(self.now)


PARAMS = {"max_tokens", "stop", "n", "seed", "temperature"}


def test_an_answer_from_admitted_to_finished():
    bench = Bench()
    number = bench.ask("one two three")
    assert bench.said[number] == [Admitted(number, 7)]
    bench.run()
    end = bench.finished(number)
    assert bench.text[number, 0].startswith("lorem ipsum dolor sit ")
    assert bench.ids[number, 0] == list(range(16))
    assert (end.reasons, end.prompt_tokens, end.completion_tokens) == (("stop",), 7, 16)
    assert bench.engine.report(bench.now).counts.prefill_tokens == 7
    assert end.timings.decode == pytest.approx(16 * STEP)


def test_tools_follow_the_settings_and_count_as_prompt_tokens():
    assert [Bench(tools=tools).report().models[0].features for tools in (False, True)] == [(), ("tools",)]
    bench = Bench(tools=True)
    number = bench.ask("one two three", tools='[{"type": "function", "function": {"name": "find"}}]')
    assert bench.said[number] == [Admitted(number, 12)]


def test_max_tokens_sets_the_length_and_the_reason():
    bench = Bench()
    number = bench.ask(max_tokens=40)
    bench.run()
    assert (bench.finished(number).reasons, bench.finished(number).completion_tokens) == (("length",), 40)


def test_an_echo_is_the_message_and_ends_by_itself():
    bench = Bench(text="echo")
    whole, cut = bench.ask("  so  it\n goes ", max_tokens=100), bench.ask("so it goes", max_tokens=2)
    silent = bench.ask("")
    bench.run()
    assert bench.text[whole, 0] == "  so  it\n goes "
    assert bench.finished(whole).reasons == ("stop",)
    assert (bench.text[cut, 0], bench.finished(cut).reasons) == ("so it", ("length",))
    assert (bench.text[silent, 0], bench.finished(silent).completion_tokens) == ("", 1)


def test_the_clock_text_has_the_times_of_the_steps():
    bench = Bench(text="clock", tokens=3)
    number = bench.ask()
    bench.run()
    assert [int(text) for text in bench.text[number, 0].split()] == [round(now * 1e9) for now in bench.steps]


def test_several_choices_are_several_rows_of_one_request():
    bench = Bench()
    number = bench.ask("a b", n=3, max_tokens=4)
    bench.run()
    assert [bench.text[number, choice].split()[0] for choice in range(3)] == ["lorem", "ipsum", "dolor"]
    assert bench.finished(number).reasons == ("length",) * 3
    assert bench.finished(number).completion_tokens == 12
    assert bench.finished(number).prompt_tokens == 6


def test_a_count_is_the_prompt_tokens_of_the_same_request():
    bench, tools = Bench(), '[{"type": "function", "function": {"name": "weather of a town"}}]'
    number = bench.ask("hello there", tools=tools, max_tokens=1)
    bench.run()
    asked = CountTokens(99, bench.settings.model, (Message("user", "hello there"),), 0, tools)
    (counted,) = bench.engine.handle(asked, bench.now)
    assert isinstance(counted, Finished)
    assert counted.prompt_tokens == bench.finished(number).prompt_tokens


def test_a_stop_string_across_deltas_ends_one_choice_and_is_not_shown():
    bench = Bench()
    number = bench.ask(n=2, max_tokens=10, stop=("m ipsum dol",))
    bench.run()
    assert bench.text[number, 0] == "lore"
    assert bench.text[number, 1].startswith("ipsum dolor sit")
    assert bench.finished(number).reasons == ("stop", "length")
    assert bench.finished(number).stops == ("m ipsum dol", "")
    assert bench.finished(number).completion_tokens == 3 + 10


def test_without_a_stream_the_tokens_of_half_a_second_are_sent_together():
    bench = Bench()
    number = bench.ask(max_tokens=40, stream=False)
    bench.run()
    (first, rest) = [frame.deltas[0].ids for frame in bench.said[number] if isinstance(frame, Deltas)]
    assert len(first) == pytest.approx(0.5 / STEP, abs=1)
    assert first + rest == tuple(range(40))


def test_text_held_back_for_a_stop_string_is_shown_when_the_answer_ends_without_it():
    bench = Bench()
    number = bench.ask(max_tokens=2, stop=("ipsum dolor",))
    bench.run()
    assert bench.text[number, 0] == "lorem ipsum "


def test_one_frame_serves_all_rows_of_a_step_at_absolute_deadlines():
    bench = Bench()
    numbers = [bench.ask(max_tokens=50) for _ in range(64)]
    while bench.engine.next_step_at(bench.now) == bench.now:
        bench.turn()
    while (due := bench.engine.next_step_at(bench.now)) is not None:
        bench.now = due + 0.013
        bench.turn()
    assert len(bench.steps) == 50
    assert bench.steps[-1] - bench.steps[0] == pytest.approx(49 * STEP, abs=2 * 0.013)
    assert all(bench.finished(number).completion_tokens == 50 for number in numbers)


def test_steps_missed_in_a_long_sleep_are_not_made_up_for():
    bench = Bench()
    bench.ask(max_tokens=20)
    while len(bench.steps) < 3:
        bench.turn()
    bench.now += 3600
    bench.run()
    assert bench.steps[4] - bench.steps[3] == pytest.approx(STEP)


def test_steps_that_take_no_time_decode():
    bench = Bench(step_ms=0)
    number = bench.ask(max_tokens=3)
    for _ in range(10):
        bench.turn()
    assert bench.ids[number, 0] == [0, 1, 2]
    assert isinstance(bench.last(number), Finished)


def test_more_rows_than_a_batch_wait_their_turn():
    bench = Bench(max_batch_size=2)
    numbers = [bench.ask(max_tokens=5) for _ in range(5)]
    while bench.engine.next_step_at(bench.now) == bench.now:
        bench.turn()
    assert (bench.report().running, bench.report().waiting, bench.report().queued_tokens) == (2, 3, 18)
    bench.run()
    ends = [bench.finished(number).timings.waiting for number in numbers]
    assert ends == pytest.approx([0, 0, 5 * STEP, 5 * STEP, 10 * STEP])


def test_an_idle_engine_needs_no_turn_and_its_recent_peak_expires():
    bench = Bench()
    bench.ask("x " * 4000, max_tokens=3)
    bench.run()
    assert bench.engine.next_step_at(bench.now) is None
    memory = bench.report().memory
    assert memory.recent == memory.active == memory.phys == 4 * GIB
    assert memory.headroom == (96 - 2 - 4) * GIB


def test_orders_about_its_one_model_are_answered():
    bench = Bench()
    said = [
        bench.engine.handle(order, bench.now)[0]
        for order in (
            LoadModel(1, "scripted-1"),
            LoadModel(2, "other"),
            UnloadModel(3, "scripted-1"),
            ProfileModel(4, "scripted-1"),
        )
    ]
    assert isinstance(said[0], Finished)
    assert [one.refused.code for one in said[1:] if isinstance(one, Refusal)] == [
        RefusalCode.NO_MODEL,
        RefusalCode.IN_USE,
        RefusalCode.UNSUPPORTED,
    ]


def test_the_report_has_padded_bytes_and_acknowledged_requests():
    bench = Bench()
    bench.ask("x " * 996, max_tokens=100)
    bench.turn()
    memory, model = bench.report().memory, bench.report().models[0]
    assert memory.active == 4 * GIB + 1000 * 131072
    assert memory.reserved == 100 * 131072
    assert (model.groups[0].rows, model.groups[0].longest) == (1, 1100)
    assert bench.report().acked_seq == 1
    assert memory.armed
    bench.run()
    assert bench.report().memory.reserved == 0


# refusals


def test_nothing_is_taken_before_the_first_limits():
    bench = Bench(limits=None)
    assert bench.refused(bench.ask(model="other")).refused.code is RefusalCode.NOT_READY


@pytest.mark.parametrize(
    ("fields", "code", "words"),
    [
        ({"model": "gpt"}, RefusalCode.NO_MODEL, "scripted-1, not gpt"),
        (
            {"content": "x " * 32764},
            RefusalCode.CONTEXT,
            "the prompt has 32768 tokens; the context of scripted-1 is 32768",
        ),
        ({"n": 10**9}, RefusalCode.UNSUPPORTED, "the limit of this node is 64"),
        ({"n": 0}, RefusalCode.INVALID, "at least 1"),
        ({"max_tokens": 0}, RefusalCode.INVALID, "at least 1"),
        ({"max_tokens": -(2**63)}, RefusalCode.INVALID, "at least 1"),
    ],
)
def test_an_impossible_request_is_refused_with_its_reason(fields: dict[str, Any], code: RefusalCode, words: str):
    bench = Bench()
    refused = bench.refused(bench.ask(**fields)).refused
    assert refused.code is code
    assert words in refused.message
    assert refused.final
    assert bench.report().memory.reserved == 0


def test_the_longest_prompt_that_leaves_one_token_is_answered_with_one():
    bench = Bench()
    number = bench.ask("x " * 32763)
    bench.run()
    assert (bench.finished(number).completion_tokens, bench.finished(number).reasons) == (1, ("length",))


def test_a_request_that_can_never_fit_is_refused_with_all_numbers():
    bench = Bench(MemoryLimits(36 * GIB, 36 * GIB, 5 * GIB, "metal"), weights="27.5GiB", kv_per_token=MIB)
    refused = bench.refused(bench.ask("x " * 16124, max_tokens=256)).refused
    assert refused.code is RefusalCode.TOO_LARGE
    assert refused.message.startswith(
        "needs 43.5 GiB (weights 27.5 GiB, 16384 tokens × 1), this node can give 31.0 GiB: "
    )
    assert refused.numbers is not None
    assert refused.numbers.predicted == int(43.5 * GIB) + 5 * GIB
    assert refused.numbers.predicted is not None
    assert refused.numbers.predicted > refused.numbers.ceiling == 36 * GIB
    assert refused.numbers.estimate == 16 * GIB


def test_what_does_not_fit_now_is_the_verdicts_own_answer():
    bench = Bench(MemoryLimits(20 * GIB, 20 * GIB, 2 * GIB, "static"), kv_per_token=MIB)
    first = bench.ask("x " * 9000, max_tokens=10)
    bench.turn()
    memory, model = bench.report().memory, bench.report().models[0]
    refused = bench.refused(bench.ask("x " * 8000, max_tokens=10)).refused
    assert refused == arithmetic.judge(memory, arithmetic.estimate_request_need(model, 8004, 10))
    assert refused.code is RefusalCode.NO_ROOM
    assert not refused.final
    bench.run()
    assert bench.finished(first).completion_tokens == 10


def test_a_prefill_that_lost_its_room_is_refused_and_gives_everything_back():
    bench = Bench()
    number = bench.ask("x " * 100)
    bench.engine.handle(MemoryLimits(96 * GIB, 3 * GIB, GIB, "leases"), bench.now)
    bench.run()
    assert bench.refused(number).refused.code is RefusalCode.NO_ROOM
    assert [type(frame) for frame in bench.said[number]] == [Admitted, Refusal]
    assert bench.report().memory.reserved == 0
    assert bench.engine.gate.refusals == {GateSite.PREFILL: 1}


def test_an_answer_longer_than_expected_commits_more_memory_or_ends():
    kv = MIB
    room = MemoryLimits(6 * GIB, 4 * GIB + GIB + 300 * kv, GIB, "static")
    bench = Bench(room, kv_per_token=kv)
    number = bench.ask("x " * 96, expected=10, max_tokens=1000)
    assert bench.report().memory.reserved == 110 * kv
    bench.run()
    end = bench.last(number)
    assert isinstance(end, Failed)
    assert end.code == "no_headroom"
    assert "became longer than expected" in end.message
    assert len(bench.ids[number, 0]) == 10 + 2 * KV_GROWTH_TOKENS
    assert bench.report().memory.reserved == 0
    assert bench.report().memory.active == 4 * GIB


def test_an_answer_that_runs_grows_where_the_memory_cannot_be_read_and_nothing_new_begins():
    bench = Bench(tokens=10)
    number = bench.ask(max_tokens=5 * KV_GROWTH_TOKENS, expected=10)
    bench.turn()
    bench.turn()
    bench.engine.handle(MemoryLimits(96 * GIB, 1, 2 * GIB, UNREADABLE), bench.now)
    refused = bench.refused(bench.ask()).refused
    assert refused.code is RefusalCode.UNREADABLE
    bench.run()
    assert bench.finished(number).completion_tokens == 5 * KV_GROWTH_TOKENS


@pytest.mark.parametrize(
    ("refuse", "content", "refuses"), [("*", "hi", True), ("no", "say no", True), ("no", "hi", False)]
)
def test_it_refuses_on_request_as_if_there_were_no_room(refuse: str, content: str, refuses: bool):
    bench = Bench(refuse=refuse)
    number = bench.ask(content)
    assert isinstance(bench.last(number), Refusal) is refuses
    if refuses:
        refused = bench.refused(number).refused
        assert refused.code is RefusalCode.NO_ROOM
        assert refused.numbers is not None
        assert refused.numbers.predicted is not None
        assert refused.numbers.predicted > refused.numbers.ceiling


def test_a_disabled_guard_refuses_nothing():
    bench = Bench(MemoryLimits(1, 1, 1, "setting", guard=False), refuse="*")
    number = bench.ask(max_tokens=2)
    bench.run()
    assert bench.finished(number)
    assert not bench.report().memory.armed


def test_it_crashes_on_request_at_the_first_decode_step():
    bench = Bench(crash="boom")
    bystander = bench.ask(max_tokens=100)
    number = bench.ask("go boom now")
    assert isinstance(bench.last(number), Admitted)
    with pytest.raises(CrashedError):
        bench.run()
    assert len(bench.ids[bystander, 0]) == 0


# cancelling


@pytest.mark.parametrize("delivered", [False, True])
def test_an_order_over_the_hard_limit_ends_the_newest_request(delivered: bool):
    bench = Bench()
    older = bench.ask(max_tokens=3)
    while not bench.steps:
        bench.turn()
    newest = bench.ask(max_tokens=3)
    while delivered and not bench.ids[newest, 0]:
        bench.turn()
    if not delivered:
        bench.cancel(older)
        bench.engine.step(bench.now)
    bench.keep(bench.engine.handle(ReduceMemory(4, MemoryLevel.OVER_SOFT), bench.now))
    assert (bench.report().enforced, bench.report().counts.sheds) == (4, 0)
    bench.keep(bench.engine.handle(ReduceMemory(5, MemoryLevel.OVER_HARD, 1), bench.now))
    assert (bench.report().enforced, bench.report().counts.sheds) == (5, 1)
    assert bench.report().memory.recent == bench.report().memory.active, "the memory before is no recent peak"
    end = bench.last(newest)
    assert isinstance(end, Failed if delivered else Refusal)
    assert not isinstance(end, Failed) or end.code == FailureCode.MEMORY_PRESSURE
    bench.run()
    assert bench.last(newest) is end
    assert not delivered or isinstance(bench.last(older), Finished)


def test_the_report_has_the_order_to_free_memory_and_the_expected_length_of_an_answer():
    bench = Bench(tokens=7)
    bench.keep(bench.engine.handle(ReclaimMemory(3, GIB), bench.now))
    assert bench.report().freed_order == 3
    assert [model.expected_output for model in bench.report().models] == [7]


def test_the_report_has_the_speeds_and_the_metal_limit_of_the_settings():
    report = Bench(step_ms=40, metal="48GiB").report()
    assert report.metal_limit == 48 * GIB
    assert report.models[0].decode_speed == pytest.approx(25)


def test_the_report_counts_a_preempted_request_as_waiting():
    bench = Bench(MemoryLimits(6 * GIB, 5 * GIB + 900 * MIB, GIB, "static"), kv_per_token=MIB)
    for _ in range(2):
        bench.ask("x " * 96, expected=10, max_tokens=700)
    while not bench.report().counts.preemptions:
        assert bench.turn()
    report = bench.report()
    assert report.waiting == 2 - report.running > 0


def test_a_cancel_is_final_in_every_phase():
    bench = Bench(max_batch_size=1)
    running, waiting = bench.ask(max_tokens=100), bench.ask(max_tokens=100)
    while not bench.steps:
        bench.turn()
    bench.cancel(waiting)
    bench.cancel(running)
    said = len(bench.said[running])
    bench.run()
    assert len(bench.said[running]) == said
    assert bench.said[waiting] == [Admitted(waiting, 6)]
    assert bench.report().memory.reserved == 0
    assert (bench.report().running, bench.report().waiting) == (0, 0)


def test_a_cancel_that_comes_first_drops_the_request_and_still_acknowledges_it():
    bench = Bench()
    bench.cancel(7)
    bench.ask(number=7)
    assert bench.said[7] == []
    assert bench.report().acked_seq == 7
    bench.ask(number=7)
    assert bench.said[7] == [Admitted(7, 6)]


def test_no_more_cancels_are_remembered_than_fit():
    bench = Bench()
    for number in range(1, MAX_CANCELLED_REMEMBERED + 2):
        bench.cancel(number)
    bench.ask(number=1)
    bench.ask(number=2)
    assert isinstance(bench.last(1), Admitted)
    assert bench.said[2] == []


def test_a_number_that_is_live_is_not_begun_twice():
    bench = Bench()
    bench.ask(number=5, max_tokens=2)
    bench.ask(number=5, max_tokens=9)
    bench.run()
    assert [type(frame) for frame in bench.said[5]] == [Admitted, Deltas, Deltas, Finished]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 3000), st.integers(1, 60), st.integers(1, 3)),
        st.tuples(st.just("cancel"), st.integers(1, 14), st.just(0), st.just(0)),
        st.tuples(st.just("turns"), st.integers(1, 30), st.just(0), st.just(0)),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(ACTIONS, st.integers(1, 8), st.integers(1, 80), st.sampled_from(["5GiB", "6GiB", "8GiB", "20GiB"]))
def test_every_request_ends_once_and_no_byte_is_written_without_room(
    actions: list[tuple[str, int, int, int]], batch: int, expected: int, ceiling: str
):
    top = parse_size(ceiling)
    bench = Bench(MemoryLimits(top, top, 512 * MIB, "static"), max_batch_size=batch, kv_per_token=MIB)
    asked: set[int] = set()
    cancelled: set[int] = set()

    def check() -> None:
        memory = bench.report().memory
        assert memory.active + memory.reserved <= max(top - 512 * MIB, bench.engine.report(0).models[0].weights)
        assert memory.reserved >= 0

    for name, first, second, third in actions:
        if name == "ask":
            asked.add(bench.ask("x " * first, max_tokens=second, n=third, expected=expected))
        elif name == "cancel":
            cancelled.add(first)
            bench.cancel(first)
        else:
            for _ in range(first):
                bench.turn()
                check()
        check()
    bench.run()
    memory = bench.report().memory
    assert (memory.reserved, memory.active) == (0, 4 * GIB)
    for number in asked:
        ends = [frame for frame in bench.said[number] if isinstance(frame, Finished | Refusal | Failed)]
        assert len(ends) <= 1
        assert ends or number in cancelled
        if ends:
            assert bench.said[number][-1] is ends[0]
        if ends and isinstance(ends[0], Finished):
            assert isinstance(bench.said[number][0], Admitted)
            ids = [len(found) for (request, _), found in bench.ids.items() if request == number]
            assert ends[0].completion_tokens == sum(ids)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4000), st.integers(1, 500)), max_size=12), st.integers(0, 4000), st.integers(1, 4)
)
def test_gate_and_router_agree_on_the_same_report(others: list[tuple[int, int]], words: int, choices: int):
    bench = Bench(MemoryLimits(12 * GIB, 12 * GIB, GIB, "static"), kv_per_token=MIB)
    for length, output in others:
        bench.ask("x " * length, max_tokens=output)
        bench.turn()
    report = bench.report()
    need = arithmetic.estimate_request_need(report.models[0], words + 4, 50, choices)
    fits = isinstance(arithmetic.judge(report.memory, need), arithmetic.Fits)
    number = bench.ask("x " * words, max_tokens=50, n=choices)
    assert isinstance(bench.last(number), Admitted) is fits


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 9}, {"stop": ("amet con",)}, {"n": 2}])
def test_an_answer_continues_at_every_cut_of_another_node(fields: dict[str, Any]):
    whole = Bench(tokens=12)
    number = whole.ask(**fields)
    whole.run()
    choices = range(fields.get("n", 1))
    for cut in range(1, len(whole.ids[number, 0]) + 1):
        first, second = Bench(tokens=12), Bench(tokens=12)
        begun = first.ask(**fields)
        while len(first.ids[begun, 0]) < cut:
            first.turn()
        known = tuple(tuple(first.ids[begun, choice]) for choice in choices)
        again = second.ask(resume=known, **fields)
        assert second.said[again][0] == Admitted(again, 6)
        second.run()
        for choice in choices:
            assert first.ids[begun, choice] + second.ids[again, choice] == whole.ids[number, choice]
            assert first.text[begun, choice] + second.text[again, choice] == whole.text[number, choice]
        end, undisturbed = second.finished(again), whole.finished(number)
        assert (end.reasons, end.completion_tokens) == (undisturbed.reasons, undisturbed.completion_tokens)
        assert second.report().memory.reserved == 0


def test_rows_are_given_fairly_to_those_who_wait_for_them():
    bench = Bench(max_batch_size=2)
    greedy = [bench.ask(weighted_key=WeightedKey("greedy")) for _ in range(8)]
    ada = bench.ask(weighted_key=WeightedKey("ada"))
    while not isinstance(bench.last(ada), Finished):
        assert bench.turn()
    assert sum(isinstance(bench.last(number), Finished) for number in greedy) <= 3, "six of them wait for her"


def test_an_answer_that_was_begun_elsewhere_gets_the_next_row():
    bench = Bench(max_batch_size=1)
    before = [bench.ask() for _ in range(4)]
    begun = bench.ask(resume=((0, 1),))
    while not isinstance(bench.last(begun), Finished):
        assert bench.turn()
    assert sum(isinstance(bench.last(number), Finished) for number in before) <= 1
