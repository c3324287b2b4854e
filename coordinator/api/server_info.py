"""Facts that are constant while the coordinator runs."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """`started` by the monotonic clock; `ca_pem` is empty where the endpoint has no authority of its own."""

    name: str
    version: str
    epoch: int
    base_url: str
    cluster_url: str
    cluster: str
    started: float
    ca_pem: str = ""
    settings: tuple[dict[str, object], ...] = ()
    """Every setting in force: key, value, origin, description."""
