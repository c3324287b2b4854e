"""TLS of the endpoint by its settings: where it is on, which settings are refused, and the reported validity."""

import time
from pathlib import Path

import pytest
import structlog.testing

from coordinator.state.settings import HttpSettings
from coordinator.tls.certificate_files import CertificateFiles
from coordinator.tls.cluster_ca import AuthorityError, ClusterCa
from coordinator.tls.https_ca import HttpsCa
from coordinator.tls.https_config import check_http_settings, create_https_tls, read_https_validity


@pytest.mark.parametrize(
    ("tls", "listen", "encrypts", "warns"),
    [
        ("auto", "127.0.0.1", False, False),
        ("auto", "::1", False, False),
        ("auto", "0.0.0.0", True, False),
        ("auto", "192.168.1.7", True, False),
        ("on", "127.0.0.1", True, False),
        ("off", "127.0.0.1", False, False),
        ("off", "0.0.0.0", False, True),
    ],
)
def test_endpoint_beyond_loopback_is_encrypted_or_warned_about(
    tmp_path: Path, tls: str, listen: str, encrypts: bool, warns: bool
):
    settings = HttpSettings(tls=tls)  # type: ignore[arg-type]
    with structlog.testing.capture_logs() as logs:
        made = create_https_tls(settings, listen, tmp_path)
    assert isinstance(made, HttpsCa) is encrypts
    assert encrypts or made is None
    expected = {"listen": listen, "danger": "keys and prompts can be read"} if warns else None
    warnings = [line for line in logs if line["event"] == "endpoint without TLS"]
    assert [{name: line[name] for name in ("listen", "danger")} for line in warnings] == ([expected] if warns else [])


def test_certificate_has_the_names_of_the_setting(tmp_path: Path):
    made = create_https_tls(HttpSettings(tls="on", allowed_hosts=" Pool.Example , ,mac.lan"), "127.0.0.1", tmp_path)
    assert isinstance(made, HttpsCa)
    assert {"pool.example", "mac.lan"} <= set(made.names)
    assert "" not in made.names


@pytest.mark.parametrize(
    ("settings", "listen", "words"),
    [
        (HttpSettings(tls="off", tls_cert_file="cert.pem"), "127.0.0.1", "http.tls_cert_file is given, but http.tls"),
        (HttpSettings(tls_key_file="key.pem"), "127.0.0.1", "http.tls_key_file is given without http.tls_cert_file"),
        (HttpSettings(tls_cert_file="/missing.pem"), "127.0.0.1", "/missing.pem .* cannot be used: No such file"),
        (HttpSettings(tls_cert_file="~unknown-user/cert.pem"), "127.0.0.1", "~unknown-user/cert.pem .* cannot be used"),
        (HttpSettings(anonymous=True), "0.0.0.0", "other machines can reach 0.0.0.0: listen on 127.0.0.1"),
        (HttpSettings(anonymous=True), "studio.local", "other machines can reach studio.local"),
        (HttpSettings(tls="on", allowed_hosts="pool.lan,*.lan"), "127.0.0.1", r"cannot contain '\*\.lan'"),
        (HttpSettings(allowed_hosts="Büro.example"), "0.0.0.0", "cannot contain 'büro.example'"),
    ],
)
def test_dangerous_or_contradicting_settings_are_refused(
    tmp_path: Path, settings: HttpSettings, listen: str, words: str
):
    with pytest.raises(AuthorityError, match=words):
        create_https_tls(settings, listen, tmp_path)
    assert not (tmp_path / "authority").exists(), "nothing was made for an endpoint that does not start"


def test_anonymous_clients_are_allowed_on_loopback(tmp_path: Path):
    assert create_https_tls(HttpSettings(anonymous=True), "127.0.0.1", tmp_path) is None


def test_own_certificate_file_is_used_with_its_key_and_its_validity_is_reported(tmp_path: Path):
    authority = ClusterCa(tmp_path / "cluster", time.time)
    own = HttpsCa(tmp_path / "own", (), time.time)
    file = tmp_path / "own" / "endpoint.pem"
    made = create_https_tls(HttpSettings(tls_cert_file=str(file)), "0.0.0.0", tmp_path / "state")
    assert isinstance(made, CertificateFiles), "the key is in the same file"
    assert not (tmp_path / "state").exists(), "no authority of the cluster is made for it"
    validity = read_https_validity(authority, made)
    assert validity["endpoint"] == own.validity
    assert validity.keys() == {"authority", "coordinator", "endpoint"}
    file.unlink()
    assert read_https_validity(authority, made) == validity, "the certificate that is served"


def test_a_certificate_that_cannot_be_read_hides_no_other(tmp_path: Path):
    authority = ClusterCa(tmp_path / "cluster", time.time)
    made = create_https_tls(HttpSettings(tls="on"), "127.0.0.1", tmp_path)
    assert isinstance(made, HttpsCa)
    (tmp_path / "cluster" / "coordinator.pem").write_text("no certificate")
    with structlog.testing.capture_logs() as logs:
        validity = read_https_validity(authority, made)
    assert validity == {"authority": authority.ca_validity, "endpoint": made.validity}
    assert [(line["log_level"], line["certificate"]) for line in logs] == [("warning", "coordinator")]
    assert "coordinator.pem" in logs[0]["error"]
    (tmp_path / "authority" / "endpoint.pem").unlink()
    assert read_https_validity(authority, made).keys() == {"authority"}


def test_validity_of_the_own_authority_is_reported_with_tls_only(tmp_path: Path):
    authority = ClusterCa(tmp_path / "cluster", time.time)
    made = create_https_tls(HttpSettings(tls="on"), "127.0.0.1", tmp_path)
    assert isinstance(made, HttpsCa)
    assert read_https_validity(authority, made)["endpoint"] == made.validity
    assert "endpoint" not in read_https_validity(authority, None)


def test_files_of_the_settings_are_checked_without_an_endpoint(tmp_path: Path):
    HttpsCa(tmp_path, (), time.time)
    both = (tmp_path / "endpoint.pem").read_text()
    end = "-----END PRIVATE KEY-----\n"
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    key.write_text(both[: both.index(end) + len(end)])
    certificate.write_text(both[both.index(end) + len(end) :])
    check_http_settings(HttpSettings(tls_cert_file=str(certificate), tls_key_file=str(key)), "0.0.0.0")
    for settings in (
        HttpSettings(tls_cert_file=str(certificate)),
        HttpSettings(tls_cert_file=str(key), tls_key_file=str(certificate)),
    ):
        with pytest.raises(AuthorityError, match="cannot be used"):
            check_http_settings(settings, "0.0.0.0")
