from pathlib import Path

import pytest

from router.placement.policies import POLICIES
from simulation.routers import CLAIRVOYANT, NAMES
from simulation.run import load, select_policies
from simulation.scenario import ScenarioError, read_scenario
from simulation.workload import draw_conversations

MODEL = """
[[models]]
name = "chat"
weights = "4GiB"
kv_per_token = "128KiB"
active = 8.0
"""
GOOD = f"""
about = "One."
seconds = 10
{MODEL}
[[nodes]]
name = "mini"
count = 2
chip = "M4"
memory = "24GiB"
loaded = ["chat"]

[[load]]
model = "chat"
rate = 1
"""


def test_a_scenario_is_read():
    scenario = read_scenario(GOOD)
    assert scenario.list_node_names() == ["mini-1", "mini-2"]
    assert scenario.get_model("chat").context == 32_768


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("seconds = 10", "seconds = 0", r"`float` > 0.*\$\.seconds"),
        ("seconds = 10", "secnds = 10", "secnds"),
        ("seconds = 10", "seconds = inf", r"`float` <= .*\$\.seconds"),
        ("rate = 1", "rate = 1\nturns = inf", r"`float` <= .*\$\.load\[0\]\.turns"),
        ("rate = 1", "rate = 1\nprompt = { median = 9, sigma = 1e5 }", r"`float` <= .*\$\.load\[0\]\.prompt\.sigma"),
        ("about", "about = [", "not valid TOML"),
        ('chip = "M4"', 'chip = "M9"', "node mini: chip 'M9' is not one of M1, "),
        ('memory = "24GiB"', 'memory = "lots"', "node mini: memory: 'lots' is not a size"),
        (
            'memory = "24GiB"',
            'memory = "24GiB"\ndisk = "0GB"',
            "node mini: disk is '0GB' per second, at least 1 byte is",
        ),
        (
            "seconds = 10",
            "seconds = 10\nreport_seconds = 3.1",
            "report_seconds is 3.1, at most 3: the router sends no ",
        ),
        ('loaded = ["chat"]', 'loaded = ["cat"]', "node mini: there is no model 'cat', only chat"),
        (
            "[[nodes]]",
            f"{MODEL.replace('chat', 'tiny')}\n[[nodes]]\nmodels = ['tiny']",
            "node mini: 'chat' is loaded, but not one of its models tiny",
        ),
        ("count = 2", "count = 30000", "<= 20000"),
        ("rate = 1", "rate = 1\nshare = 1", "load 1: 2 of rate, share and trace are given"),
        ("rate = 1", "rate = 0", "load 1: 0 of rate, share and trace are given"),
        ("rate = 1", "rate = 1\nprompt = { median = 10, least = 9, most = 3 }", "least 9 above most 3"),
        (
            "rate = 1",
            'rate = 1\n[[events]]\nat = 3\nnode = "mini"\ndoes = "dies"',
            "event at 3 s: there is no node 'mini'",
        ),
        ('model = "chat"', 'model = "cat"', "load 1: there is no model 'cat', only chat"),
    ],
)
def test_an_invalid_scenario_is_an_error_with_its_place(old: str, new: str, words: str):
    assert old in GOOD
    with pytest.raises(ScenarioError, match=words):
        read_scenario(GOOD.replace(old, new, 1))


def test_names_are_there_once():
    nodes = GOOD[GOOD.index("[[nodes]]") : GOOD.index("[[load]]")]
    with pytest.raises(ScenarioError, match="node mini-1 occurs twice"):
        read_scenario(GOOD + nodes)


def test_files_and_policies_are_named_in_errors(tmp_path: Path):
    with pytest.raises(ScenarioError, match="nowhere is neither a file nor one of household, lab"):
        load("nowhere")
    (tmp_path / "x.toml").write_bytes(b"\xff")
    with pytest.raises(ScenarioError, match="cannot be read"):
        load(str(tmp_path / "x.toml"))
    with pytest.raises(ScenarioError, match="no policy 'best'; there are balanced, "):
        select_policies(read_scenario(GOOD), ["best"])


def test_select_policies_accepts_the_names_of_the_setting():
    assert select_policies(read_scenario(GOOD), list(POLICIES)) == [CLAIRVOYANT, *NAMES[: len(POLICIES)]]
    assert select_policies(read_scenario(GOOD), ["linear", CLAIRVOYANT, "linear"]) == [CLAIRVOYANT, "linear"]
    assert select_policies(read_scenario(GOOD), ["most_headroom"]) == [CLAIRVOYANT, "most-headroom"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"at": 1}', "line 1 of 1: Object missing required field"),
        ("no", "line 1 of 1: "),
    ],
)
def test_a_bad_trace_is_an_error_with_its_line(tmp_path: Path, line: str, words: str):
    (tmp_path / "t.jsonl").write_text(line + "\n")
    scenario = read_scenario(GOOD.replace("rate = 1", 'trace = "t.jsonl"'))
    with pytest.raises(ScenarioError, match=words):
        draw_conversations(scenario, 1, tmp_path)
    with pytest.raises(ScenarioError, match=r"trace t\.jsonl: No such file"):
        draw_conversations(scenario, 1, tmp_path / "else")


def test_requests_of_a_trace_begin_before_the_end_of_the_scenario(tmp_path: Path):
    (tmp_path / "t.jsonl").write_text("".join(f'{{"at": {at}, "prompt": 9, "output": 9}}\n' for at in (0, 5.5, 6, 9)))
    scenario = read_scenario(GOOD.replace("rate = 1", 'trace = "t.jsonl"\nbegins = 4'))
    assert [talk.at for talk in draw_conversations(scenario, 1, tmp_path)] == [4, 9.5]


@pytest.mark.parametrize(
    ("load", "count"),
    [
        ("rate = 20", 2000),
        ("rate = 20\nbursts = 5", 2000),
        ("rate = 20\nends = 25", 500),
        ("rate = 20\nbegins = 75", 500),
    ],
)
def test_conversations_begin_at_the_rate_between_begin_and_end(load: str, count: int):
    scenario = read_scenario(GOOD.replace("rate = 1", load).replace("seconds = 10", "seconds = 100"))
    talks = draw_conversations(scenario, 1, Path())
    assert 0.8 * count < len(talks) < 1.25 * count
    moments = [talk.at for talk in talks]
    assert ("ends" in load) == (max(moments) < 25)
    assert ("begins" in load) == (min(moments) >= 75)
    assert len(moments) / len(set(moments)) > 4.9 if "bursts" in load else len(moments) == len(set(moments))


def test_a_share_is_of_the_prefill_speed_of_all_macs():
    one, two = (
        len(
            draw_conversations(
                read_scenario(
                    GOOD.replace("rate = 1", "share = 1")
                    .replace("count = 2", f"count = {count}")
                    .replace("seconds = 10", "seconds = 3000")
                ),
                1,
                Path(),
            )
        )
        for count in (1, 2)
    )
    assert 1.7 < two / one < 2.3


def test_an_answer_is_limited_by_the_request_and_by_a_quarter_of_the_context():
    load = "rate = 20\noutput = { median = 30000, sigma = 0.1, most = 60000 }"
    for limit, most in (("", 32_768 // 4), ("\nmax_tokens = 50", 50)):
        scenario = read_scenario(GOOD.replace("rate = 1", load + limit))
        assert {talk.turns[0].output for talk in draw_conversations(scenario, 1, Path())} == {most}


def test_the_same_seed_draws_the_same_and_another_something_else():
    scenario = read_scenario(GOOD.replace("rate = 1", "rate = 1\nturns = 4"))

    def drawn(seed: int) -> list[tuple[float, int, int]]:
        return [
            (talk.at, turn.prompt, turn.output)
            for talk in draw_conversations(scenario, seed, Path())
            for turn in talk.turns
        ]

    assert drawn(1) == drawn(1) != drawn(2)


def test_prompts_of_a_conversation_grow_by_earlier_turns_and_fit_the_context():
    scenario = read_scenario(GOOD.replace("rate = 1", "rate = 2\nturns = 40\nprompt = { median = 3000 }"))
    talks = draw_conversations(scenario, 1, Path())
    assert any(len(talk.turns) > 3 for talk in talks)
    for talk in talks:
        for before, after in zip(talk.turns, talk.turns[1:], strict=False):
            assert after.prompt > before.prompt + before.output
            assert after.conversation[: len(before.conversation)] == before.conversation
        assert all(turn.prompt + turn.output < 32_768 for turn in talk.turns)
