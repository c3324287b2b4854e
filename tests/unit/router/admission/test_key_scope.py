"""A key sees the models that it may use, on the nodes that have its labels."""

from dataclasses import replace

import pytest

from router.admission.key_scope import filter_view
from router.admission.rate_limits import KeyLimits
from router.placement.cluster_view import ClusterView, NodeView
from tests.support.cluster.loopback_cluster import a_model
from wire.identity import NodeId
from wire.video import VideoPackage, VideoState

TINY, QWEN = a_model("tiny"), a_model("qwen-4b")
WAN, FILM = VideoPackage("wan"), VideoPackage("qwen-film")
A = NodeView(NodeId("a"), "a", "ready", models={"tiny": TINY, "qwen-4b": QWEN}, labels=frozenset({"lab", "fast"}))
B = NodeView(NodeId("b"), "b", "asleep", models={"tiny": TINY}, video=VideoState(ready=True, packages=(WAN, FILM)))
WHOLE = ClusterView((A, B))


@pytest.mark.parametrize(
    ("limits", "seen"),
    [
        (None, (A, B)),
        (KeyLimits(), (A, B)),
        (KeyLimits(labels=("lab",)), (A,)),
        (KeyLimits(labels=("lab", "fast")), (A,)),
        (KeyLimits(labels=("lab", "large")), ()),
        (
            KeyLimits(models=("qwen*",)),
            (
                replace(A, models={"qwen-4b": QWEN}),
                replace(B, models={}, video=VideoState(ready=True, packages=(FILM,))),
            ),
        ),
        (KeyLimits(models=("tiny",), labels=("fast",)), (replace(A, models={"tiny": TINY}),)),
    ],
)
def test_a_key_sees_its_models_on_nodes_with_its_labels(limits: KeyLimits | None, seen: tuple[NodeView, ...]):
    assert filter_view(WHOLE, limits) == ClusterView(seen)
