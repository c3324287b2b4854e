import uuid
from pathlib import Path

import pytest

from node.agent.machine_id import MAX_TRIES, compute_machine_id, parse_platform_uuid, read_platform_uuid

LISTING = """+-o J316cAP  <class IOPlatformExpertDevice, id 0x100000240>
    {
      "IOPlatformUUID" = "A1B2C3D4-0000-1111-2222-333344445555"
      "serial-number" = <46>
    }
"""


def test_a_machine_has_one_id_and_an_override_another() -> None:
    assert compute_machine_id() == compute_machine_id()
    assert len(compute_machine_id()) == 32
    assert compute_machine_id("second") not in (compute_machine_id(), compute_machine_id("third"))


def test_the_platform_uuid_is_read_from_ioreg() -> None:
    assert parse_platform_uuid(LISTING) == "A1B2C3D4-0000-1111-2222-333344445555"
    assert parse_platform_uuid("") == ""


def test_a_mac_that_does_not_print_its_id_takes_no_other_one() -> None:
    """A busy Mac can fail once. Another id would make the node a copy of itself."""
    printed = iter(["", LISTING])
    assert read_platform_uuid(lambda command: next(printed)) == "A1B2C3D4-0000-1111-2222-333344445555"
    runs = list[tuple[str, ...]]()
    with pytest.raises(OSError, match="start the node again"):
        read_platform_uuid(lambda command: runs.append(command) or "")
    assert len(runs) == MAX_TRIES


def test_an_id_file_of_a_linux_machine_that_has_no_id_yet_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = tmp_path / "machine-id", tmp_path / "dbus-id"
    monkeypatch.setattr("node.agent.machine_id._LINUX", (first, second))
    monkeypatch.setattr("sys.platform", "linux")
    second.write_text("fedcba\n")
    for text in ("", "\n", "uninitialized\n"):
        first.write_text(text)
        assert compute_machine_id() == compute_machine_id("fedcba")
    first.write_text("abcdef\n")
    assert compute_machine_id() == compute_machine_id("abcdef")
    second.unlink()
    first.write_text("uninitialized\n")
    assert compute_machine_id() == compute_machine_id(f"mac:{uuid.getnode():x}")
