"""Label values of a node: those of its first report, and no new ones while it is a member."""

from coordinator.metrics.families import MAX_MODELS_PER_NODE, OTHER
from coordinator.metrics.labels import MAX_HOST_LABELS, AdmittedLabels
from wire.identity import NodeId
from wire.report import Model

A, B = NodeId("a"), NodeId("b")
MORE = (OTHER, OTHER, OTHER)


def about(number: int) -> tuple[str, str, str]:
    return "chip", "system", str(number)


def test_a_node_has_a_bounded_number_of_descriptions_and_keeps_those_that_it_gave_first():
    labels = AdmittedLabels()
    for number in range(MAX_HOST_LABELS):
        assert labels.admit_host(A, about(number)) == about(number)
    assert labels.admit_host(A, about(MAX_HOST_LABELS)) == MORE
    assert labels.admit_host(A, about(0)) == about(0)
    assert labels.admit_host(B, about(MAX_HOST_LABELS)) == about(MAX_HOST_LABELS)


def test_a_node_has_a_bounded_number_of_models_in_their_order():
    labels = AdmittedLabels()
    models = [Model(f"m{number}") for number in range(MAX_MODELS_PER_NODE + 1)]
    assert labels.admit_models(A, models) == tuple(models[:-1])
    assert labels.admit_models(A, [models[-1], models[3], models[1]]) == (models[3], models[1])
    assert labels.admit_models(B, models[-1:]) == (models[-1],)


def test_retain_members_deletes_labels_of_former_members_only():
    labels = AdmittedLabels()
    for node in (A, B):
        for number in range(MAX_HOST_LABELS):
            labels.admit_host(node, about(number))
        labels.admit_models(node, [Model(f"m{number}") for number in range(MAX_MODELS_PER_NODE)])
    labels.retain_members([A])
    found = {node: (labels.admit_host(node, about(9)), labels.admit_models(node, [Model("new")])) for node in (A, B)}
    assert found == {A: (MORE, ()), B: (about(9), (Model("new"),))}
