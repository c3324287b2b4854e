"""Routes of videos that are no job's: the models that make them, and the memory that nodes lend to them."""

from typing import Any

from coordinator.api.route import Route
from coordinator.registry import Registry
from coordinator.video.conductor import Conductor
from coordinator.video.shown import lease_row, package_rows, profile_rows


class VideoRoutes:
    """What `cluster lease list` and `video calibrate` ask for."""

    def __init__(self, registry: Registry, conductor: Conductor) -> None:
        self._registry = registry
        self._conductor = conductor

    def routes(self) -> tuple[Route, ...]:
        """Give the routes."""
        return (
            Route("GET", "/api/v1/videos/models", "infer", self.video_models),
            Route("GET", "/api/v1/leases", "metrics", self.leases),
        )

    async def video_models(self) -> dict[str, Any]:
        """List the models that make videos, where they are, and what is known of the memory that they take."""
        conductor = self._conductor
        models = package_rows(self._registry.view(), conductor.profiles)
        return {"schema": 1, "lease": conductor.settings.lease_bytes, "models": models,
                "profiles": profile_rows(conductor.profiles)}  # fmt: skip

    async def leases(self) -> dict[str, Any]:
        """List the memory that nodes have lent to videos, oldest first; sizes in bytes."""
        view, conductor = self._registry.view(), self._conductor
        return {"schema": 1, "leases": [lease_row(hold, conductor.board, view) for hold in conductor.holds()]}
