"""TLS of the endpoint as the settings require it, and validity of the coordinator's certificates."""

import time
from collections.abc import Callable
from pathlib import Path

import structlog

from coordinator.state.settings import HttpSettings
from coordinator.tls.certificate_files import CertificateFiles
from coordinator.tls.cluster_ca import AuthorityError, ClusterCa
from coordinator.tls.https_ca import HttpsCa, is_loopback, load_server_context
from host.private_files import resolve_home

log = structlog.get_logger("coordinator.tls.https_ca")

EndpointTls = HttpsCa | CertificateFiles | None
"""TLS of the endpoint: an authority of its own, given certificate files, or None for plain HTTP."""


def create_https_tls(http: HttpSettings, listen: str, state: Path) -> EndpointTls:
    """Return the TLS of the endpoint that listens on the host `listen`; None for plain HTTP.

    `state` is the state folder. Log a warning for plain HTTP beyond loopback. Raise the errors of
    `check_http_settings`. Raise `AuthorityError` if a file of the `HttpsCa` is damaged, and `OSError` if one cannot be
    written.
    """
    check_http_settings(http, listen)
    if http.tls_cert_file:
        return CertificateFiles(*_get_files(http))
    if _needs_own_authority(http, listen):
        return HttpsCa(state / "authority", _list_allowed_hosts(http), time.time)
    if not is_loopback(listen):
        log.warning("endpoint without TLS", listen=listen, danger="keys and prompts can be read")
    return None


def _get_files(http: HttpSettings) -> tuple[Path, Path]:
    """Return the files of the certificate and of its key."""
    return resolve_home(http.tls_cert_file), resolve_home(http.tls_key_file or http.tls_cert_file)


def check_http_settings(http: HttpSettings, listen: str) -> None:
    """Check the settings of the endpoint that listens on the host `listen`, and its certificate files.

    Raise `AuthorityError` if the settings contradict each other, admit anonymous clients of other machines, or name
    files that cannot be used. The error is also raised for an allowed host that the certificate cannot contain.
    """
    if http.tls_cert_file and http.tls == "off":
        raise AuthorityError("http.tls_cert_file is given, but http.tls is off: leave one of them out")
    if http.tls_key_file and not http.tls_cert_file:
        raise AuthorityError("http.tls_key_file is given without http.tls_cert_file")
    if http.tls_cert_file:
        load_server_context(*_get_files(http))
    if _needs_own_authority(http, listen):
        for host in _list_allowed_hosts(http):
            if not host.isascii() or "*" in host:
                raise AuthorityError(
                    f"http.allowed_hosts: the certificate of the endpoint cannot contain {host!r}: write complete "
                    "names, and names with other than ASCII letters in their encoded form (xn--…)"
                )
    if http.anonymous and not is_loopback(listen):
        raise AuthorityError(
            f"http.anonymous is for loopback only, but other machines can reach {listen}: listen on 127.0.0.1, "
            "or create API keys"
        )


def _needs_own_authority(http: HttpSettings, listen: str) -> bool:
    """Return whether the endpoint that listens on the host `listen` uses HTTPS without given certificate files."""
    return not http.tls_cert_file and (http.tls == "on" or (http.tls == "auto" and not is_loopback(listen)))


def _list_allowed_hosts(http: HttpSettings) -> list[str]:
    return [host.strip().lower() for host in http.allowed_hosts.split(",") if host.strip()]


def read_https_validity(authority: ClusterCa, tls: EndpointTls) -> dict[str, tuple[float, float]]:
    """Return the validity of certificates: the times of issue and expiry in Unix seconds, by name.

    The names are `authority`, `coordinator` and, with TLS, `endpoint`. If the file of a certificate cannot be read, the
    certificate is omitted and a warning logged. The other metrics and the alerts do not depend on the file.
    """
    readers: dict[str, Callable[[], tuple[float, float]]] = {
        "authority": lambda: authority.ca_validity,
        "coordinator": lambda: authority.validity,
    }
    if tls is not None:
        readers["endpoint"] = lambda: tls.validity
    validity: dict[str, tuple[float, float]] = {}
    for name, read in readers.items():
        try:
            validity[name] = read()
        except AuthorityError as error:
            log.warning("validity of a certificate is not known", certificate=name, error=str(error))
    return validity
