"""The name of a machine in Bonjour: on a Mac not its host name."""

import socket
import sys

import pytest

from host.local_names import LOCAL_HOST_NAME, find_interface, read_local_name


def test_a_mac_has_the_name_of_its_settings(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "host-0-1.dhcp.example")
    printed: dict[tuple[str, ...], str] = {LOCAL_HOST_NAME: "Marias-Mac-Studio\n"}
    assert read_local_name("darwin", lambda command: printed[command]) == "Marias-Mac-Studio"
    assert read_local_name("darwin", lambda _: "") == "host-0-1"
    assert read_local_name("linux", lambda _: "another") == "host-0-1"


def test_an_interface_is_found_by_its_ipv6_address():
    assert find_interface("::1") == socket.if_nametoindex("lo" if sys.platform == "linux" else "lo0")
    assert find_interface("fd00:dead::1") == 0
