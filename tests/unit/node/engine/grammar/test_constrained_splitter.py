"""Text under a grammar, split at its markers, independent of the boundaries of its pieces."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from node.engine.grammar.constrained_splitter import CallPlaces, FormatCutter, MarkerLayout, ReasoningStart

THINK, CALL = ("<think>", "</think>"), ("<call>", "</call>")


def cut(outline: MarkerLayout, text: str, *at: int) -> list[tuple[str, str]]:
    cutter, found = FormatCutter(outline), list[tuple[str, str]]()
    place = outline.get_start_place()
    edges = sorted({0, len(text), *(one % (len(text) + 1) for one in at)})
    for start, end in pairwise(edges):
        for place, part in cutter.feed(text[start:end]):
            if found and found[-1][0] == place.state:
                found[-1] = (place.state, found[-1][1] + part)
            else:
                found.append((place.state, part))
    if held := cutter.flush():
        found.append((place.state, held))
    return [one for one in found if one[1]]


def test_a_thought_and_then_words():
    text = "I <think> of </call>.</think>{a: <think>, <call>}"
    assert cut(MarkerLayout(THINK, ReasoningStart.OPEN), text) == [
        ("reasoning", "I <think> of </call>."),
        ("normal", "{a: <think>, <call>}"),
    ]
    assert cut(MarkerLayout(THINK, ReasoningStart.NONE), text) == [("normal", text)]


def test_a_thought_only_before_everything_else():
    may = MarkerLayout(THINK, ReasoningStart.MAY)
    assert cut(may, "<think>a</think>b<think>c") == [("reasoning", "a"), ("normal", "b<think>c")]
    assert cut(may, "b<think>a</think>") == [("normal", "b<think>a</think>")]
    assert cut(may, "<thi") == [("normal", "<thi")]


def test_a_calls_end_only_outside_of_quotes():
    text = '<call>{"a": "</call> \\" </call>"}</call>\n<call>{}</call>'
    outline = MarkerLayout(call=CALL, calls=CallPlaces.FIRST)
    assert cut(outline, text) == [("tool", '{"a": "</call> \\" </call>"}'), ("normal", "\n"), ("tool", "{}")]


def test_calls_first_or_anywhere():
    first, anywhere = (MarkerLayout(call=CALL, calls=calls) for calls in (CallPlaces.FIRST, CallPlaces.ANYWHERE))
    assert cut(first, "a <call>{}</call>") == [("normal", "a <call>{}</call>")]
    assert cut(anywhere, "a <call>{}</call> b") == [("normal", "a "), ("tool", "{}"), ("normal", " b")]
    assert cut(MarkerLayout(call=("[C]", ""), calls=CallPlaces.FIRST), "[C]f[ARGS]{}") == [("tool", "f[ARGS]{}")]


@given(
    st.lists(
        st.sampled_from(["<think>", "</think>", "<call>", "</call>", '"', "\\", "a", "\n", "<", "</"]), max_size=12
    ),
    st.lists(st.integers(0, 60), max_size=8),
    st.sampled_from(list(ReasoningStart)),
    st.sampled_from(list(CallPlaces)),
)
def test_cuts_change_nothing(parts: list[str], at: list[int], thought: ReasoningStart, calls: CallPlaces):
    outline, text = MarkerLayout(THINK, thought, CALL, calls), "".join(parts)
    assert cut(outline, text, *at) == cut(outline, text)
