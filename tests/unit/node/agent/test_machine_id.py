from node.agent.machine_id import machine_id, platform_uuid_in

LISTING = """+-o J316cAP  <class IOPlatformExpertDevice, id 0x100000240>
    {
      "IOPlatformUUID" = "A1B2C3D4-0000-1111-2222-333344445555"
      "serial-number" = <46>
    }
"""


def test_a_machine_has_one_id_and_an_override_another() -> None:
    assert machine_id() == machine_id()
    assert len(machine_id()) == 32
    assert machine_id("second") not in (machine_id(), machine_id("third"))


def test_the_platform_uuid_is_read_from_ioreg() -> None:
    assert platform_uuid_in(LISTING) == "A1B2C3D4-0000-1111-2222-333344445555"
    assert platform_uuid_in("") == ""
