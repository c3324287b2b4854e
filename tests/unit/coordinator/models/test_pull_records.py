"""Records of pulls on the disk: their order, their ids, and files that cannot be read."""

from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.models.pull_records import PullRecord, PullRecords
from coordinator.models.pull_values import Mirror, NodePull, PullStage, PullState
from wire.identity import NodeId
from wire.models.files import ModelFile, ModelManifest

A, B = NodeId("a"), NodeId("b")
STATE = PullState(
    {A: NodePull(stage=PullStage.COMPLETED, order=1, done=5, total=5), B: NodePull()}, 7, Mirror(A, 2, 3.0)
)
RECORD = PullRecord(
    id="pull-0123456789ab",
    manifest=ModelManifest("pub/model", "c" * 40, (ModelFile("config.json", 5, "a" * 64),)),
    state=STATE,
    started=1000.0,
    actor="admin",
)


def test_load_returns_what_was_stored_the_oldest_first(tmp_path: Path) -> None:
    records = PullRecords(tmp_path)
    assert records.load() == []
    older = replace(RECORD, id="pull-ffffffffffff", started=10.0, ended=20.0)
    for record in (RECORD, older):
        records.store(record)
    assert PullRecords(tmp_path).load() == [older, RECORD]
    records.store(replace(RECORD, ended=2000.0))
    assert PullRecords(tmp_path).load() == [older, replace(RECORD, ended=2000.0)], "a record is replaced"


def test_a_damaged_record_does_not_hide_the_others(tmp_path: Path) -> None:
    records = PullRecords(tmp_path)
    records.store(RECORD)
    (tmp_path / "pulls" / "pull-000000000000.json").write_text('{"id":')
    (tmp_path / "pulls" / "pull-111111111111.json").mkdir()
    assert records.load() == [RECORD]


def test_delete_removes_one_record_and_accepts_a_missing_one(tmp_path: Path) -> None:
    records, other = PullRecords(tmp_path), replace(RECORD, id="pull-ffffffffffff")
    records.store(RECORD)
    records.store(other)
    records.delete(RECORD.id)
    records.delete(RECORD.id)
    assert records.load() == [other]


@pytest.mark.parametrize("name", ["../config", "pull-0123456789AB", "pull-0123456789abc", "pull-0123456789ab/x", ""])
def test_another_text_than_an_id_never_names_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    records = PullRecords(tmp_path)
    with pytest.raises(ValueError, match="is not the id of a pull"):
        records.delete(name)
    with pytest.raises(ValueError, match="is not the id of a pull"):
        records.store(replace(RECORD, id=name))
    assert (tmp_path / "config.json").read_text() == "{}"


def test_set_state_keeps_the_time_of_the_first_end() -> None:
    ended = replace(STATE, nodes={A: STATE.nodes[A]}, mirror=None)
    assert RECORD.set_state(STATE, 5.0).ended is None
    assert RECORD.set_state(ended, 5.0).ended == 5.0
    assert RECORD.set_state(ended, 5.0).set_state(ended, 6.0).ended == 5.0
