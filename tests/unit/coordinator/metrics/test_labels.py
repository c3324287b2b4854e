"""Label values of a node: those of its first report, and no new ones while it is a member."""

from coordinator.metrics.families import MOST_MODELS, OTHER
from coordinator.metrics.labels import MOST_ABOUT, Labels
from wire.identity import NodeId
from wire.report import Model

A, B = NodeId("a"), NodeId("b")
MORE = (OTHER, OTHER, OTHER)


def about(number: int) -> tuple[str, str, str]:
    return "chip", "system", str(number)


def test_a_node_has_a_bounded_number_of_descriptions_and_keeps_those_that_it_gave_first():
    labels = Labels()
    for number in range(MOST_ABOUT):
        assert labels.about(A, about(number)) == about(number)
    assert labels.about(A, about(MOST_ABOUT)) == MORE
    assert labels.about(A, about(0)) == about(0)
    assert labels.about(B, about(MOST_ABOUT)) == about(MOST_ABOUT)


def test_a_node_has_a_bounded_number_of_models_in_their_order():
    labels = Labels()
    models = [Model(f"m{number}") for number in range(MOST_MODELS + 1)]
    assert labels.models(A, models) == tuple(models[:-1])
    assert labels.models(A, [models[-1], models[3], models[1]]) == (models[3], models[1])
    assert labels.models(B, models[-1:]) == (models[-1],)


def test_only_who_is_no_member_any_more_is_forgotten():
    labels = Labels()
    for node in (A, B):
        for number in range(MOST_ABOUT):
            labels.about(node, about(number))
        labels.models(node, [Model(f"m{number}") for number in range(MOST_MODELS)])
    labels.keep([A])
    found = {node: (labels.about(node, about(9)), labels.models(node, [Model("new")])) for node in (A, B)}
    assert found == {A: (MORE, ()), B: (about(9), (Model("new"),))}
