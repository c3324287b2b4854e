"""Plan of a pull: the nodes that get a model, and the numbers of those that do not."""

from dataclasses import replace

from coordinator.models.pull_plan import NodeSelection, PullPlan, plan_pull
from router.placement.cluster_view import ClusterView, NodeView
from tests.support.cluster.loopback_cluster import a_memory, a_model
from wire.identity import NodeId
from wire.machine import Disk
from wire.units import GIB

SIZE = 10 * GIB
MODEL = a_model("pub/model", loaded=False, weights=SIZE, context=32_768)


def node(name: str, free: int = 100 * GIB, cap: int = 24 * GIB, state: str = "ready") -> NodeView:
    return NodeView(NodeId(name), name, state, memory=a_memory(0, cap), disk=Disk(free, 500 * GIB, "/cache"))


def plan(*nodes: NodeView, selection: NodeSelection = NodeSelection.AUTO, named: tuple[str, ...] = ()) -> PullPlan:
    return plan_pull(ClusterView(nodes), MODEL, SIZE, selection, [NodeId(name) for name in named])


def reasons(found: PullPlan) -> dict[str, str]:
    return {one.name: one.reason for one in found.nodes}


def test_auto_chooses_the_nodes_with_room_on_the_disk_and_in_memory() -> None:
    found = plan(node("a"), node("b", free=12 * GIB), node("c", cap=12 * GIB), node("d", state="asleep"))
    assert found.chosen == ("a",)
    assert found.nodes[0].context > 4096
    assert reasons(found)["b"] == "needs 10.0 GiB of disk, has 12.0 GiB free and keeps 5.0 GiB"
    assert reasons(found)["c"].startswith("needs 10.3 GiB of memory with 4096 tokens, has 10.0 GiB below its cap")
    assert reasons(found)["d"] == "is asleep"


def test_all_also_chooses_nodes_that_are_away() -> None:
    away = [node(name, state=state) for name, state in (("d", "asleep"), ("e", "left"), ("f", "joining"))]
    unknown = replace(node("g", state="lost"), disk=Disk())
    found = plan(node("a"), *away, unknown, selection=NodeSelection.ALL)
    assert found.chosen == ("a", "d", "g")
    assert reasons(found) == {
        "a": "",
        "d": "is asleep, and starts the pull when it is back",
        "g": "is lost, and starts the pull when it is back",
    }


def test_named_nodes_need_disk_but_may_lack_memory() -> None:
    found = plan(
        node("a"),
        node("b", free=12 * GIB),
        node("c", cap=12 * GIB),
        node("d", cap=12 * GIB, state="asleep"),
        selection=NodeSelection.NAMED,
        named=("b", "c", "d"),
    )
    assert found.chosen == ("c", "d")
    assert "of memory" in reasons(found)["d"]
    assert reasons(found)["a"] == "was not named"
    assert "of memory" in reasons(found)["c"]


def test_nodes_that_have_the_model_come_first_and_need_no_disk() -> None:
    full = replace(node("b", free=1 * GIB), models={MODEL.name: MODEL})
    assert plan(node("a"), full).chosen == ("b", "a")


def test_a_node_whose_version_cannot_pull_is_not_chosen() -> None:
    found = plan(replace(node("a"), disk=Disk()))
    assert found.chosen == ()
    assert found.explain() == ("no node can get the model: a: its version of Macpool cannot pull models: update it")


def test_a_node_whose_disk_cannot_be_read_is_not_chosen() -> None:
    found = plan(replace(node("a"), disk=Disk(folder="/nas/hub")), selection=NodeSelection.ALL)
    assert (found.chosen, reasons(found)["a"]) == ((), "the disk of /nas/hub cannot be read there: check it")


def test_explain_names_only_nodes_with_a_reason_and_an_empty_pool() -> None:
    assert plan().explain() == "no node can get the model: the pool has no nodes"
    found = plan(node("a"), node("b"), selection=NodeSelection.NAMED, named=("a",))
    assert found.explain() == "no node can get the model: b: was not named"


def test_the_disk_must_hold_the_files_and_its_reserve() -> None:
    for free, total in ((12 * GIB, 40 * GIB), (SIZE + 5 * GIB, 500 * GIB)):  # 5 % of a disk, at most 5 GiB
        assert plan(replace(node("a"), disk=Disk(free, total, "/cache"))).chosen == ("a",)
        assert plan(replace(node("a"), disk=Disk(free - 1, total, "/cache"))).chosen == ()


def test_a_node_of_unknown_cap_is_chosen_and_one_without_room_for_the_whole_context_is_not() -> None:
    short = a_model("pub/model", loaded=False, weights=SIZE, context=512)
    view = ClusterView((node("a", cap=0), node("b", cap=12 * GIB)))
    found = plan_pull(view, short, SIZE, NodeSelection.AUTO)
    assert found.chosen == ("a",)
    assert "with 512 tokens" in reasons(found)["b"]


def test_to_row_has_every_value() -> None:
    (found,) = plan(node("a", free=12 * GIB)).nodes
    row = found.to_row()
    assert 4096 < found.context <= MODEL.context
    assert row.pop("max_context") == found.context
    assert row == {
        "id": "a",
        "name": "a",
        "state": "ready",
        "chosen": False,
        "has_model": False,
        "disk_free": 12 * GIB,
        "reason": "needs 10.0 GiB of disk, has 12.0 GiB free and keeps 5.0 GiB",
    }


def test_a_node_with_a_damaged_copy_needs_disk_as_any_other() -> None:
    damaged = a_model("pub/model", loaded=False, weights=SIZE, context=32_768, cause="a file is missing")
    full, roomy = (
        replace(node(name, free), models={MODEL.name: damaged}) for name, free in (("b", GIB), ("c", SIZE * 3))
    )
    found = plan(full, node("a"), roomy)
    assert found.chosen == ("a", "c")
    assert reasons(found)["b"].startswith("needs 10.0 GiB of disk, has 1.0 GiB free")
    assert [one.has_model for one in found.nodes] == [False, False, False]
