from pathlib import Path

import pytest

from tests.coverage import ROOT, Room, covered, rooms, table

FOUND = {
    "files": {
        "router/admission/queue.py": {"summary": {"covered_branches": 7, "num_branches": 8}},
        "router/admission/api_keys.py": {"summary": {"covered_branches": 1, "num_branches": 4}},
        "wire/units.py": {"summary": {"covered_branches": 0, "num_branches": 0}},
    }
}


def test_covered_adds_up_the_branches_of_the_files_of_a_room():
    wanted = [
        Room("router", ("router/*",), 60),
        Room("keys", ("router/admission/api_keys.py",), 0),
        Room("wire", ("wire/*",), 95),
    ]
    sums = covered(FOUND, wanted)
    assert [(one.branches, one.taken, one.percent) for one in sums] == [
        (12, 8, pytest.approx(66.67, abs=0.01)),
        (4, 1, 25),
        (0, 0, 100),
    ]
    assert "| router | 12 | 8 | 66.7 % | 60 % |" in table(sums)


def test_rooms_name_files_that_exist_and_safety_rooms_have_a_floor_of_95():
    found = rooms()
    for room in found:
        assert all(list(Path(ROOT).glob(at)) for at in room.files), room.name
    assert {room.name for room in found if room.floor >= 95} >= {
        "memory safety",
        "placement",
        "leases",
        "membership and trust",
    }
