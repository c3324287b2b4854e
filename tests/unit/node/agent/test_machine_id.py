from node.agent.machine_id import compute_machine_id, parse_platform_uuid

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
