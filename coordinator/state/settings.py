"""Settings of the coordinator; `config.toml` in the state folder, MACPOOL_* or --set."""

from typing import Annotated, Literal

from msgspec import Meta

from coordinator.video.settings import VideoSettings
from host.settings_loader import Section
from router.admission.cache_scope import CacheSettings
from router.settings import RouterSettings

OTHERS = frozenset({"memory", "engine", "models", "node", "worker"})
"""Sections of the same file for the node on this machine."""


class ClusterSettings(Section, frozen=True, kw_only=True):
    """Settings of the cluster."""

    name: Annotated[str, Meta(description="Friendly name of the cluster, shown by Bonjour and to joining Macs.")] = (
        "home"
    )
    bonjour: Annotated[bool, Meta(description="Announce the coordinator on the local network.")] = True
    certificate_days: Annotated[
        float, Meta(gt=0, le=825, description="Life of the certificates that nodes get; renewed at two thirds of it.")
    ] = 90.0


class HttpSettings(Section, frozen=True, kw_only=True):
    """Settings of the clients' endpoint."""

    drain_seconds: Annotated[
        float, Meta(ge=0, description="At shutdown, longest wait for running requests to end.")
    ] = 20.0
    tls: Annotated[
        Literal["auto", "on", "off"],
        Meta(description="HTTPS: auto (beyond loopback), on, or off (keys and prompts can be read on the network)."),
    ] = "auto"
    certificate: Annotated[
        str, Meta(description="PEM file of a certificate with its chain, instead of one by our own authority.")
    ] = ""
    key: Annotated[str, Meta(description="PEM file of that certificate's private key.")] = ""
    anonymous: Annotated[
        bool, Meta(description="Let programs on this machine ask models without a key; only on a loopback address.")
    ] = False
    stranger_connections: Annotated[
        int, Meta(ge=8, le=4096, description="Connections at a time of one address that has shown no API key yet.")
    ] = 128
    hosts: Annotated[
        str, Meta(description="Host names, beside IP addresses and *.local, that requests may name; comma separated.")
    ] = ""


class ConditionSettings(Section, frozen=True, kw_only=True):
    """Notifications of conditions that need a person."""

    webhook: Annotated[
        str, Meta(description="Address that gets a POST for each condition that begins or ends; HTTPS, or loopback.")
    ] = ""


class CoordinatorSettings(Section, frozen=True, kw_only=True):
    """All settings of the coordinator."""

    cluster: ClusterSettings = ClusterSettings()
    http: HttpSettings = HttpSettings()
    router: RouterSettings = RouterSettings()
    cache: CacheSettings = CacheSettings()
    conditions: ConditionSettings = ConditionSettings()
    video: VideoSettings = VideoSettings()
