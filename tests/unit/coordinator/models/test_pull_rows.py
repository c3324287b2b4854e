"""Rows of pulls: every value that the API and the page show."""

from dataclasses import replace

import pytest
from msgspec.structs import replace as change

from coordinator.models.pull_records import PullRecord
from coordinator.models.pull_rows import build_pull_row, summarize_state
from coordinator.models.pull_values import Mirror, NodePull, PullStage, PullState
from wire.identity import NodeId
from wire.models.files import ModelFile, ModelManifest, SourceKind

A, B = NodeId("a"), NodeId("b")
NAMES = {A: "studio", B: "mini"}
MANIFEST = ModelManifest(
    "pub/model", "c" * 40, (ModelFile("config.json", 5, "a" * 64), ModelFile("model.safetensors", 95, "b" * 64))
)


def make_record(*nodes: NodePull, mirror: Mirror | None = None, ended: float | None = None) -> PullRecord:
    state = PullState(dict(zip((A, B), nodes, strict=False)), 9, mirror)
    return PullRecord(
        id="pull-0123456789ab", manifest=MANIFEST, state=state, started=1000.0, ended=ended, actor="admin"
    )


def test_build_pull_row_has_every_value_of_a_running_pull() -> None:
    pulling = NodePull(
        stage=PullStage.PULLING,
        order=3,
        source=SourceKind.MIRROR,
        is_linked=True,
        phase="downloading",
        done=40,
        total=100,
        speed=20.4,
        fetched=45,
        retries=2,
        message="the mirror is slow",
    )
    record = make_record(NodePull(), pulling, mirror=Mirror(A, 2, 5.0, ("https://10.0.0.1:9000",)))
    assert build_pull_row(record, NAMES.__getitem__) == {
        "id": "pull-0123456789ab",
        "repo": "pub/model",
        "revision": "main",
        "commit": "c" * 40,
        "size": 100,
        "files": 2,
        "state": "pulling",
        "started": 1000.0,
        "ended": None,
        "actor": "admin",
        "mirror": "studio",
        "nodes": [
            {
                "id": "a",
                "name": "studio",
                "state": "waiting",
                "phase": "",
                "source": "",
                "linked": False,
                "done": 0,
                "total": 0,
                "speed": 0,
                "seconds_left": None,
                "fetched": 0,
                "retries": 0,
                "message": "",
            },
            {
                "id": "b",
                "name": "mini",
                "state": "pulling",
                "phase": "downloading",
                "source": "mirror",
                "linked": True,
                "done": 40,
                "total": 100,
                "speed": 20,
                "seconds_left": 2.9,
                "fetched": 45,
                "retries": 2,
                "message": "the mirror is slow",
            },
        ],
    }


def test_a_named_revision_is_shown() -> None:
    record = make_record(NodePull())
    assert build_pull_row(replace(record, manifest=change(MANIFEST, revision="v2")), str)["revision"] == "v2"


def test_a_mirror_is_shown_once_it_listens() -> None:
    assert build_pull_row(make_record(NodePull()), str)["mirror"] is None
    assert build_pull_row(make_record(NodePull(), mirror=Mirror(A, 2, 5.0)), str)["mirror"] is None


@pytest.mark.parametrize(
    ("stages", "state"),
    [
        ((PullStage.COMPLETED, PullStage.COMPLETED), "completed"),
        ((PullStage.COMPLETED, PullStage.CANCELLED), "cancelled"),
        ((PullStage.CANCELLED, PullStage.FAILED), "failed"),
        ((PullStage.FAILED, PullStage.WAITING), "pulling"),
        ((PullStage.COMPLETED, PullStage.PULLING), "pulling"),
    ],
)
def test_summarize_state_of_two_nodes(stages: tuple[PullStage, PullStage], state: str) -> None:
    record = make_record(*(NodePull(stage=stage, order=1) for stage in stages))
    assert summarize_state(record) == build_pull_row(record, str)["state"] == state
