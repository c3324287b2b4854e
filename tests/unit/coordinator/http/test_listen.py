"""Addresses of listening sockets, while the network of the machine changes."""

import socket
from functools import partial

import ifaddr
import pytest
from structlog.testing import capture_logs

from coordinator.http.listen import ListenerAddress, list_cluster_addresses, open_listener


class Network:
    """Interfaces of the machine, as `ifaddr` lists them; None if the system cannot list them."""

    def __init__(self, *addresses: str) -> None:
        self.addresses: tuple[str, ...] | None = addresses

    def list_adapters(self) -> list[ifaddr.Adapter]:
        if self.addresses is None:
            raise OSError("too many open files")
        return [ifaddr.Adapter("en0", "en0", [ifaddr.IP(address, 24, "en0") for address in self.addresses])]


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    made = Network()
    monkeypatch.setattr(ifaddr, "get_adapters", made.list_adapters)
    return made


def test_urls_of_a_wildcard_follow_the_addresses_of_the_machine(network: Network):
    endpoint, cluster = ListenerAddress("https", "0.0.0.0", 8080), partial(list_cluster_addresses, "0.0.0.0", 8081)
    either, both = ListenerAddress("https", "::", 8080), partial(list_cluster_addresses, "::", 8081)
    assert (endpoint.build_url(), cluster()) == ("https://127.0.0.1:8080", ()), "no network yet"
    network.addresses = ("192.168.1.5",)
    assert (endpoint.build_url(), cluster()) == ("https://192.168.1.5:8080", ("192.168.1.5:8081",))
    network.addresses = ("10.0.0.7", "fd00::7")
    assert (endpoint.build_url(), cluster()) == ("https://10.0.0.7:8080", ("10.0.0.7:8081",))
    assert (either.build_url(), both()) == ("https://10.0.0.7:8080", ("10.0.0.7:8081", "[fd00::7]:8081"))
    network.addresses = ("fd00::7",)
    assert (endpoint.build_url(), cluster()) == ("https://127.0.0.1:8080", ()), "the socket has IPv4 only"
    assert (either.build_url(), both()) == ("https://[fd00::7]:8080", ("[fd00::7]:8081",))
    network.addresses = None
    assert (endpoint.build_url(), cluster()) == ("https://127.0.0.1:8080", ())
    assert endpoint.build_local_url() == "https://127.0.0.1:8080"
    assert ListenerAddress("http", "::", 1).build_local_url() == "http://[::1]:1"


def test_urls_of_a_fixed_host_have_that_host(network: Network):
    network.addresses = ("192.168.1.5",)
    assert ListenerAddress("macpool", "fd00::1", 8081).build_url() == "macpool://[fd00::1]:8081"
    assert ListenerAddress("http", "10.0.0.7", 80).build_local_url() == "http://10.0.0.7:80"
    assert list_cluster_addresses("10.0.0.7", 80) == ("10.0.0.7:80",)


def test_a_socket_that_no_other_machine_can_reach_is_a_warning(network: Network):
    for host, addresses, warned in (
        ("0.0.0.0", ("fd00::7",), True),
        ("0.0.0.0", ("fd00::7", "10.0.0.7"), False),
        ("0.0.0.0", (), False),
        ("127.0.0.1", ("fd00::7",), False),
    ):
        network.addresses = addresses
        with capture_logs() as logs, open_listener(host, 0, "--cluster-listen"):
            assert [entry["remedy"] for entry in logs] == ["set --cluster-listen to [::]:0"] * warned


def test_the_error_of_a_port_in_use_names_the_option_and_the_next_step():
    with open_listener("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(
            OSError, match=rf"127\.0\.0\.1:{port}: .*-iTCP:{port} .*set --cluster-listen to another port"
        ):
            open_listener("127.0.0.1", port, "--cluster-listen")


@pytest.mark.parametrize(("host", "only_ipv6"), [("::", 0), ("::1", 1)])
def test_the_wildcard_of_all_addresses_accepts_ipv4_too(network: Network, host: str, only_ipv6: int):
    with open_listener(host, 0) as listener:
        assert listener.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY) == only_ipv6


def test_a_restart_can_listen_on_the_port_of_connections_that_have_just_ended():
    with open_listener("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            first.setblocking(True)
            first.accept()[0].close()  # the system keeps the address of the end that closes first
            assert client.recv(1) == b""
    open_listener("127.0.0.1", port).close()
