"""Nodes that a request has tried with one model."""

from router.dispatch.aliases.tried_nodes import TriedNodes
from wire.identity import NodeId
from wire.refusals import RefusalCode, Refused

A, B = NodeId("a"), NodeId("b")
TOO_LARGE = Refused(RefusalCode.TOO_LARGE, "no", None)
NO_ROOM = Refused(RefusalCode.NO_ROOM, "no", None)


def test_only_a_final_refusal_excludes_a_node_for_good():
    tried = TriedNodes()
    tried.mark_refused(A, 1.0, NO_ROOM)
    tried.mark_refused(B, 2.0, TOO_LARGE)
    tried.mark_refused(A, 3.0)
    assert tried.refused == {A: 3.0, B: 2.0}
    assert tried.never == {B: TOO_LARGE}


def test_a_readmitted_node_keeps_its_refusals_and_a_removed_one_nothing():
    lost = {B}
    tried = TriedNodes(lost)
    for node in (A, B):
        tried.mark_lost(node)
        tried.mark_refused(node, 1.0, TOO_LARGE)
    assert lost == {A, B}, "the models of a request share the nodes that were lost"
    tried.readmit(A)
    assert (tried.lost, set(tried.refused), set(tried.never)) == ({B}, {A, B}, {A, B})
    tried.remove_node(B)
    tried.remove_node(NodeId("unknown"))
    assert (tried.lost, set(tried.refused), set(tried.never)) == (set(), {A}, {A})
