"""Facts about the coordinator that are constant while it runs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Facts about the coordinator for the routes of its status, settings and CA.

    `epoch` counts the starts of the coordinator. `base_url` is the endpoint for clients, `cluster_url` the address for
    nodes. `started` is in monotonic seconds. `ca_pem` is empty if the endpoint has no CA of its own.
    """

    name: str
    version: str
    epoch: int
    base_url: str
    cluster_url: str
    cluster: str
    started: float
    ca_pem: str = ""
    settings: tuple[dict[str, object], ...] = ()
    """All settings in force, each with its key, value, origin and description."""
