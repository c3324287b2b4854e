import json
import pkgutil
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import mlx_lm.tool_parsers
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.generate import TextStateMachine

from node.engine.text import tokenizer_loader
from node.engine.text.call_repairs import CALL_ENDS
from node.engine.text.detokenizer import Pieces, TextPipeline, TokenOutput
from node.engine.text.markers import MarkerSet
from node.engine.text.pipeline_parts import MarkCutter
from node.engine.text.stop_strings import StopStrings
from node.engine.text.tokenizer import Tokenizer
from node.engine.text.tool_call_parser import MAX_BLOCK_CHARS, ToolCallParser
from tests.support.engine import vocabulary
from wire.bounds import MAX_CALL_BYTES
from wire.frames import Channel

TRANSCRIPTS = Path(__file__).parent / "transcripts"
PARSERS = sorted(module.name for module in pkgutil.iter_modules(mlx_lm.tool_parsers.__path__))
TOOLS = json.dumps([{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}])
MARKUP = MarkerSet(("<think>", "</think>"), ("<call>", "</call>"))
LOOK = '<call>{"name": "look", "arguments": {"at": "x"}}</call>'


class Read(NamedTuple):
    """The complete answer at a client, and its finish reason."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[dict, ...] = ()
    reason: str = "stop"


class Spelled:
    """A decoder whose ids are indices of a list of pieces."""

    def __init__(self, pieces: list[str]) -> None:
        self._pieces = pieces

    def feed(self, token: int) -> str:
        return self._pieces[token]

    def flush(self) -> str:
        return ""


def parse(block: str, tools: list[object]) -> object:
    return json.loads(block)


def pipeline(
    pieces: list[str],
    stops: Iterable[str] = (),
    thinking: bool = False,
    tools: bool = True,
    markup: MarkerSet = MARKUP,
    parser=parse,
    one_call: bool = False,
) -> TextPipeline:
    place = markup.get_start_place(thinking)
    calls = ToolCallParser("call_r_", parser if tools else None, [[{}]], markup.call[1])
    cutter = MarkCutter(TextStateMachine(markup.build_transitions(tools)), place)
    return TextPipeline(Spelled(pieces), cutter, place, StopStrings(stops), calls, one_call=one_call)


def gathered(pieces: Pieces, reason: str) -> Read:
    def of(wanted: Channel) -> list[str]:
        return [text for channel, text in pieces if channel is wanted]

    calls = tuple(json.loads(text) for text in of(Channel.TOOL_CALL))
    return Read("".join(of(Channel.CONTENT)), "".join(of(Channel.REASONING)), calls, reason)


def run(made: TextPipeline, ids: Iterable[int], reason: str = "stop") -> Read:
    pieces: Pieces = ()
    for token in ids:
        step = made.feed(token)
        pieces += step.pieces
        if step.stopped:
            reason = "stop"
            break
    last, reason = made.finish(reason)
    return gathered(pieces + last, reason)


def read(text: str, reason: str = "stop", **how) -> Read:
    """Parse a text at once and letter by letter; both results must be the same."""
    whole = run(pipeline([text], **how), [0], reason)
    assert run(pipeline(list(text), **how), range(len(text)), reason) == whole
    return whole


def call(index: int = 0, name: str = "look", arguments: str = '{"at": "x"}') -> dict:
    return {"index": index, "id": f"call_r_{index}", "name": name, "arguments": arguments}


# reasoning


@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("<think>\nhm\n\nso\n</think>\n\nyes", False, Read("yes", "hm\n\nso")),
        ("\nhm\n</think>\n\nyes\n", True, Read("yes\n", "hm")),
        ("<think>\n\n</think>\n\nyes", False, Read("yes")),
        ("hm\n", True, Read("", "hm")),
        ("so <think>hm</think>\n\nyes", False, Read("so \n\nyes", "hm")),
        ("so\n<think>hm</think>\n\n", False, Read("so\n", "hm")),
        ("<think>one\n</think>\n<think>\n\ntwo</think>\nyes", False, Read("yes", "one\ntwo")),
        ("a < b, <thin", False, Read("a < b, <thin")),
        ("hm </thin", True, Read("", "hm </thin")),
        ("\nyes\n", False, Read("\nyes\n")),
    ],
)
def test_reasoning_is_parted_from_the_answer(text: str, thinking: bool, expected: Read):
    assert read(text, thinking=thinking) == expected


def test_a_thought_is_shown_as_it_comes():
    made = pipeline(["\n", "hm", "\n", "so", "\n", "</think>", "\n", "yes"], thinking=True)
    steps = [made.feed(token).pieces for token in range(8)]
    assert steps[:4] == [(), ((Channel.REASONING, "hm"),), (), ((Channel.REASONING, "\nso"),)]
    assert steps[4:] == [(), (), (), ((Channel.CONTENT, "yes"),)]


# stop strings


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("one two three", ("two",), Read("one ")),
        ("one two three", ("three", "two"), Read("one ")),
        ("one tw", ("two",), Read("one tw")),
        ("<think>two</think>one two", ("two",), Read("one ", "two")),
        ("<think>hm</think>\n\none\n\ntwo", ("\n\n",), Read("one", "hm")),
        ("a" + LOOK + "b END c", ("END", "look"), Read("ab ", "", (call(),), "tool_calls")),
        ("a<call>two</call>b", ("two",), Read("a<call>")),
        ("a<call>two", ("two",), Read("a<call>")),
        ("END" + LOOK, ("END",), Read()),
    ],
)
def test_what_is_shown_ends_before_a_stop_string(text: str, stops: tuple[str, ...], expected: Read):
    assert read(text, stops=stops) == expected


def test_a_stop_string_found_at_the_very_end_is_a_stop():
    assert read("a<call> or two", reason="length", stops=("two",)) == Read("a<call> or ")


def test_after_a_stop_string_nothing_comes():
    made = pipeline(["one two", " three"], stops=("two",))
    assert [made.feed(token) for token in (0, 1)] == [
        TokenOutput(((Channel.CONTENT, "one "),), True),
        TokenOutput((), True),
    ]
    assert made.finish("length") == ((), "stop")


def test_a_stop_string_ends_all_channels():
    assert read("one END<think>two</think>" + LOOK, stops=("END",)) == Read("one ")


# tool calls


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LOOK, Read("", "", (call(),), "tool_calls")),
        ("I look.\n" + LOOK + "\n" + LOOK + "\n", Read("I look.\n", "", (call(), call(1)), "tool_calls")),
        ("I look." + LOOK + "\nDone.", Read("I look.\nDone.", "", (call(),), "tool_calls")),
        (LOOK + "\nDone.", Read("Done.", "", (call(),), "tool_calls")),
        ("<think>hm\n" + LOOK + "\nyes", Read("yes", "hm", (call(),), "tool_calls")),
        ("<think>a <call> is\n</think>\nyes", Read("yes", "a <call> is")),
        ("<call>what?</call> yes", Read("<call>what?</call> yes")),
        (LOOK + "\n<call>what?</call>", Read("<call>what?</call>", "", (call(),), "tool_calls")),
        ("a" + LOOK[:-3], Read("a" + LOOK[:-3])),
        ("a<call>", Read("a<call>")),
    ],
)
def test_calls_are_taken_out_and_no_other_text_is_lost(text: str, expected: Read):
    assert read(text) == expected


def test_the_start_of_a_call_at_the_token_limit_is_left_out_and_the_answer_keeps_its_reason():
    assert read(LOOK + LOOK[:-3], reason="length") == Read("", "", (call(),), "length")
    for size in range(len("<call>"), len(LOOK)):
        assert read("I look.\n" + LOOK[:size], reason="length") == Read("I look.\n", reason="length")
    for words in ("<call> marks a call.", "<call>`, so", "<call>, then"):
        assert read(words, reason="length") == Read(words, reason="length"), "words are no call"


def test_a_call_that_was_cut_off_is_never_made_however_patient_its_parser():
    found = read("<call>delete all but", reason="length", parser=lambda *_: {"name": "delete", "arguments": {}})
    assert found == Read("<call>delete all but", reason="length")


def test_without_tools_the_markers_are_words():
    assert read("a" + LOOK + "\nb", tools=False) == Read("a" + LOOK + "\nb")


def test_a_call_without_an_end_marker_ends_with_the_answer():
    markup = MarkerSet(("<think>", "</think>"), ("[CALL]", ""))
    body = '{"name": "look", "arguments": {}}'
    found = (call(arguments="{}"),)
    assert read("a[CALL]" + body, markup=markup) == Read("a", "", found, "tool_calls")
    assert read("a[CALL]" + body[:-2], markup=markup) == Read("a[CALL]" + body[:-2])
    assert read("a[CALL]" + body[:-2], markup=markup, reason="length") == Read("a", reason="length")
    assert read("a[CALL]" + body, markup=markup, reason="length") == Read("a", "", found, "length")
    assert read("<think>no [CALL] yet</think>b", markup=markup) == Read("b", "no [CALL] yet")


def test_a_call_before_one_that_the_token_limit_cuts_is_sent():
    markup = MarkerSet(("<think>", "</think>"), ("[CALL]", ""))
    body = '{"name": "look", "arguments": {}}'
    for size in range(-len("[CALL]"), len(body) - 1):
        cut = f"a[CALL]{body}[CALL]{body[: max(0, size)]}"[: size if size < 0 else None]
        assert read(cut, markup=markup, reason="length") == Read("a", "", (call(arguments="{}"),), "length")
        one = read(cut, markup=markup, reason="length", one_call=True)
        assert one == Read("a", "", (call(arguments="{}"),), "tool_calls")


@pytest.mark.parametrize("tools", [True, False])
def test_a_response_format_has_states_of_its_own(tools: bool):
    edges = {
        "head": [("to me:", "reasoning"), ("to you:", "normal"), ("<call>", "tool")],
        "normal": [(".", "head")],
        "reasoning": [(".", "head")],
    }
    markup = MarkerSet(call=("<call>", "</call>"), edges=edges, initial="head")
    found = read(f"x to me:hm. x {LOOK}. x to you:yes.", markup=markup, tools=tools)
    assert found == (Read("yes", "hm", (call(),), "tool_calls") if tools else Read(LOOK + "yes", "hm"))


@pytest.mark.parametrize(
    "parsed",
    [
        None,
        3,
        "look",
        [],
        {},
        [3],
        {"name": "look"},
        {"name": "", "arguments": {}},
        {"name": 3, "arguments": {}},
        {"name": "look", "arguments": [1]},
        {"name": "look", "arguments": "{"},
        {"name": "look", "arguments": "[1]"},
        {"name": "look", "arguments": {"at": {1, 2}}},
        {"name": "look", "arguments": {"at": float("nan")}},
        [{"name": "look", "arguments": {}}, {"name": "look", "arguments": b""}],
        KeyError("x"),
        RecursionError(),
        MemoryError(),
        AttributeError(),
    ],
    ids=repr,
)
def test_what_is_no_call_is_shown_as_it_was_written(parsed: object):
    def answer(block: str, tools: list[object]) -> object:
        if isinstance(parsed, Exception):
            raise parsed
        return parsed

    assert read("a<call>\nb</call>c", parser=answer) == Read("a<call>\nb</call>c")


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ({"at": "東京"}, '{"at": "東京"}'),
        ('{"at":1}', '{"at": 1}'),
        ("", "{}"),
        (None, "{}"),
        ({"at": "\ud800"}, '{"at": "\\ud800"}'),
    ],
)
def test_arguments_are_json_text_of_an_object(arguments: object, written: str):
    found = read("<call></call>", parser=lambda *_: {"name": "look", "arguments": arguments, "id": "its own"})
    assert found.calls == (call(arguments=written),)
    assert json.dumps(found.calls).encode()


def test_a_block_too_long_to_be_read_in_time_is_text():
    asked: list[str] = []
    text = "<call>" + "x" * (MAX_BLOCK_CHARS + 1) + "</call>"
    made = pipeline([text], parser=lambda block, _: asked.append(block))
    assert run(made, [0]).content == text
    assert asked == []


def test_calls_have_the_names_of_the_client_and_the_first_form_of_tools_with_calls():
    asked = list[object]()

    def answer(block: str, tools: list[object]) -> object:
        asked.append(tools)
        return [{"name": name, "arguments": {}} for name in ("a_b", "c")] if tools == [2] else None

    calls = ToolCallParser("q_", answer, [[1], [2], [3]], "</call>", {"a_b": "a.b"})
    found = [json.loads(call) for call in calls.parse_block("x")]
    assert [(call["name"], call["index"], call["id"]) for call in found] == [("a.b", 0, "q_0"), ("c", 1, "q_1")]
    assert (asked, calls.count) == ([[1], [2]], 2)


@pytest.mark.parametrize(("letter", "more", "calls"), [("x", 0, 1), ("x", 1, 0), ("ü", 1, 0)])
def test_a_call_beyond_the_limit_of_a_frame_becomes_content(letter: str, more: int, calls: int):
    empty = len(json.dumps(call(arguments='{"at": ""}')))
    long = letter * ((MAX_CALL_BYTES - empty) // len(letter.encode()) + more)
    made = run(pipeline([LOOK], parser=lambda block, _: {"name": "look", "arguments": {"at": long}}), [0])
    assert len(made.calls) == calls
    assert made.content == ("" if calls else LOOK)


def test_a_parser_is_given_the_tools_of_the_request(tmp_path: Path):
    folder = vocabulary.configure(vocabulary.byte_level(tmp_path / "m"), tool_parser_type="qwen3_coder")
    typed = {"name": "look", "parameters": {"type": "object", "properties": {"at": {"type": "integer"}}}}
    model = tokenizer_loader.load(folder)
    text = "<tool_call>\n<function=look>\n<parameter=at>\n12\n</parameter>\n</function>\n</tool_call>"
    tools = json.dumps([{"type": "function", "function": typed}])
    found = run(model.create_pipeline("q", 2, (), tools, False), vocabulary.byte_ids(model.wrapper.get_vocab(), text))
    assert found.calls == ({"index": 0, "id": "call_q_2_0", "name": "look", "arguments": '{"at": 12}'},)


# one or more recorded transcripts for each parser


def test_every_parser_has_its_transcript():
    assert sorted(file.stem for file in TRANSCRIPTS.glob("*.json")) == PARSERS


@pytest.mark.parametrize("parser", [*CALL_ENDS, "mistral"])
def test_complete_calls_of_a_block_that_the_token_limit_cuts_are_sent(parser: str, tmp_path: Path):
    record = json.loads((TRANSCRIPTS / f"{parser}.json").read_text())
    folder = vocabulary.byte_level(tmp_path / "m", tokens=record["tokens"])
    (folder / "config.json").write_text(json.dumps(record["config"]))
    model = tokenizer_loader.load(vocabulary.configure(folder, tool_parser_type=parser))
    texts = {"gemma4": "<|tool_call>call:get_weather{days:2}call:search{query:1}<tool_call|>"}
    texts["qwen3_coder"] = "<tool_call>\n{}\n{}\n</tool_call>".format(
        "<function=get_weather>\n<parameter=days>\n2\n</parameter>\n</function>",
        "<function=search>\n<parameter=query>\n</function> 1\n</parameter>\n</function>",
    )
    text = texts.get(parser) or record["cases"][0]["text"]
    calls = list[int]()
    for size in range(len(text)):
        ids = vocabulary.byte_ids(model.wrapper.get_vocab(), text[:size])
        found = run(model.create_pipeline("r", 0, (), json.dumps(record["tools"]), False), ids, "length")
        assert all(json.loads(call["arguments"]) for call in found.calls)
        assert found.reason == "length"
        calls.append(len(found.calls))
    assert calls == sorted(calls)
    assert calls[text.index("search") + len("search")] == 1, "the second call has begun"
    assert calls[-1] == (1 if parser == "mistral" else 2)


@pytest.mark.parametrize("parser", PARSERS)
def test_a_recorded_transcript_is_read(parser: str, tmp_path: Path):
    record = json.loads((TRANSCRIPTS / f"{parser}.json").read_text())
    whole = [case["text"] for case in record["cases"]]
    folder = vocabulary.byte_level(tmp_path / "m", tokens=record["tokens"])
    (folder / "config.json").write_text(json.dumps(record["config"]))
    model = tokenizer_loader.load(vocabulary.configure(folder, tool_parser_type=parser))
    words = model.wrapper.get_vocab()
    assert model.features == ("tools",)
    assert any(case["calls"] for case in record["cases"])
    for case, text in zip(record["cases"], whole, strict=True):
        found = [
            run(model.create_pipeline("r", 0, (), json.dumps(record["tools"]), False), ids)
            for ids in (model.wrapper.encode(text, add_special_tokens=False), vocabulary.byte_ids(words, text))
        ]
        machine = TextStateMachine(model.markers.build_transitions(True))
        place = model.markers.get_start_place(False)
        calls = ToolCallParser("call_r_", model.wrapper.tool_parser, [record["tools"]], model.markers.call[1])
        found.append(run(TextPipeline(Spelled([text]), MarkCutter(machine, place), place, StopStrings(()), calls), [0]))
        assert found[0] == found[1] == found[2]
        assert found[0].content == case["content"]
        assert found[0].reasoning == case.get("reasoning", "")
        told = [{"name": each["name"], "arguments": json.loads(each["arguments"])} for each in found[0].calls]
        assert told == case["calls"]
        assert [each["id"] for each in found[0].calls] == [f"call_r_{at}" for at in range(len(told))]
        assert found[0].reason == ("tool_calls" if told else "stop")
        start, end = model.markers.call
        begin = text.find(start) + len(start)
        for size in range(begin, text.find(end, begin) if told else 0):
            cut = TextPipeline(Spelled([text[:size]]), MarkCutter(machine, place), place, StopStrings(()), calls)
            shown = run(cut, [0], "length").content
            assert start not in shown, text[:size]
            assert case["content"].startswith(shown.rstrip()), text[:size]


# Any text

PARTS = st.sampled_from(
    ["<think>", "</think>", "<call>", "</call>", LOOK, "\n", "\n\n", "a", "END", "EN", "D", "<", "é", "{}", "call>"]
)
TEXTS = st.lists(PARTS, max_size=14).map("".join)


@given(TEXTS, st.data(), st.booleans(), st.booleans())
def test_any_split_into_tokens_gives_the_same(text: str, data: st.DataObject, thinking: bool, tools: bool):
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    pieces = [text[here:there] for here, there in pairwise(cuts)]
    how: dict[str, Any] = {"stops": ("END", "ENDE"), "thinking": thinking, "tools": tools}
    assert run(pipeline(pieces, **how), range(len(pieces))) == run(pipeline([text], **how), [0])


@given(TEXTS, st.booleans())
def test_without_stop_strings_nothing_but_markers_and_newlines_is_lost(text: str, thinking: bool):
    found = run(pipeline(list(text), thinking=thinking), range(len(text)))
    kept = sorted(found.content + found.reasoning + LOOK * len(found.calls))
    for mark in ("<think>", "</think>"):
        text = text.replace(mark, "")
    assert [sign for sign in kept if sign not in "\n</think>"] == [
        sign for sign in sorted(text) if sign not in "\n</think>"
    ]


@given(TEXTS)
def test_nothing_of_a_stop_string_is_shown(text: str):
    made = pipeline(list(text), stops=("END",))
    pieces = [piece for token in range(len(text)) for piece in made.feed(token).pieces]
    pieces += made.finish("stop")[0]
    content = "".join(piece for channel, piece in pieces if channel is Channel.CONTENT)
    assert "END" not in content


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    """Return one tokenizer of each way to decode: bytes, pieces with byte tokens, whole words."""
    folder = tmp_path_factory.mktemp("models")
    marks = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    text = 'hello <think> so </think> <tool_call>{"name": "look", "arguments": {}}</tool_call> 東京'
    in_bytes = vocabulary.byte_level(folder / "bytes", [text] * 5, marks)
    in_pieces = vocabulary.pieces_with_byte_fallback(folder / "pieces")
    in_words = vocabulary.words_only(folder / "words", ["hello", "world"])
    for each in (in_bytes, in_pieces):
        vocabulary.configure(each, tool_parser_type="json_tools")
    return [tokenizer_loader.load(each) for each in (in_bytes, in_pieces, in_words)]


IDS = st.lists(st.integers(-2, 410), max_size=60)


@given(st.integers(0, 2), IDS, st.data(), st.booleans())
def test_a_resumed_stream_continues_identically(
    models: list[Tokenizer], at: int, ids: list[int], data: st.DataObject, thinking: bool
):
    lost, resumed = (models[at].create_pipeline("r", 0, ("o w", "\n"), TOOLS, thinking) for _ in range(2))
    known = data.draw(st.integers(0, len(ids)))
    before = [lost.feed(token) for token in ids[:known]]
    assert [resumed.feed(token) for token in ids[:known]] == before
    assert [resumed.feed(token) for token in ids[known:]] == [lost.feed(token) for token in ids[known:]]
    assert resumed.finish("length") == lost.finish("length")


@given(st.lists(st.integers(5, 410), max_size=60))
def test_what_is_shown_are_the_bytes_of_the_tokens(models: list[Tokenizer], ids: list[int]):
    ids = [token for token in ids if models[0].token_bytes(token) != b"\0"]  # mlx-lm returns its sign, not the byte
    found = run(models[0].create_pipeline("r", 0, (), "", False), ids)
    plain = b"".join(map(models[0].token_bytes, ids)).decode(errors="replace")
    assert found.content in (plain, plain.removeprefix(" "))


def test_the_token_that_ends_an_answer_has_no_text(models: list[Tokenizer]):
    for each in models:
        (end,) = each.eos
        assert run(each.create_pipeline("r", 0, (), "", False), [end, end]) == Read()


def test_a_character_in_several_tokens_is_never_shown_broken(models: list[Tokenizer]):
    made = models[0].create_pipeline("r", 0, (), "", False)
    ids = vocabulary.byte_ids(models[0].wrapper.get_vocab(), "a東é🙂")
    assert [piece for token in ids for _, piece in made.feed(token).pieces] == ["a", "東", "é", "🙂"]


def test_what_stays_broken_is_replaced_at_the_end(models: list[Tokenizer]):
    made = models[0].create_pipeline("r", 0, (), "", False)
    ids = vocabulary.byte_ids(models[0].wrapper.get_vocab(), "a🙂")[:-1]
    assert run(made, ids).content == "a\ufffd"
