"""The modelled Mac decides like a real one, and spends the memory and time that it states."""

from hypothesis import given
from hypothesis import strategies as st

from simulation.clock import VirtualLoop
from simulation.mac.simulated_node import SimulatedNode
from simulation.scenario import ModelSpec, NodeSpec
from simulation.workload import ConversationTurn
from wire.capacity.arithmetic import Fits, estimate_request_need, judge
from wire.capacity.batches import compute_row_bytes
from wire.capacity.fairness import WeightedKey
from wire.frames import Admitted, Cancel, Deltas, Finished, Frame, Generate, GenerationParams, Refusal
from wire.units import GIB, MIB

ADA, BOB = WeightedKey("ada"), WeightedKey("bob")


class Mac:
    def __init__(self, **spec: object) -> None:
        self.loop = VirtualLoop()
        self.said: list[Frame] = []
        self.turns: dict[str, ConversationTurn] = {}
        model = ModelSpec(name="chat", weights="4GiB", kv_per_token="1MiB", active=8.0)
        node = NodeSpec(**{"name": "mini", "chip": "M4", "memory": "24GiB", "loaded": ("chat",)} | spec)  # pyright: ignore
        self.changes = 0
        self.machine = SimulatedNode(
            "mini",
            node,
            (model,),
            self.loop,
            send=self.said.append,
            turn_of=self.turns.__getitem__,
            changed=self._count_change,
        )

    def _count_change(self) -> None:
        self.changes += 1

    def ask(self, number: int, prompt: int, output: int = 10, key: WeightedKey = ADA, session: str = "") -> None:
        name = f"r{number}"
        self.turns[name] = ConversationTurn(name, "k", "chat", prompt, output, prompt * 4, None, 0.0, session)
        self.machine.take(Generate(number, number, f"r{number}", "chat", (), GenerationParams(), 0, weighted_key=key))

    def run(self, seconds: float) -> None:
        async def wait() -> None:
            import asyncio

            await asyncio.sleep(seconds)

        self.loop.run_until_complete(wait())

    def kinds(self) -> list[str]:
        return [type(frame).__name__ for frame in self.said]


@given(st.integers(1, 12_000))
def test_it_admits_requests_that_fit_by_its_report(prompt: int):
    mac = Mac()
    mac.ask(1, 2000, 100)
    report = mac.machine.report()
    fits = isinstance(judge(report.memory, estimate_request_need(report.models[0], prompt, 256)), Fits)
    mac.ask(2, prompt, 100)
    assert isinstance(mac.said[-1], Admitted if fits else Refusal)
    mac.machine.stop()
    mac.loop.close()


def test_a_request_is_answered_and_leaves_nothing():
    mac = Mac()
    before = mac.machine.report().memory
    mac.ask(1, 1000)
    mac.run(60)
    assert mac.kinds() == ["Admitted", "Deltas", "Deltas", "Finished"]
    told = sum(len(delta.ids) for frame in mac.said if isinstance(frame, Deltas) for delta in frame.deltas)
    assert told == 10
    assert isinstance(mac.said[-1], Finished)
    assert mac.said[-1].completion_tokens == 10
    after = mac.machine.report().memory
    assert (after.phys, after.reserved, after.headroom) == (before.phys, before.reserved, before.headroom)
    mac.loop.close()


def test_the_newest_is_preempted_for_an_answer_above_its_estimate_and_resumes():
    mac = Mac()
    room = mac.machine.read_memory().headroom or 0
    tokens = (room // MIB - 2 * 256 - 400) // 2
    mac.ask(1, tokens, 900)
    mac.ask(2, tokens, 900)
    while not mac.machine.preemptions:
        mac.run(0.1)
    assert mac.changes == mac.machine.preemptions, "memory is free for other requests"
    engine = mac.machine.report().engine
    assert (engine.running, engine.waiting, mac.machine.dirty) == (1, 1, True)
    mac.run(600)
    ends = [frame.request for frame in mac.said if isinstance(frame, Finished)]
    assert ends == [1, 2]
    assert mac.changes == mac.machine.preemptions + 2
    assert not mac.machine.list_sequences()
    mac.loop.close()


def test_a_cancel_and_a_lease_give_back_what_they_took():
    mac = Mac()
    mac.ask(1, 3000)
    mac.machine.take(Cancel(1))
    assert not mac.machine.list_sequences()
    assert mac.changes == 1
    room = mac.machine.read_memory().headroom
    mac.machine.report()
    assert not mac.machine.dirty
    assert not mac.machine.change_lease(200 * GIB)
    assert not mac.machine.dirty
    assert mac.machine.change_lease(2 * GIB)
    assert (mac.machine.dirty, mac.changes) == (True, 1)
    assert mac.machine.read_memory().headroom == (room or 0) - 2 * GIB
    mac.machine.change_lease(-2 * GIB)
    assert mac.changes == 2, "memory is free for other requests"
    assert mac.machine.read_memory().headroom == room
    mac.machine.stop()
    mac.loop.close()


def test_an_ended_chat_is_cached_with_its_answer_and_its_next_turn_makes_it_the_newest():
    mac = Mac()
    model = mac.machine.models["chat"]
    for number, session in enumerate("ab", 1):
        mac.ask(number, 400, 40, session=session)
        mac.run(60)
    assert (model.holds, model.idle) == (0, True)
    cache = mac.machine.report().engine.cache
    assert (cache.entries, cache.nbytes) == (2, 2 * compute_row_bytes(model.model.kv, 440))
    mac.ask(3, 1000, session="a")
    admitted = mac.said[-1]
    assert isinstance(admitted, Admitted)
    assert (admitted.cached_tokens, admitted.prompt_hash) == (440, b"a")
    engine = mac.machine.report().engine
    assert (engine.waiting, engine.queued_tokens) == (1, 1000 - 440)
    mac.machine.take(Cancel(3))
    room = mac.machine.read_memory().headroom or 0
    assert mac.machine.change_lease(room + MIB)
    assert mac.machine.report().engine.cache.evicted == (b"b",)
    mac.machine.stop()
    mac.loop.close()


def test_a_model_is_read_in_before_the_first_token_and_its_weights_are_counted_meanwhile():
    mac = Mac(loaded=(), disk="1GB")
    mac.ask(1, 100)
    mac.run(2)
    report = mac.machine.report()
    assert report.models[0].loading
    assert 0.3 < report.models[0].progress < 0.6
    assert report.memory.reserved > 2 * GIB
    assert mac.kinds() == ["Admitted"]
    mac.run(10)
    assert mac.kinds()[-1] == "Finished"
    mac.loop.close()


def test_rows_are_shared_between_keys():
    mac = Mac(batch=2)
    for number in range(1, 7):
        mac.ask(number, 200)
    mac.ask(7, 200, key=BOB)
    mac.run(600)
    ends = [frame.request for frame in mac.said if isinstance(frame, Finished)]
    assert ends.index(7) <= 3, "four of hers had no row when his request came"
