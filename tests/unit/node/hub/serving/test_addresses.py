"""Addresses at which a mirror listens."""

import pytest

from node.hub.serving.addresses import choose_hosts

OWN = ("127.0.0.1", "192.168.1.5", "::1", "fe80::1", "fd00::5", "169.254.3.4", "0.0.0.0")


def test_choose_hosts_returns_the_address_of_the_link():
    assert choose_hosts("192.168.1.5", OWN) == ("192.168.1.5",)
    assert choose_hosts("fe80::1%en0", OWN) == ("fe80::1%en0",)
    assert choose_hosts("", OWN) == ()


@pytest.mark.parametrize("linked", ["127.0.0.1", "::1"])
def test_choose_hosts_adds_reachable_addresses_next_to_the_coordinator(linked: str):
    assert choose_hosts(linked, OWN) == (linked, "192.168.1.5", "fd00::5")


def test_choose_hosts_reads_the_addresses_of_this_machine():
    assert choose_hosts("127.0.0.1")[0] == "127.0.0.1"
