"""The name of a machine in Bonjour: on a Mac not its host name."""

import socket

import pytest

from host.local_names import LOCAL_HOST_NAME, read_local_name


def test_a_mac_has_the_name_of_its_settings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "host-0-1.dhcp.example")
    printed: dict[tuple[str, ...], str] = {LOCAL_HOST_NAME: "Marias-Mac-Studio\n"}
    assert read_local_name("darwin", lambda command: printed[command]) == "Marias-Mac-Studio"
    assert read_local_name("darwin", lambda _: "") == "host-0-1"
    assert read_local_name("linux", lambda _: "another") == "host-0-1"
