"""TLS of the endpoint: names that its authority can certify, and names that it cannot."""

import asyncio
import contextlib
import ipaddress
import json
import os
import socket
import ssl
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding

from coordinator.cli import cluster
from coordinator.cli.commands.clients.trust_ca import (
    SYSTEM_STORE,
    build_commands,
    check_authority,
    fetch_authority,
    fetch_confirmed_authority,
    find_bundle,
    find_trusted_endpoint,
    write_bundle,
)
from coordinator.client.errors import PIN, CommandError
from coordinator.http.origin_check import OriginCheck
from coordinator.tls.cluster_ca import (
    AuthorityError,
    build_common_name,
    build_key_usage,
    create_certificate_builder,
    read_key_pair,
    write_key_pair,
)
from coordinator.tls.https_ca import (
    HttpsCa,
    get_name_constraints,
    get_own_names,
    is_local_name,
    is_loopback,
    load_server_context,
)
from wire.certificate import LEAF_VALIDITY_SECONDS, RENEW_AT_SHARE

NOW = time.time()


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def endpoint(
    folder: Path, *hosts: str, here: tuple[str, ...] = ("studio.local", "192.168.1.7"), clock: Clock | None = None
) -> HttpsCa:
    return HttpsCa(folder, hosts, clock or Clock(), lambda: here)


def verifies(folder: Path, name: str, trusted: str) -> str:
    """Return the reason why a client that trusts an authority rejects the certificate; empty if it accepts."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "endpoint.pem")
    client = ssl.create_default_context(cadata=trusted)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    wires = ssl.MemoryBIO(), ssl.MemoryBIO()
    asks = client.wrap_bio(wires[0], wires[1], server_hostname=name)
    answers = server.wrap_bio(wires[1], wires[0], server_side=True)
    for _ in range(4):
        for side in (asks, answers):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
    return "" if asks.version() else "no handshake"


@pytest.mark.parametrize("name", ["localhost", "studio.local", "192.168.1.7", "127.0.0.1", "pool.example"])
def test_it_signs_the_names_of_this_machine(tmp_path: Path, name: str):
    made = endpoint(tmp_path, "pool.example")
    assert name in made.names
    assert verifies(tmp_path, name, made.ca_pem) == ""


def test_public_addresses_and_names_are_left_out(tmp_path: Path):
    made = endpoint(tmp_path, here=("studio.local", "8.8.8.8", "studio.example.com", "fe80::1", "100.100.0.7"))
    assert made.names == ("100.100.0.7", "127.0.0.1", "::1", "fe80::1", "localhost", "studio.local")
    assert not is_local_name("1.1.1.1")


def test_a_stolen_authority_cannot_pose_as_a_public_site(tmp_path: Path):
    made = endpoint(tmp_path)
    authority, ca = read_key_pair(tmp_path / "endpoint-authority.pem")
    key = ec.generate_private_key(ec.SECP256R1())
    forged = (
        create_certificate_builder("forged", key.public_key(), ca.subject, NOW, 1e6)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(build_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("bank.example")]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(
                ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
            ),
            critical=False,
        )
        .sign(authority, hashes.SHA256())
    )
    write_key_pair(tmp_path / "endpoint.pem", key, forged)
    assert "permitted subtree violation" in verifies(tmp_path, "bank.example", made.ca_pem)


def test_boringssl_accepts_it_because_only_names_are_constrained(tmp_path: Path):
    """`make clients` shows the same with Bun itself, which fails with any other kind of constraint."""
    endpoint(tmp_path, "pool.example", "10.1.2.3")
    held = get_name_constraints(read_key_pair(tmp_path / "endpoint-authority.pem")[1])
    assert [general.value for general in held if isinstance(general, x509.DNSName)] == [
        "localhost",
        "local",
        "pool.example",
    ]
    assert len(held) == 3


def test_an_authority_with_constraints_on_addresses_is_issued_again_and_stays_trusted(tmp_path: Path):
    """The first authority is in the form of an earlier version."""
    key = ec.generate_private_key(ec.SECP256R1())
    permitted = [
        x509.DNSName("localhost"),
        x509.DNSName("local"),
        x509.IPAddress(ipaddress.ip_network("127.0.0.0/8")),
        x509.IPAddress(ipaddress.ip_network("192.168.0.0/16")),
        x509.IPAddress(ipaddress.ip_network("::1/128")),
    ]
    earlier = (
        create_certificate_builder(
            "macpool endpoint old", key.public_key(), build_common_name("macpool endpoint old"), NOW, 1e8
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(build_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.NameConstraints(permitted, None), critical=True)
        .sign(key, hashes.SHA256())
    )
    write_key_pair(tmp_path / "endpoint-authority.pem", key, earlier)
    made = endpoint(tmp_path)
    for authority in (earlier.public_bytes(Encoding.PEM).decode(), made.ca_pem):
        for name in ("localhost", "studio.local", "192.168.1.7"):
            assert verifies(tmp_path, name, authority) == ""
    again = read_key_pair(tmp_path / "endpoint-authority.pem")
    assert again[0].private_numbers() == key.private_numbers()
    assert again[1] != earlier
    assert endpoint(tmp_path).fingerprint == made.fingerprint, "once"


def test_https_ca_is_stored_and_renews_when_due_or_for_new_names(tmp_path: Path):
    clock, here = Clock(), ["studio.local", "192.168.1.7"]
    made = HttpsCa(tmp_path, (), clock, lambda: here)
    first = made.fingerprint
    assert not made.renew()
    clock.now += RENEW_AT_SHARE * LEAF_VALIDITY_SECONDS + 1
    assert made.renew()
    here[1] = "192.168.1.9"
    assert made.renew()
    assert "192.168.1.9" in made.names
    assert "192.168.1.7" not in made.names
    assert HttpsCa(tmp_path, (), clock, lambda: here).fingerprint == first, (
        "clients that trust the authority keep their trust"
    )
    assert HttpsCa(tmp_path, ("pool.example",), clock, lambda: here).fingerprint != first, "it may vouch for more"


def test_the_handshake_has_the_authority_with_its_critical_constraints(tmp_path: Path):
    made = endpoint(tmp_path)
    _, authority = x509.load_pem_x509_certificates((tmp_path / "endpoint.pem").read_bytes())
    assert authority.public_bytes(Encoding.PEM).decode() == made.ca_pem
    assert authority.extensions.get_extension_for_class(x509.NameConstraints).critical


def test_its_files_are_private(tmp_path: Path):
    endpoint(tmp_path)
    for name in ("endpoint.pem", "endpoint-authority.pem"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600


async def test_https_ca_is_accepted_only_by_clients_that_trust_it(tmp_path: Path):
    made = HttpsCa(tmp_path, (), time.time, lambda: ())

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=made.context)
    port = server.sockets[0].getsockname()[1]
    trusting = ssl.create_default_context(cadata=made.ca_pem)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting)
    assert await reader.read() == b"hello"
    writer.close()
    with pytest.raises(ssl.SSLCertVerificationError):
        await asyncio.open_connection("127.0.0.1", port, ssl=ssl.create_default_context())
    server.close()


async def test_an_endpoint_that_answers_no_http_is_named(tmp_path: Path):
    def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")

    server = await asyncio.start_server(refuse, "127.0.0.1", 0, ssl=endpoint(tmp_path).context)
    base = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    with pytest.raises(CommandError, match="does not answer in HTTP"):
        await asyncio.to_thread(fetch_authority, base)
    server.close()


async def answer_nothing(*_: object) -> None:
    """Stand for the routes behind a check of hosts."""


async def test_an_endpoint_that_refuses_its_host_name_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        host = next(line[6:] for line in head.split(b"\r\n") if line.lower().startswith(b"host: "))
        problem = OriginCheck(answer_nothing).find_problem("GET", [(b"host", host)])
        assert problem is not None
        body = problem.encode_body("")
        writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%b" % (problem.status, len(body), body))
        writer.close()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0, ssl=endpoint(tmp_path).context)
    port = server.sockets[0].getsockname()[1]
    local = socket.getaddrinfo("127.0.0.1", port, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: local)
    for fingerprint in (None, "0" * 64):
        with pytest.raises(CommandError, match=r"add it to http\.allowed_hosts"):
            await asyncio.to_thread(fetch_confirmed_authority, f"https://mac.fritz.box:{port}", fingerprint)
    server.close()


def test_given_files_that_cannot_be_used_are_named(tmp_path: Path):
    endpoint(tmp_path)
    assert load_server_context(tmp_path / "endpoint.pem", tmp_path / "endpoint.pem")
    (tmp_path / "junk.pem").write_text("junk")
    with pytest.raises(AuthorityError, match=r"with http\.tls_key_file .*junk\.pem cannot be used"):
        load_server_context(tmp_path / "endpoint.pem", tmp_path / "junk.pem")
    with pytest.raises(AuthorityError, match="No such file"):
        load_server_context(tmp_path / "none.pem", tmp_path / "none.pem")


@pytest.mark.parametrize(
    ("host", "only_here"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("192.168.1.2", False),
    ],
)
def test_is_loopback_accepts_loopback_addresses_only(host: str, only_here: bool):
    assert is_loopback(host) is only_here


# cluster trust-ca


def test_only_the_right_and_constrained_authority_is_trusted(tmp_path: Path):
    made = endpoint(tmp_path)
    assert check_authority(made.ca_pem, "https://x", made.fingerprint.upper()) == made.fingerprint
    with pytest.raises(CommandError) as wrong:
        check_authority(made.ca_pem, "https://x", "0" * 64)
    assert wrong.value.exit_code == PIN
    key = ec.generate_private_key(ec.SECP256R1())
    addresses = x509.NameConstraints([x509.IPAddress(ipaddress.ip_network("10.0.0.0/8"))], None)
    for constraints in (None, addresses, x509.NameConstraints([x509.DNSName("")], None)):
        builder = create_certificate_builder("any", key.public_key(), build_common_name("any"), NOW, 1e6)
        if constraints is not None:
            builder = builder.add_extension(constraints, critical=True)
        free = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM).decode()
        with pytest.raises(CommandError, match="can certify any site"):
            check_authority(free, "https://x", None)
    with pytest.raises(CommandError, match="sent no certificate"):
        check_authority("<html>", "https://x", None)


def test_trust_commands_match_the_documentation_of_the_system(tmp_path: Path):
    file, found = tmp_path / "ca.crt", "ab" * 32
    (mac,) = build_commands("darwin", file, found, remove=False)
    assert mac[:5] == ["security", "add-trusted-cert", "-r", "trustRoot", "-p"]
    assert build_commands("darwin", file, found, remove=True) == [["security", "remove-trusted-cert", str(file)]]
    place = str(SYSTEM_STORE / "macpool-abababababababab.crt")
    assert build_commands("linux", file, found, remove=False)[0][-2:] == [str(file), place]
    assert build_commands("linux", file, found, remove=True) == [["rm", "-f", place], ["update-ca-certificates"]]


def test_the_bundle_holds_the_authorities_of_the_system_and_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made, system = endpoint(tmp_path), tmp_path / "system.pem"
    system.write_text(endpoint(tmp_path / "other").ca_pem + "\n\n")
    monkeypatch.setattr("coordinator.cli.commands.clients.trust_ca.BUNDLES", (str(tmp_path / "none"), str(system)))
    assert find_bundle(tmp_path, made.ca_pem) is None
    bundle = write_bundle(tmp_path, made.ca_pem, made.fingerprint, "https://studio.local:8080")
    assert find_bundle(tmp_path, made.ca_pem) == str(bundle)
    assert bundle.read_text() == f"{system.read_text().rstrip()}\n{made.ca_pem}"
    assert ssl.create_default_context(cafile=str(bundle)).cert_store_stats()["x509_ca"] == 2
    system.unlink()
    assert write_bundle(tmp_path, made.ca_pem, made.fingerprint, "https://studio.local:8080").read_text() == made.ca_pem


def test_the_endpoint_that_was_trusted_last_is_the_default(tmp_path: Path):
    found = list[str]()
    for number, name in enumerate(("one", "two")):
        made = endpoint(tmp_path / name)
        bundle = write_bundle(tmp_path, made.ca_pem, made.fingerprint, f"https://{name}.local")
        os.utime(bundle.with_suffix(".url"), (1e9 - number, 1e9 - number))
        found.append(str(bundle))
    assert find_trusted_endpoint(tmp_path, None) == ("https://one.local", found[0])
    assert find_trusted_endpoint(tmp_path, "https://two.local") == ("https://two.local", found[1])
    Path(found[0]).unlink()
    assert find_trusted_endpoint(tmp_path, None) == ("https://two.local", found[1])
    assert find_trusted_endpoint(tmp_path, "https://one.local") is None


def variables(folder: Path, *arguments: str) -> dict[str, str | None]:
    done = CliRunner().invoke(
        cluster, ["env", "--state", str(folder), "-o", "json", *arguments], env={"MACPOOL_URL": ""}
    )
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def test_where_an_endpoint_is_trusted_the_variables_name_it_and_its_file(tmp_path: Path):
    made, url = endpoint(tmp_path), "https://studio.local:8080"
    bundle = str(write_bundle(tmp_path, made.ca_pem, made.fingerprint, url))
    for arguments in ((), ("--url", url), ("--url", url + "/v1/")):
        found = variables(tmp_path, *arguments)
        assert (found["OPENAI_BASE_URL"], found["ANTHROPIC_BASE_URL"], found["OLLAMA_HOST"]) == (url + "/v1", url, url)
        assert {found[name] for name in ("SSL_CERT_FILE", "NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE")} == {bundle}
    assert variables(tmp_path, "--url", "https://other.local:8080")["SSL_CERT_FILE"] is None
    text = CliRunner().invoke(cluster, ["env", "--state", str(tmp_path), "--url", "https://other.local:8080"]).output
    assert "`cluster trust-ca` once" in text
    nothing = CliRunner().invoke(cluster, ["env", "--state", str(tmp_path / "none")], env={"MACPOOL_URL": ""})
    assert "no coordinator runs" in nothing.output


def test_a_renewal_whose_write_failed_is_tried_again(tmp_path: Path):
    clock = Clock()
    made = endpoint(tmp_path, clock=clock)
    clock.now += LEAF_VALIDITY_SECONDS
    file = tmp_path / "endpoint.pem"
    file.unlink()
    file.mkdir()
    with pytest.raises(OSError):
        made.renew()
    file.rmdir()
    assert made.renew()
    assert made.validity[1] > clock.now


@pytest.mark.parametrize("offered", [["h2", "http/1.1"], ["http/1.1"], []])
def test_the_endpoint_speaks_http_1_1_only(tmp_path: Path, offered: list[str]) -> None:
    server = HttpsCa(tmp_path, (), time.time, lambda: ()).context
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    if offered:
        client.set_alpn_protocols(offered)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(3):
        for side in sides:
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert sides[0].selected_alpn_protocol() == ("http/1.1" if offered else None)
    assert sides[0].version() == "TLSv1.3"


def test_addresses_that_cannot_be_listed_end_no_start_and_no_renewal(tmp_path: Path):
    clock, listed = Clock(), False

    def get_local_names() -> tuple[str, ...]:
        if not listed:
            raise OSError(24, "Too many open files")
        return "studio.local", "192.168.1.7"

    made = HttpsCa(tmp_path, ("pool.example",), clock, get_local_names)
    assert {"localhost", "127.0.0.1", "pool.example", *get_own_names()} == {*made.names} - {"::1"}
    assert not made.renew()
    listed = True
    assert made.renew()
    assert {"studio.local", "192.168.1.7"} <= set(made.names)
    names, listed = made.names, False
    clock.now += RENEW_AT_SHARE * LEAF_VALIDITY_SECONDS + 1
    assert made.renew()
    assert made.names == names, "the last known addresses are kept"


def test_a_host_name_with_other_than_ascii_letters_ends_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("socket.gethostname", lambda: "büro" + "ü" * 59)
    made = HttpsCa(tmp_path, (), Clock())
    assert {"localhost", "127.0.0.1"} <= set(made.names)
    assert not [name for name in made.names if name.endswith(".local")]
    assert verifies(tmp_path, "localhost", made.ca_pem) == ""


def test_a_certificate_from_the_future_is_replaced_after_the_clock_was_set_back(tmp_path: Path):
    clock = Clock()
    clock.now += LEAF_VALIDITY_SECONDS
    made = endpoint(tmp_path, clock=clock)
    clock.now = NOW
    assert made.renew()
    assert made.validity[0] <= NOW
    assert not made.renew()
