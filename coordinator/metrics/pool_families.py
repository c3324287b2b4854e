"""Metric families of the coordinator: router, members, wishes, videos, and the coordinator itself."""

from coordinator.metrics.coordinator_families import COORDINATOR
from coordinator.metrics.member_families import MEMBERS, WISHES
from coordinator.metrics.router_families import ROUTER
from coordinator.metrics.video_families import VIDEO

POOL = (*ROUTER, *MEMBERS, *WISHES, *VIDEO, *COORDINATOR)
