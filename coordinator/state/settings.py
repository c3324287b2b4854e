"""Settings of the coordinator, from `config.toml` in the state folder, MACPOOL_* variables and --set."""

from typing import Annotated, Literal

from msgspec import Meta

from coordinator.models.settings import HubSettings
from coordinator.video.settings import VideoSettings
from host.settings_loader import Section
from router.admission.cache_scope import CacheSettings
from router.settings import RouterSettings

NODE_SECTIONS = frozenset({"memory", "engine", "models", "node", "sharing", "worker"})
"""Sections of `config.toml` that the node on this machine reads, and the coordinator ignores."""
_ORIGIN = r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/,*]+"


class ClusterSettings(Section, frozen=True, kw_only=True):
    """Section `cluster`: name, announcement and certificates of nodes."""

    name: Annotated[
        str, Meta(description="Display name of the cluster, announced by Bonjour and shown to joining Macs.")
    ] = "home"
    bonjour: Annotated[bool, Meta(description="Announce the coordinator on the local network with Bonjour.")] = True
    certificate_days: Annotated[
        float,
        Meta(
            gt=0,
            le=825,
            description="Validity of node certificates in days. A certificate is renewed after two thirds of it.",
        ),
    ] = 90.0


class HttpSettings(Section, frozen=True, kw_only=True):
    """Section `http`: settings of the endpoint for clients."""

    drain_seconds: Annotated[
        float,
        Meta(
            ge=0,
            description="Maximum wait at shutdown for running requests to end. A service is killed 45 s after its stop "
            "signal.",
        ),
    ] = 20.0
    tls: Annotated[
        Literal["auto", "on", "off"],
        Meta(
            description=(
                "HTTPS: auto (on for addresses beyond loopback), on, or off. Without TLS, keys and prompts "
                "can be read on the network."
            )
        ),
    ] = "auto"
    tls_cert_file: Annotated[
        str,
        Meta(
            description=(
                "PEM file of a certificate with its chain. Empty: a certificate of the cluster's own authority."
            )
        ),
    ] = ""
    tls_key_file: Annotated[str, Meta(description="PEM file of the private key for tls_cert_file.")] = ""
    anonymous: Annotated[
        bool, Meta(description="Accept requests to models without an API key. Allowed on a loopback address only.")
    ] = False
    max_connections_without_key: Annotated[
        int,
        Meta(
            ge=8,
            le=4096,
            description="Maximum concurrent connections of one address that has not yet sent a valid API key.",
        ),
    ] = 128
    allowed_hosts: Annotated[
        str,
        Meta(
            description=(
                "Host names that requests may use, separated by commas. IP addresses and localhost are always allowed, "
                "*.local unless http.anonymous is on."
            )
        ),
    ] = ""
    allowed_origins: Annotated[
        str,
        Meta(
            pattern=rf"^({_ORIGIN}( *, *{_ORIGIN})*)?$",
            description=(
                "Origins of browsers whose pages and extensions may use the models, separated by commas, such as "
                "app://obsidian.md. They need an API key."
            ),
        ),
    ] = ""


class AlertSettings(Section, frozen=True, kw_only=True):
    """Section `alerts`: notifications of conditions that need a person."""

    webhook_url: Annotated[
        str, Meta(description="URL that receives a POST for each condition that begins or ends; HTTPS or loopback.")
    ] = ""


class CoordinatorSettings(Section, frozen=True, kw_only=True):
    """All settings of the coordinator, one attribute per section."""

    cluster: ClusterSettings = ClusterSettings()
    http: HttpSettings = HttpSettings()
    router: RouterSettings = RouterSettings()
    cache: CacheSettings = CacheSettings()
    alerts: AlertSettings = AlertSettings()
    video: VideoSettings = VideoSettings()
    hub: HubSettings = HubSettings()
