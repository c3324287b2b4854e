"""Queries to the hub whose child process fails."""

from pathlib import Path

from coordinator.models.hub_client import HubClient
from coordinator.models.settings import HubSettings
from wire.frames import ModelOrderCode
from wire.models.hub_query import HubRefusal


async def test_a_child_that_cannot_be_started_is_a_refusal(tmp_path: Path) -> None:
    answer = await HubClient(HubSettings(), (str(tmp_path / "missing"),)).query("pub/model", "")
    assert isinstance(answer, HubRefusal)
    assert answer.code == ModelOrderCode.FAILED
    assert "cannot be started (No such file or directory)" in answer.message
