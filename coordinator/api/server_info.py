"""Facts about the coordinator that are constant while it runs."""

from dataclasses import dataclass

from coordinator.http.listen import ListenerAddress


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Facts about the coordinator for the routes of its status, settings and CA."""

    name: str
    """Display name of the cluster."""
    version: str
    """Version of Macpool that the coordinator runs."""
    epoch: int
    """Number of this start of the coordinator, higher than that of every earlier start."""
    address: ListenerAddress
    """Address of the endpoint to which clients connect."""
    cluster_address: ListenerAddress
    """Address of the cluster port to which nodes connect."""
    cluster: str
    """Id of the cluster."""
    started: float
    """Start of the coordinator in monotonic seconds."""
    ca_pem: str = ""
    """CA of the endpoint's certificate (PEM); empty if the endpoint has no CA of its own."""
    settings: tuple[dict[str, object], ...] = ()
    """All settings in force, each with its key, value, origin and description."""
