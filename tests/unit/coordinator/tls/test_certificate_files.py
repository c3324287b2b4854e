"""Certificate files of the settings: replaced files are served without a restart, and unusable ones never."""

import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, PrivateFormat

from coordinator.tls.certificate_files import CertificateFiles
from coordinator.tls.cluster_ca import AuthorityError, read_key_pair
from coordinator.tls.https_ca import HttpsCa


def issue(folder: Path) -> tuple[Path, tuple[float, float]]:
    """Return a file with a new certificate and its key, and the validity of the certificate."""
    own = HttpsCa(folder, (), time.time)
    return folder / "endpoint.pem", own.validity


def serve(files: CertificateFiles) -> bytes:
    """Return the certificate that a new connection gets."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(to_client, to_server), files.context.wrap_bio(to_server, to_client, server_side=True)
    for end in (*ends, *ends):
        try:
            end.do_handshake()
        except ssl.SSLWantReadError:
            continue
    return ends[0].getpeercert(binary_form=True) or b""


def test_replaced_files_are_served_with_their_validity(tmp_path: Path):
    file, before = issue(tmp_path / "first")
    files = CertificateFiles(file, file)
    first = serve(files)
    files.renew()
    assert (serve(files), files.validity) == (first, before)
    later, _ = issue(tmp_path / "second")
    file.write_bytes(later.read_bytes())
    assert serve(files) == first, "until the next check"
    files.renew()
    assert serve(files) == serve(CertificateFiles(later, later)) != first
    assert files.validity == CertificateFiles(later, later).validity


def test_files_that_cannot_be_used_leave_the_former_certificate(tmp_path: Path):
    file, validity = issue(tmp_path / "first")
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    certificate.write_bytes(file.read_bytes())
    key.write_bytes(file.read_bytes())
    files = CertificateFiles(certificate, key)
    served = serve(files)
    certificate.write_bytes(issue(tmp_path / "second")[0].read_bytes())  # its key follows
    for _ in range(2):
        with pytest.raises(AuthorityError, match=r"certificate\.pem .* cannot be used: "):
            files.renew()
    key.unlink()
    with pytest.raises(AuthorityError, match="cannot be used: No such file"):
        files.renew()
    assert (serve(files), files.validity) == (served, validity)
    key.write_bytes(certificate.read_bytes())
    files.renew()
    assert serve(files) != served
    key.write_bytes(file.read_bytes())  # by mistake
    with pytest.raises(AuthorityError, match="cannot be used: "):
        files.renew()


def test_an_encrypted_key_is_refused_without_a_question_for_its_passphrase(tmp_path: Path):
    file, _ = issue(tmp_path / "first")
    key = tmp_path / "key.pem"
    encryption = BestAvailableEncryption(b"secret")
    key.write_bytes(read_key_pair(file)[0].private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    load = (
        "import sys; from pathlib import Path; from coordinator.tls.certificate_files import CertificateFiles; "
        "CertificateFiles(Path(sys.argv[1]), Path(sys.argv[2]))"
    )
    command = (sys.executable, "-c", load, str(file), str(key))
    done = subprocess.run(  # without a terminal, OpenSSL reads the passphrase from standard input
        command, input="secret\n" * 3, start_new_session=True, capture_output=True, text=True, timeout=60
    )
    assert "pass phrase" not in done.stderr
    assert "cannot be used: the key is encrypted; decrypt it with `openssl pkey`" in done.stderr
    assert f"AuthorityError: http.tls_cert_file {file}" in done.stderr.replace("coordinator.tls.cluster_ca.", "")
