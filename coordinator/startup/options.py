"""Options of one run of the coordinator, their check, and the log of protective settings."""

from dataclasses import dataclass
from pathlib import Path

import structlog

from coordinator.alerts.rules import WATCHED
from coordinator.alerts.webhook import WebhookAddress, WebhookError, parse_webhook_url
from coordinator.state.settings import CoordinatorSettings
from coordinator.tls.cluster_ca import AuthorityError
from coordinator.tls.https_ca import HttpsCa
from coordinator.tls.https_config import EndpointTls, check_http_settings
from host.settings_loader import SettingsError

log = structlog.get_logger("coordinator.run")


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of one run of the coordinator. Addresses are (host, port), with port 0 for any free port."""

    state: Path
    """State folder of the coordinator."""
    listen: tuple[str, int]
    """Host and port of the endpoint."""
    cluster_listen: tuple[str, int]
    """Host and port of the cluster port, to which nodes link."""
    local_node: bool
    """Whether to start a node on this machine."""
    node_arguments: tuple[str, ...]
    """Further arguments of `node.run` for the node on this machine."""
    settings: CoordinatorSettings
    origins: tuple[dict[str, object], ...] = ()
    """All settings as rows: key, value, origin, description."""


def check_options(options: RunOptions) -> None:
    """Check the settings of HTTPS, anonymous clients and the webhook, before the first file is created.

    Raise `SettingsError` if settings contradict each other, or name a certificate file or URL that cannot be used.
    """
    try:
        check_http_settings(options.settings.http, options.listen[0])
        if options.settings.alerts.webhook_url:
            parse_webhook_address(options.settings)
    except AuthorityError as error:
        raise SettingsError(str(error)) from None


def parse_webhook_address(settings: CoordinatorSettings) -> WebhookAddress:
    """Return the address of the webhook in the settings. Its host is not resolved.

    Raise `AuthorityError` if the URL is empty or invalid.
    """
    try:
        return parse_webhook_url(settings.alerts.webhook_url)
    except WebhookError as error:
        raise AuthorityError(str(error)) from None


def log_guards(options: RunOptions, tls: EndpointTls) -> None:
    """Log the value in force of every protective setting. `tls` is the TLS of the endpoint; None for plain HTTP.

    Of the webhook's URL, which may contain a secret, only the host is logged.
    """
    http, router = options.settings.http, options.settings.router
    webhook = options.settings.alerts.webhook_url
    log.info(
        "guards resolved",
        listen=f"{options.listen[0]}:{options.listen[1]}",
        cluster_listen=f"{options.cluster_listen[0]}:{options.cluster_listen[1]}",
        tls="off" if tls is None else "own authority" if isinstance(tls, HttpsCa) else "given files",
        anonymous=http.anonymous,
        hosts=http.allowed_hosts or "addresses, localhost and .local names",
        origins=http.allowed_origins or "none",
        policy=router.policy,
        queue_limit=router.queue_limit or "max(64, 4 x nodes)",
        body_bytes=router.max_body_bytes,
        upstreams=", ".join(router.upstreams) or "none",
        conditions=len(WATCHED),
        webhook=parse_webhook_url(webhook).host if webhook else "none",
    )
