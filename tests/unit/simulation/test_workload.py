"""Draws of a workload: pace, order, lengths, sessions and texts of conversations."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from simulation import workload
from simulation.mac.hardware import CHIPS, compute_prefill_speed
from simulation.scenario import Scenario, ScenarioError, read_scenario
from simulation.workload import SimulatedConversation, draw_conversations

BASE = """
about = "Two kinds of Macs."
seconds = 1000
[[models]]
name = "chat"
weights = "4GiB"
kv_per_token = "128KiB"
active = 8.0
context = 8000
[[models]]
name = "tiny"
weights = "1GiB"
kv_per_token = "64KiB"
active = 1.0
[[nodes]]
name = "mini"
count = 3
chip = "M4"
memory = "24GiB"
[[nodes]]
name = "studio"
chip = "M2 Ultra"
memory = "64GiB"
models = ["tiny"]
"""
FIXED = "prompt = { median = 1000.5, sigma = 0.0 }\noutput = { median = 100.5, sigma = 0.0 }\n"


def scenario(*loads: str, base: str = BASE) -> Scenario:
    return read_scenario(base + "".join(f"[[load]]\n{load}\n" for load in loads))


def draw(*loads: str, seed: int = 1, base: str = BASE) -> list[SimulatedConversation]:
    return draw_conversations(scenario(*loads, base=base), seed, Path())


def test_a_share_is_of_the_macs_with_the_model_and_counts_all_turns():
    speed = 3 * compute_prefill_speed(CHIPS["M4"], 8.0)
    for turns in (1, 4):
        talks = draw(f'model = "chat"\nshare = 5\nturns = {turns}\n{FIXED}')
        assert len(talks) / 1000 == pytest.approx(5 * speed / (1000 * turns), rel=0.15)


@pytest.mark.parametrize(("bursts", "moments"), [(1, 3000), (10, 300)])
def test_a_rate_counts_conversations_and_not_bursts(bursts: int, moments: int):
    talks = draw(f'model = "chat"\nrate = 3\nbursts = {bursts}\n{FIXED}')
    assert len(talks) == pytest.approx(3000, rel=0.15)
    assert len({talk.at for talk in talks}) == pytest.approx(moments, rel=0.15)
    assert talks[0].at > 0
    assert talks[-1].at < 1000


def test_a_load_that_ends_after_the_scenario_ends_with_it():
    talks = draw(f'model = "chat"\nrate = 1\nbegins = 400\nends = 5000\n{FIXED}')
    assert 400 < talks[0].at < 450
    assert 950 < talks[-1].at < 1000


def test_loads_are_drawn_independently_and_numbered_by_their_start():
    load = f'model = "chat"\nrate = 1\n{FIXED}'
    talks = draw(f'{load}key = "ada"\n', f'{load}key = "bob"\n')
    starts = {key: [talk.at for talk in talks if talk.turns[0].key == key] for key in ("ada", "bob")}
    assert starts["ada"] != starts["bob"]
    assert len(starts["ada"]) > 900 < len(starts["bob"])
    assert [talk.at for talk in talks] == sorted(talk.at for talk in talks)
    assert [talk.turns[0].id for talk in talks] == [f"r{number}" for number in range(len(talks))]
    alone = [talk.at for talk in draw(f'{load}key = "ada"\n')]
    assert starts["ada"] == alone, "another load changes no draw"


def test_the_texts_of_a_conversation_are_its_prompts_and_answers():
    talks = [talk for talk in draw(f'model = "chat"\nrate = 1\nturns = 3\n{FIXED}') if len(talk.turns) > 2]
    assert len(talks) > 100
    for talk in talks:
        session = talk.turns[0].session
        for number, turn in enumerate(talk.turns):
            assert (turn.session, turn.output) == (session, 100)
            assert turn.prompt == 1000 * (number + 1) + 100 * number
            texts = [(f"{session} {place}", 100 if place % 2 else 1000) for place in range(2 * number + 1)]
            assert turn.conversation == tuple(texts)
        assert [turn.id.partition(".")[2] for turn in talk.turns] == [str(number) for number in range(len(talk.turns))]
    assert len({talk.turns[0].session for talk in talks}) == len(talks)


def test_single_requests_share_no_text_and_state_their_limit():
    talks = draw(f'model = "chat"\nrate = 1\nmax_tokens = 30\n{FIXED}')
    assert {len(talk.turns) for talk in talks} == {1}
    turns = [talk.turns[0] for talk in talks]
    assert {(turn.session, turn.conversation, turn.max_tokens, turn.output) for turn in turns} == {("", (), 30, 30)}
    sizes = [turn.bytes / turn.prompt for turn in turns]
    assert sum(sizes) / len(sizes) == pytest.approx(4.0, rel=0.05)
    assert len(set(sizes)) > 500


def test_prompts_and_answers_fit_into_the_context():
    long = "prompt = { median = 7000, sigma = 1.0 }\noutput = { median = 9000, sigma = 0.0, most = 9000 }\n"
    talks = draw(f'model = "chat"\nrate = 1\nturns = 3\n{long}')
    turns = [turn for talk in talks for turn in talk.turns]
    assert {turn.output for turn in turns} == {2000}, "a quarter of the context"
    assert max(turn.prompt + turn.output for turn in turns) == 7999
    for talk in talks:
        assert all(after.prompt > before.prompt + before.output for before, after in pairwise(talk.turns))


def test_a_trace_has_its_own_times_sessions_and_limits(tmp_path: Path):
    lines = [
        {"at": 5, "prompt": 9000, "output": 50},
        {"at": 1, "prompt": 100, "output": 5000, "session": "s"},
        {"at": 990, "prompt": 1, "output": 1},
        {"at": 2, "prompt": 0, "output": 0},
    ]
    (tmp_path / "t.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    talks = draw_conversations(scenario('model = "chat"\ntrace = "t.jsonl"\nbegins = 10'), 1, tmp_path)
    assert [
        (talk.at, turn.id, turn.prompt, turn.output, turn.session, turn.conversation)
        for talk in talks
        for turn in talk.turns
    ] == [
        (11, "r0", 100, 2000, "s", (("s", 100),)),
        (12, "r1", 1, 1, "", ()),
        (15, "r2", 8000 - 50 - 1, 50, "", ()),
    ]
    (limited,) = draw_conversations(
        scenario('model = "chat"\ntrace = "t.jsonl"\nbegins = 994\nmax_tokens = 40'), 1, tmp_path
    )[1:2]
    assert (limited.turns[0].output, limited.turns[0].max_tokens) == (1, 40)


def test_more_conversations_than_the_limit_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "t.jsonl").write_text('{"at": 1, "prompt": 9, "output": 9}\n' * 3)
    made = scenario('model = "chat"\ntrace = "t.jsonl"')
    for most, count in ((3, 3), (2, 0)):
        monkeypatch.setattr(workload, "MAX_REQUESTS", most)
        if count:
            assert len(draw_conversations(made, 1, tmp_path)) == count
        else:
            with pytest.raises(ScenarioError, match="load 1: more than 2 conversations"):
                draw_conversations(made, 1, tmp_path)
