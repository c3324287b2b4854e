"""The lock of a state folder: its holder by process id, and its release."""

import os
from pathlib import Path

import pytest

from coordinator.state.state_lock import StateLock
from coordinator.state.store_errors import StateLockedError


def test_the_lock_names_its_holder_and_no_part_of_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("99999999999\n99999999999\n")
    lock = StateLock(tmp_path)
    with pytest.raises(StateLockedError) as refused:
        StateLock(tmp_path)
    assert str(refused.value) == (
        f"the state folder {tmp_path} is in use by process {os.getpid()}: use the running coordinator, or stop it first"
    )
    lock.release()
    StateLock(tmp_path).release()
