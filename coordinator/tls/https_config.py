"""TLS configuration of the endpoint, and validity of its certificates."""

import contextlib
import ssl
import time
from pathlib import Path

import structlog

from coordinator.state.settings import HttpSettings
from coordinator.tls.cluster_ca import AuthorityError, ClusterCa
from coordinator.tls.https_ca import HttpsCa, certificate_validity, from_files, is_loopback

log = structlog.get_logger("coordinator.tls.https_ca")


def https_tls(http: HttpSettings, listen: str, state: Path) -> HttpsCa | ssl.SSLContext | None:
    """Return the TLS of the endpoint at `listen`: its own authority, a context of given files, or None.

    Raise `AuthorityError` if the settings contradict each other or the files are missing.
    """
    check_http(http, listen)
    if http.certificate:
        return from_files(Path(http.certificate).expanduser(), Path(http.key or http.certificate).expanduser())
    if http.tls == "on" or (http.tls == "auto" and not is_loopback(listen)):
        return HttpsCa(
            state / "authority", (host.strip().lower() for host in http.hosts.split(",") if host.strip()), time.time
        )
    if not is_loopback(listen):
        log.warning("endpoint without TLS", listen=listen, danger="keys and prompts can be read")
    return None


def check_http(http: HttpSettings, listen: str) -> None:
    """Check the settings of the endpoint at `listen` and the certificate files that they name.

    Raise `AuthorityError` if the settings contradict each other or the files cannot be used.
    """
    if http.certificate and http.tls == "off":
        raise AuthorityError("http.certificate is given, but http.tls is off: leave one of them out")
    if http.key and not http.certificate:
        raise AuthorityError("http.key is given without http.certificate")
    if http.certificate:
        from_files(Path(http.certificate).expanduser(), Path(http.key or http.certificate).expanduser())
    if http.anonymous and not is_loopback(listen):
        raise AuthorityError(
            f"http.anonymous is for this machine alone, but {listen} can be reached from others: listen on 127.0.0.1, "
            "or make keys"
        )


def https_validity(
    authority: ClusterCa, tls: HttpsCa | ssl.SSLContext | None, file: str
) -> dict[str, tuple[float, float]]:
    """Return issue and expiry of the coordinator's certificates and of a given one, in Unix seconds."""
    lives = authority.validity()
    if isinstance(tls, HttpsCa):
        lives["endpoint"] = tls.life
    elif tls is not None:
        with contextlib.suppress(AuthorityError):
            lives["endpoint"] = certificate_validity(Path(file).expanduser())
    return lives
