"""`cluster trust-ca`: add the authority of the pool's HTTPS endpoint to the trust store of this machine."""

import hashlib
import http.client
import os
import ssl
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import click

from coordinator.client.api_client import ApiSession, raise_for_status, session_options
from coordinator.client.connection import explain_connection_error, parse_base_url
from coordinator.client.errors import NOT_FOUND, PIN, UNREACHABLE, CommandError

if TYPE_CHECKING:
    from cryptography import x509

SYSTEM_STORE = Path("/usr/local/share/ca-certificates")
"""Folder of added authorities on Linux."""
BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/ssl/cert.pem", "/etc/pki/tls/certs/ca-bundle.crt")
"""Files with the system's trusted authorities. The first that exists is part of the bundle of `write_bundle`."""
SYSTEM_FOLDERS = ("/usr/sbin", "/sbin")
"""Folders of administration programs, which the PATH of users, and of root after `su`, lacks on Debian."""
MAX_CERTIFICATE_BYTES = 16_384
"""Maximum bytes of an authority's certificate that `fetch_authority` reads from an untrusted endpoint."""


@click.command("trust-ca")
@click.argument("endpoint", metavar="[URL]", required=False)
@click.option(
    "--fingerprint",
    help="Expected fingerprint, from the output of `cluster up`. Without it, the command asks you to compare.",
)
@click.option("--print", "only_print", is_flag=True, help="Print the certificate (PEM) without trusting it.")
@click.option("--remove", is_flag=True, help="Remove the trust.")
@session_options
def trust_ca(
    session: ApiSession, endpoint: str | None, fingerprint: str | None, only_print: bool, remove: bool
) -> None:
    """Trust the authority of the endpoint at URL, so that this machine's programs can use HTTPS there.

    Without URL, the endpoint is that of the coordinator that commands use. The authority can certify `.local` names,
    `localhost`, the names of `http.allowed_hosts`, and addresses. Run the command on every machine with a client.
    Programs with their own list of authorities (Python, Node, Bun) also need the variables that `cluster env` prints.
    The endpoint must answer, even with --remove.
    """
    base = parse_base_url(endpoint) if endpoint else session.get_url_and_key()[0]
    pem = fetch_authority(base)
    digest = check_authority(pem, base, fingerprint)
    if only_print:
        session.print_answer({"schema": 1, "fingerprint": digest, "pem": pem}, lambda _: click.echo(pem, nl=False))
        return
    if fingerprint is None and not remove:
        confirm_fingerprint(base, digest, pem)
    bundle = write_bundle(session.state, pem, digest, base)
    if remove:
        bundle.unlink()
        bundle.with_suffix(".url").unlink()
    with tempfile.NamedTemporaryFile("w", suffix=".crt") as file:
        file.write(pem)
        file.flush()
        for command in build_commands(sys.platform, Path(file.name), digest, remove=remove):
            _run_command(command)
    answer: dict[str, Any] = {"schema": 1, "fingerprint": digest, "trusted": not remove, "bundle": str(bundle)}
    session.print_answer(answer, _print_trust)


def _print_trust(answer: dict[str, Any]) -> None:
    click.echo("trusted by this machine" if answer["trusted"] else "no longer trusted")
    if answer["trusted"]:
        click.echo('variables for programs with their own list of authorities: eval "$(cluster env)"')


def fetch_confirmed_authority(base: str, fingerprint: str | None) -> str:
    """Return the authority (PEM) of an HTTPS endpoint, confirmed by `fingerprint`, or by a question to the user.

    Return an empty text if `fingerprint` is None and the endpoint has no authority of its own, because then the
    system's authorities apply. Raise `CommandError` if the endpoint cannot be reached, or the authority is not
    confirmed. Raise `click.UsageError` if the user cannot be asked, because there is no terminal.
    """
    try:
        pem = fetch_authority(base)
    except CommandError as error:
        if error.exit_code == NOT_FOUND and fingerprint is None:
            return ""
        raise
    digest = check_authority(pem, base, fingerprint)
    if fingerprint is None:
        confirm_fingerprint(base, digest, pem)
    return pem


def confirm_fingerprint(base: str, fingerprint: str, pem: str) -> None:
    """Ask the user whether `cluster up` shows the same fingerprint for the authority `pem` of the endpoint `base`.

    Raise `CommandError` after a no. Raise `click.UsageError` if there is no terminal.
    """
    text = f"the authority of {base} has the fingerprint\n  {fingerprint}\nand can certify {_describe_scope(pem)}"
    click.echo(text, err=True)
    if not sys.stdin.isatty():
        raise click.UsageError(
            "there is no terminal to confirm it: compare it with the output of `cluster up`, then add --fingerprint"
        )
    if not click.confirm("Does the coordinator's `cluster up` show the same?", err=True):
        raise CommandError(PIN, "nothing was trusted: another machine may intercept the connection")


def fetch_authority(base: str) -> str:
    """Fetch the authority's certificate (PEM) from the endpoint `base`, whose own certificate is not verified.

    Raise `CommandError` if the endpoint does not use HTTPS, cannot be reached, or has no authority of its own. Raise it
    also if the endpoint refuses the request, for example because of its host name.
    """
    parts = urlsplit(base)
    if parts.scheme != "https" or not parts.hostname:
        raise CommandError(2, f"{base} is not an HTTPS endpoint: there is nothing to trust")
    blind = ssl.create_default_context()
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=10.0, context=blind)
    try:
        connection.request("GET", "/api/v1/ca.pem")
        response = connection.getresponse()
        text = response.read(MAX_CERTIFICATE_BYTES).decode("ascii", "replace")
    except OSError as error:
        raise CommandError(*explain_connection_error(base, error)) from None
    except http.client.HTTPException:
        raise CommandError(UNREACHABLE, f"{base} does not answer in HTTP: check the address and the port") from None
    finally:
        connection.close()
    if response.status == 404:
        raise CommandError(NOT_FOUND, f"{base} uses given certificate files: it has no authority of its own")
    if response.status != 200:
        raise_for_status(response.status, text.encode())
    return text


def check_authority(pem: str, base: str, expected: str | None) -> str:
    """Return the fingerprint (SHA-256, hex) of an authority's certificate that was fetched from the URL `base`.

    Raise `CommandError` if `pem` is not a certificate, or if the authority is not constrained to names. Raise it also
    if the fingerprint is not `expected`; None accepts any fingerprint.
    """
    from cryptography import x509

    try:
        certificate = x509.load_pem_x509_certificate(pem.encode())
    except ValueError:
        raise CommandError(1, f"{base} sent no certificate") from None
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest()
    if expected is not None and expected.lower().replace(":", "") != digest:
        raise CommandError(
            PIN,
            f"the authority of {base} has the fingerprint {digest}, not {expected}: do not trust it, "
            "another machine may intercept the connection",
        )
    if not all(_list_permitted_names(certificate) or [""]):  # an empty name permits all
        raise CommandError(
            PIN, f"the authority of {base} can certify any site: it is not an authority of macpool, do not trust it"
        )
    return digest


def _list_permitted_names(certificate: "x509.Certificate") -> list[str]:
    """Return the host names that an authority is constrained to."""
    from cryptography import x509

    from coordinator.tls.https_ca import get_name_constraints

    return [general.value for general in get_name_constraints(certificate) if isinstance(general, x509.DNSName)]


def _describe_scope(pem: str) -> str:
    from cryptography import x509

    return (
        ", ".join(f"{name!r}" for name in _list_permitted_names(x509.load_pem_x509_certificate(pem.encode())))
        + " and addresses"
    )


def write_bundle(state: Path, pem: str, fingerprint: str, base: str) -> Path:
    """Write a PEM file of the authorities in `BUNDLES` and `pem`, for programs that need a file. Return its path.

    A second file next to it has the endpoint's URL, `base`. Raise `OSError` if a file cannot be read or written.
    """
    bundle = _get_bundle_path(state, fingerprint)
    bundle.parent.mkdir(parents=True, exist_ok=True)
    system = next((Path(path).read_text() for path in BUNDLES if Path(path).exists()), "")
    bundle.write_text(f"{system.rstrip()}\n{pem}" if system else pem)
    bundle.with_suffix(".url").write_text(base + "\n")
    return bundle


def find_bundle(state: Path, pem: str) -> str | None:
    """Return the path of the file that `write_bundle` wrote for an authority (PEM); None if there is none.

    Raise `ValueError` if `pem` is not PEM.
    """
    bundle = _get_bundle_path(state, hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest())
    return str(bundle) if bundle.exists() else None


def find_trusted_endpoint(state: Path, base: str | None) -> tuple[str, str] | None:
    """Return the URL and the path of the bundle of the endpoint at `base`, if this machine trusts it.

    If `base` is None, use the endpoint that was trusted last. Return None if there is no such endpoint.
    """
    files = sorted((state / "trusted").glob("*.url"), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files:
        url = file.read_text().strip()
        if file.with_suffix(".pem").exists() and base in (None, url):
            return url, str(file.with_suffix(".pem"))
    return None


def _get_bundle_path(state: Path, fingerprint: str) -> Path:
    return state / "trusted" / f"{fingerprint[:16]}.pem"


def build_commands(platform: str, file: Path, fingerprint: str, *, remove: bool) -> list[list[str]]:
    """Return the commands, as argument lists, that trust the certificate in `file` or, with `remove`, end the trust.

    On macOS, the commands apply to this user, elsewhere to the system. `fingerprint` is part of the certificate's file
    name on Linux.
    """
    if platform == "darwin":
        if remove:
            return [["security", "remove-trusted-cert", str(file)]]
        keychain = str(Path("~/Library/Keychains/login.keychain-db").expanduser())
        return [["security", "add-trusted-cert", "-r", "trustRoot", "-p", "ssl", "-k", keychain, str(file)]]
    place = str(SYSTEM_STORE / f"macpool-{fingerprint[:16]}.crt")
    first = ["rm", "-f", place] if remove else ["install", "-m", "644", str(file), place]
    return [first, ["update-ca-certificates"]]


def _run_command(command: list[str]) -> None:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *SYSTEM_FOLDERS])
    environment = {**os.environ, "PATH": path}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    except FileNotFoundError:
        raise CommandError(
            1,
            f"this system has no {command[0]}: add the certificate of `cluster trust-ca --print` to its "
            "authorities by hand",
        ) from None
    if done.returncode:
        output = done.stderr.strip() or done.stdout.strip()
        raise CommandError(1, f"{' '.join(command)} failed ({output}): run it again with sudo")
