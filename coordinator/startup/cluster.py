"""Cluster side of the coordinator: links of nodes, membership, and the dispatchers of requests and of video jobs."""

import itertools
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import structlog

from coordinator.backup.generation_fence import SupersededMark
from coordinator.cluster.assembly import NodePool, assemble_pool, create_links
from coordinator.cluster.links.link_admission import CoordinatorIdentity
from coordinator.cluster.links.link_table import LinkTable
from coordinator.cluster.model_operations import ModelOperations
from coordinator.http.listen import list_cluster_addresses
from coordinator.model_tools.benchmark import add_benchmark_key
from coordinator.models.hub_client import HubClient
from coordinator.models.pull_controller import PullController
from coordinator.models.wish_runner import WishRunner
from coordinator.startup.options import RunOptions
from coordinator.startup.state import CoordinatorState, Credentials
from coordinator.video.controller import VideoController
from coordinator.video.fanout import ListenerFanout
from router.admission.api_keys import KeyRing
from router.admission.cache_scope import open_scopes
from router.admission.rate_limits import RateLimits
from router.dispatch.active_request import ActiveRequest
from router.dispatch.dispatcher import Dispatcher

log = structlog.get_logger("coordinator.run")


@dataclass(frozen=True, slots=True)
class ClusterSide:
    """Nodes, the dispatchers of requests and of video jobs, the controller of pulls, and the runner of wishes."""

    nodes: NodePool
    dispatcher: Dispatcher
    video_controller: VideoController
    pulls: PullController
    operations: ModelOperations
    wishes: WishRunner
    port: int
    """TCP port of the cluster port, on which nodes link."""


async def start_cluster(
    options: RunOptions,
    state: CoordinatorState,
    access: Credentials,
    on_superseded: Callable[[SupersededMark], None],
    stack: AsyncExitStack,
) -> ClusterSide:
    """Construct the cluster side and listen for nodes. `stack` stops it.

    `on_superseded` is called with a node's proof that another coordinator is newer. Raise `OSError` if the address
    cannot be used, and `StoreError` if the database of video jobs cannot be used.
    """
    links = create_links()
    dispatcher = _create_dispatcher(options, state.epoch, links.table, access.ring)
    illegal_events = dispatcher.counters.illegal_events
    video_controller = VideoController(
        state.state, options.settings.video, links.table.send, links.fetches.fetch_source, illegal_events
    )
    hub = HubClient(options.settings.hub)
    pulls = PullController(state.state, hub, links.table.send, links.transfers, state.epoch, illegal_events)
    dispatcher.placer.watch_pulls(pulls.find_waiting_refusal)
    operations = ModelOperations(dispatcher, time.monotonic)
    wishes = WishRunner(state.store.wishes, dispatcher, operations, time.monotonic)
    nodes = assemble_pool(
        state.store,
        state.fence,
        CoordinatorIdentity(options.settings.cluster.name, state.version, state.epoch),
        access.tokens,
        access.approvals,
        links,
        ListenerFanout(dispatcher, video_controller, pulls, wishes.handle_view),
        illegal_events,
        wall=time.time,
        on_superseded=on_superseded,
    )
    stack.callback(nodes.registry.close)
    stack.push_async_callback(video_controller.close)
    stack.callback(pulls.close)
    port = await nodes.server.start(*options.cluster_listen, state.authority.get_server_context())
    stack.push_async_callback(nodes.server.close)
    nodes.admission.set_address_source(partial(list_cluster_addresses, options.cluster_listen[0], port))
    return ClusterSide(nodes, dispatcher, video_controller, pulls, operations, wishes, port)


def _create_dispatcher(options: RunOptions, epoch: int, links: LinkTable, ring: KeyRing) -> Dispatcher:
    counter = itertools.count(1)

    def next_numbers() -> tuple[int, int]:
        number = epoch << 40 | next(counter)
        return number, number

    return Dispatcher(
        links.send,
        options.settings.router,
        clock=time.monotonic,
        numbers=next_numbers,
        quotas=RateLimits(add_benchmark_key(ring.get_limits), options.settings.router),
        scopes=open_scopes(options.settings.cache),
        on_failure=_log_failure,
    )


def _log_failure(request: ActiveRequest, code: str) -> None:
    """Log a broken request with the client's id and with the number used by node and engine."""
    log.warning(
        "request broken",
        request_id=request.spec.request_id,
        request=request.attempt,
        node=request.node_name,
        code=code[:40],
    )
