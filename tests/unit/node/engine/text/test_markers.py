"""The states of a model's text, and the markers that lead from one to another."""

import pytest

from node.engine.text.markers import INNER, NAKED, NORMAL, REASONING, TOOL, MarkerPlace, MarkerSet

THINK, CALL, LONE = ("<think>", "</think>"), ("<call>", "</call>"), ("<function", "</function>")
Edges = dict[str, set[tuple[str, str]]]


def list_edges(markers: MarkerSet, tools: bool) -> Edges:
    """Return the edges of the reachable states. All places of a state have the same edges, with their markers."""
    found: Edges = {}
    for place, edges in markers.build_transitions(tools).items():
        assert all(there.marker == marker for marker, there in edges), "a block can be rebuilt as generated"
        assert len(edges) == len(set(edges)), "no edge is there twice"
        states = {(marker, there.state) for marker, there in edges}
        assert found.setdefault(place.state, states) == states
    return found


THOUGHTS: Edges = {NORMAL: {("<think>", REASONING)}, REASONING: {("</think>", NORMAL)}}


@pytest.mark.parametrize(
    ("markers", "tools", "edges"),
    [
        pytest.param(MarkerSet(), True, {NORMAL: set()}, id="no markers"),
        pytest.param(MarkerSet(THINK), True, THOUGHTS, id="reasoning"),
        pytest.param(MarkerSet(THINK, CALL, LONE), False, THOUGHTS, id="a request without tools"),
        pytest.param(MarkerSet(call=CALL), True, {NORMAL: {("<call>", TOOL)}, TOOL: {("</call>", NORMAL)}}, id="calls"),
        pytest.param(
            MarkerSet(THINK, CALL),
            True,
            {
                NORMAL: {("<think>", REASONING), ("<call>", TOOL)},
                REASONING: {("</think>", NORMAL), ("<call>", INNER)},
                TOOL: {("</call>", NORMAL)},
                INNER: {("</call>", NORMAL), ("</think>", NORMAL)},
            },
            id="reasoning and calls",
        ),
        pytest.param(
            MarkerSet(THINK, ("[CALLS]", "")),
            True,
            {
                NORMAL: {("<think>", REASONING), ("[CALLS]", TOOL)},
                REASONING: {("</think>", NORMAL), ("[CALLS]", INNER)},
                TOOL: set(),
                INNER: {("</think>", NORMAL)},
            },
            id="a block that ends with the answer",
        ),
        pytest.param(
            MarkerSet(call=CALL, naked=LONE),
            True,
            {
                NORMAL: {("<call>", TOOL), ("<function", NAKED), ("</call>", NORMAL)},
                TOOL: {("</call>", NORMAL)},
                NAKED: {("</function>", NORMAL)},
            },
            id="calls without the markers of their block",
        ),
        pytest.param(
            MarkerSet(THINK, structure=("<end>", "<turn>")),
            True,
            {**THOUGHTS, NORMAL: THOUGHTS[NORMAL] | {("<end>", NORMAL), ("<turn>", NORMAL)}},
            id="structure outside of reasoning",
        ),
    ],
)
def test_each_state_has_its_markers(markers: MarkerSet, tools: bool, edges: Edges) -> None:
    assert list_edges(markers, tools) == edges


@pytest.mark.parametrize("tools", [True, False])
def test_the_blocks_of_a_response_format_are_read_without_tools_too(tools: bool) -> None:
    markers = MarkerSet(
        call=("<to>", "<call>"),
        initial="header",
        edges={"header": [("<final>", NORMAL), ("<to>", TOOL)], NORMAL: [("<start>", "header")]},
    )
    assert list_edges(markers, tools) == {
        "header": {("<final>", NORMAL), ("<to>", TOOL)},
        NORMAL: {("<start>", "header")},
        TOOL: {("<call>", NORMAL)},
    }


def test_a_response_format_without_calls_leaves_the_markers_of_calls_to_the_request() -> None:
    markers = MarkerSet(call=CALL, edges={NORMAL: [("<start>", "header")]})
    assert list_edges(markers, False) == {NORMAL: {("<start>", "header")}, "header": set()}
    assert list_edges(markers, True)[NORMAL] == {("<start>", "header"), ("<call>", TOOL)}


@pytest.mark.parametrize(
    ("markers", "normal", "thinking"),
    [
        (MarkerSet(THINK), NORMAL, REASONING),
        (MarkerSet(("", "</think>")), NORMAL, REASONING),
        (MarkerSet(call=CALL), NORMAL, NORMAL),
        (MarkerSet(THINK, initial="header"), "header", "header"),
    ],
)
def test_an_answer_starts_in_reasoning_if_the_prompt_has_started_it(
    markers: MarkerSet, normal: str, thinking: str
) -> None:
    assert markers.get_start_place(False) == MarkerPlace(normal, "")
    assert markers.get_start_place(True) == MarkerPlace(thinking, "")
