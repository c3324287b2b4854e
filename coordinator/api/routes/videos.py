"""Routes of video models and of memory leases for video jobs. `coordinator.video.api` has the routes of jobs."""

from typing import Any

from coordinator.api.auth import KEY
from coordinator.api.route import Route
from coordinator.cluster.registry import Registry
from coordinator.video.controller import VideoController
from coordinator.video.rows import build_lease_row, build_package_rows, build_profile_rows
from router.admission.api_keys import KeyRing
from router.admission.key_scope import filter_view
from router.admission.rate_limits import NO_LIMITS


class VideoRoutes:
    """Routes of the control API for video models, with their memory profiles, and for memory leases."""

    def __init__(self, registry: Registry, controller: VideoController, ring: KeyRing) -> None:
        self._registry = registry
        self._controller = controller
        self._ring = ring

    def list_routes(self) -> tuple[Route, ...]:
        """Return the routes of video models and leases."""
        return (
            Route("GET", "/api/v1/videos/models", "infer", self.video_models),
            Route("GET", "/api/v1/leases", "metrics", self.leases),
        )

    async def video_models(self) -> dict[str, Any]:
        """List the video models that the key may use, with their nodes and memory profiles; sizes in bytes.

        Without measurements, the profile of a node is a prediction. `profiles` has the stored profiles, `lease` the
        size of a lease.
        """
        controller, limits = self._controller, self._ring.get_limits(KEY.get()) or NO_LIMITS
        models = build_package_rows(filter_view(self._registry.build_view(), limits), controller.profiles)
        profiles = {key: profile for key, profile in controller.profiles.items() if limits.allows(key.package)}
        return {
            "schema": 1,
            "lease": controller.settings.lease_bytes,
            "models": models,
            "profiles": build_profile_rows(profiles),
        }

    async def leases(self) -> dict[str, Any]:
        """List the memory leases for video jobs, oldest first; sizes in bytes.

        Leases that are requested but not yet granted, or not confirmed as released, are included. `since` is in Unix
        seconds, `progress` in percent. `orphan` is true if no job uses the lease.
        """
        view, controller = self._registry.build_view(), self._controller
        return {
            "schema": 1,
            "leases": [build_lease_row(hold, controller.table, view) for hold in controller.list_holds()],
        }
