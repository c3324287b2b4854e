"""Start and stop of the coordinator: state, certificates, links, router, HTTP, Bonjour and the local node on one loop.

`serve` starts all parts, reports ready, waits for a signal and stops the parts in reverse order. The child process (the
node on this machine) ends with the coordinator, even after SIGKILL, because the child watches its standard input.
"""

import asyncio
import contextlib
import gc
import hashlib
import itertools
import json
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from coordinator.alerts.evaluator import AlertLoop, ConditionEvaluator, build_sample, log_condition
from coordinator.alerts.rules import WATCHED
from coordinator.alerts.webhook import Webhook, WebhookAddress, WebhookError, parse_webhook_url
from coordinator.api.control import ControlApi, Observability
from coordinator.api.server_info import ServerInfo
from coordinator.backup import generation_fence
from coordinator.backup.generation_fence import SupersededError, SupersededMark, moved_message
from coordinator.bootstrap import CoordinatorState, Credentials, load_credentials, open_state
from coordinator.cluster.local_node import LocalNode, check_node_cluster
from coordinator.cluster.model_operations import ModelOperations
from coordinator.cluster.registry import Registry
from coordinator.http.chat_fast_path import FastPath
from coordinator.http.connection_slots import ConnectionSlots, compute_max_connections
from coordinator.http.listen import get_local_host, get_reachable_host, list_cluster_addresses, open_listener
from coordinator.http.origin_check import OriginCheck, PrivateResponses
from coordinator.http.server import run_http_server
from coordinator.joining.enrollment import EnrollmentContext, EnrollmentServer
from coordinator.joining.join_tokens import build_join_command
from coordinator.metrics.service import MetricsService
from coordinator.observe.load_history import LoadHistory
from coordinator.observe.load_sampler import read_load, sample_load
from coordinator.state.access_admin import LOCAL_KEY_NAME, AccessAdmin
from coordinator.state.database import MemberRow
from coordinator.state.settings import CoordinatorSettings
from coordinator.tls.cluster_ca import AuthorityError, ClusterCa
from coordinator.tls.https_ca import HttpsCa
from coordinator.tls.https_config import check_http_settings, create_https_tls, read_https_validity
from coordinator.ui.browser_sessions import BrowserSessions
from coordinator.ui.static_files import PageApp
from coordinator.video.api import VideoApp
from coordinator.video.controller import VideoController
from coordinator.video.fanout import ListenerFanout
from host.bonjour_announce import Announcement
from host.heap import map_long_blocks, trim
from host.log_setup import hide_warnings
from host.private_files import write_private
from host.settings_loader import SettingsError
from router.admission.api_keys import KeyRing, new_key
from router.admission.cache_scope import open_scopes
from router.admission.rate_limits import RateLimits
from router.dispatch.active_request import ActiveRequest
from router.dispatch.dispatcher import Dispatcher
from router.http.app import RouterApp, openapi_paths
from router.worker_thread import run_in_worker
from wire.bonjour_record import BonjourRecord, cluster_hint
from wire.identity import NodeId

log = structlog.get_logger("coordinator.run")

MAX_OPEN_FILES = 8192
"""Limit of open files, which include connections, that this process sets for itself."""
RENEWAL_INTERVAL_SECONDS = 60.0
"""Seconds between two checks of the coordinator's certificates; the machine's addresses may change."""
USAGE_INTERVAL_SECONDS = 10.0
"""Seconds between two writes of usage to disk, each with a return of free memory to the system."""
GC_THRESHOLD_OBJECTS = 20_000
"""Garbage collection threshold of the youngest generation, in objects. Python's 700 costs 4 % of a request."""
SWITCH_SECONDS = 0.001
"""Interval, in seconds, after which Python switches threads, for example from one that parses a long body to the loop.
Python's default is 5 ms, and such delays add up."""
LOCAL_NODE_TIMEOUT_SECONDS = 60.0
"""Longest wait for the node on this machine before the coordinator reports ready, in seconds. An engine starts in 2 to
20 s."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of one run of the coordinator. Addresses are (host, port), with port 0 for any free port."""

    state: Path
    """State folder."""
    listen: tuple[str, int]
    """Address of the endpoint."""
    cluster_listen: tuple[str, int]
    """Address of the cluster port, for links of nodes."""
    local_node: bool
    """Whether to start a node on this machine."""
    node_arguments: tuple[str, ...]
    """Further arguments of `node.run` for that node."""
    settings: CoordinatorSettings
    origins: tuple[dict[str, object], ...] = ()
    """The settings as rows: key, value, origin, description."""


class _SupersededHandler:
    """Handler of a node's proof that another coordinator is newer: records it and stops this coordinator."""

    def __init__(self, state: Path, stop: asyncio.Event) -> None:
        self._state = state
        self._stop = stop
        self.mark: SupersededMark | None = None

    def __call__(self, mark: SupersededMark) -> None:
        if self.mark is not None:
            return
        self.mark = mark
        log.error("superseded", generation=mark.generation, node=mark.node)
        with contextlib.suppress(OSError):  # the next start then detects it again
            generation_fence.record_superseded(self._state, mark)
        self._stop.set()

    def check(self) -> None:
        """Raise `SupersededError` if a node has proved that another coordinator is newer."""
        if self.mark is not None:
            raise SupersededError(moved_message(self.mark, self._state))


async def serve(options: RunOptions, ready: Callable[[dict[str, Any]], None]) -> None:
    """Run the coordinator until SIGTERM or SIGINT. Call `ready` once, with the facts of the ready line.

    Raise `SettingsError`, `AuthorityError`, `LocalNodeElsewhereError`, `StoreError` or `OSError` if a part cannot
    start. Raise `StoreError` if the state can no longer be written, and `SupersededError` if another coordinator of
    this cluster is newer.
    """
    stop = asyncio.Event()
    superseded = _SupersededHandler(options.state, stop)
    loop = asyncio.get_running_loop()
    _raise_file_limit()
    map_long_blocks()
    sys.setswitchinterval(SWITCH_SECONDS)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        facts = await _start_parts(options, stack, superseded, partial(loop.call_soon_threadsafe, stop.set))
        # Freeze the permanent objects. Requests create few reference cycles, hence a rare collection is enough.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD_OBJECTS, 20, 20)
        ready(facts)
        log.info("ready", **{name: value for name, value in facts.items() if name.endswith("url")})
        await stop.wait()
        hide_warnings()
        log.info("stopping")
    superseded.check()


def _raise_file_limit() -> None:
    """Raise this process's limit of open files. macOS starts with 256, and each client needs one."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if most == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def _start_parts(
    options: RunOptions, stack: AsyncExitStack, superseded: _SupersededHandler, on_death: Callable[[], object]
) -> dict[str, Any]:
    """Start every part after its dependencies. The stack stops them in reverse order.

    `on_death` is called when the state can no longer be written.
    """
    check_options(options)
    listener = open_listener(*options.listen)
    stack.callback(listener.close)
    state = open_state(options.state, options.settings.cluster, stack)
    state.store.on_death = on_death
    if options.local_node:
        check_node_cluster(options.state, state.authority.cluster)
    access = load_credentials(state, options.settings.http, options.listen[0])
    registry = _create_registry(options, state, access, superseded, stack)
    dispatcher = _create_dispatcher(options, state.epoch, registry, access.ring)
    pool = _Pool(registry, dispatcher, _create_video_controller(options, state.state, registry, dispatcher, stack))
    cluster_port = await registry.links.start(*options.cluster_listen, state.authority.get_server_context())
    stack.push_async_callback(registry.links.close)
    endpoints = _create_endpoints(options, state.state, cluster_port, listener)
    registry.addresses = list_cluster_addresses(options.cluster_listen[0], cluster_port)
    await _serve_http(options, state, access, pool, endpoints, stack)

    key = access.admin.create_key("first", ["infer"], None)["key"] if state.is_new_cluster else None
    _create_local_key(options, state, access, endpoints, stack)
    await state.store.flush()
    _start_periodic_tasks(state, access, dispatcher, endpoints, stack)
    if options.settings.cluster.bonjour:
        _announce_coordinator(options, state, cluster_port, stack)
    node_ready = (
        await _start_local_node(options, state, access, registry, cluster_port, stack) if options.local_node else None
    )
    # The last callback runs first: running requests end before their dependencies are closed.
    stack.push_async_callback(dispatcher.drain, options.settings.http.drain_seconds)
    token = access.tokens.create()
    await state.store.flush()
    _log_guards(options, endpoints.tls)
    return {**_build_ready_facts(endpoints, str(token), key), "local_node_ready": node_ready}


def _create_registry(
    options: RunOptions,
    state: CoordinatorState,
    access: Credentials,
    superseded: _SupersededHandler,
    stack: AsyncExitStack,
) -> Registry:
    name, enrolled = options.settings.cluster.name, list[Callable[[MemberRow], None]]()

    def notify(row: MemberRow) -> None:
        for listener in enrolled:
            listener(row)

    def get_link_address(node: NodeId) -> str:
        return registry.links.get_address(node)

    cluster = EnrollmentContext(
        name, state.authority, access.tokens, state.store, access.approvals, time.time, notify, get_link_address
    )
    registry = Registry(
        state.store,
        state.authority,
        EnrollmentServer(cluster),
        name=name,
        version=state.version,
        epoch=state.epoch,
        fence=state.fence,
    )
    registry.on_superseded = superseded
    enrolled.append(registry.add_member)
    stack.callback(registry.close)
    return registry


def _create_dispatcher(options: RunOptions, epoch: int, registry: Registry, ring: KeyRing) -> Dispatcher:
    counter = itertools.count(1)

    def next_numbers() -> tuple[int, int]:
        number = epoch << 40 | next(counter)
        return number, number

    return Dispatcher(
        registry.links.send,
        options.settings.router,
        clock=time.monotonic,
        numbers=next_numbers,
        quotas=RateLimits(ring.limits, options.settings.router),
        scopes=open_scopes(options.settings.cache),
        on_failure=_log_failure,
    )


def _create_video_controller(
    options: RunOptions, state: Path, registry: Registry, dispatcher: Dispatcher, stack: AsyncExitStack
) -> VideoController:
    video_controller = VideoController(state, options.settings.video, registry.links)
    stack.push_async_callback(video_controller.close)
    registry.listener = ListenerFanout(dispatcher, video_controller)
    return video_controller


@dataclass(frozen=True, slots=True)
class _Pool:
    """Registry of the nodes, with the dispatchers of requests and video jobs."""

    registry: Registry
    dispatcher: Dispatcher
    video_controller: VideoController


@dataclass(frozen=True, slots=True)
class _Endpoints:
    """Addresses of the endpoint for clients, and of the cluster port.

    `local_url` is the URL from this machine. `ca_pem` is empty unless the endpoint has a CA of its own.
    """

    socket: socket.socket
    tls: HttpsCa | ssl.SSLContext | None
    base_url: str
    local_url: str
    cluster_url: str
    ca_pem: str


def check_options(options: RunOptions) -> None:
    """Check the settings of HTTPS and of the webhook before the first file is created.

    Raise `SettingsError` if settings contradict each other or cannot be used.
    """
    try:
        check_http_settings(options.settings.http, options.listen[0])
        if options.settings.alerts.webhook_url:
            _parse_webhook_address(options.settings)
    except AuthorityError as error:
        raise SettingsError(str(error)) from None


def _parse_webhook_address(settings: CoordinatorSettings) -> WebhookAddress:
    try:
        return parse_webhook_url(settings.alerts.webhook_url)
    except WebhookError as error:
        raise AuthorityError(str(error)) from None


def _create_endpoints(options: RunOptions, state: Path, cluster_port: int, listener: socket.socket) -> _Endpoints:
    host, port = options.listen[0], listener.getsockname()[1]
    tls = create_https_tls(options.settings.http, host, state)
    scheme = "http" if tls is None else "https"
    return _Endpoints(
        listener,
        tls,
        f"{scheme}://{get_reachable_host(host)}:{port}",
        f"{scheme}://{get_local_host(host)}:{port}",
        f"macpool://{get_reachable_host(options.cluster_listen[0])}:{cluster_port}",
        tls.ca_pem if isinstance(tls, HttpsCa) else "",
    )


async def _serve_http(
    options: RunOptions,
    state: CoordinatorState,
    access: Credentials,
    pool: _Pool,
    endpoints: _Endpoints,
    stack: AsyncExitStack,
) -> None:
    """Create the routes and serve them."""
    settings, ring, tls = options.settings, access.ring, endpoints.tls
    registry, dispatcher, video_controller = pool.registry, pool.dispatcher, pool.video_controller
    facts = ServerInfo(
        settings.cluster.name,
        state.version,
        state.epoch,
        endpoints.base_url + "/v1",
        endpoints.cluster_url,
        state.authority.cluster,
        time.monotonic(),
        endpoints.ca_pem,
        options.origins,
    )
    metrics = MetricsService(
        registry,
        dispatcher,
        ring,
        state.version,
        partial(read_https_validity, state.authority, tls, settings.http.tls_cert_file),
    )
    metrics.get_video_snapshot = video_controller.take_snapshot
    load = _start_load_history(registry, dispatcher, stack)
    seen = Observability(metrics, _start_conditions(settings, metrics, stack), load, state.events, state.log_file)
    api = ControlApi(
        registry,
        access.admin,
        access.approvals,
        ring,
        dispatcher,
        ModelOperations(dispatcher, time.monotonic),
        video_controller,
        facts,
        openapi_paths(),
        BrowserSessions(ring, access.pepper, time.time),
        seen,
    )
    videos = VideoApp(
        video_controller,
        ring,
        dispatcher.quotas,
        settings.router,
        dispatcher.counters,
        PageApp(PrivateResponses(api.app)),
    )
    app = OriginCheck(
        RouterApp(dispatcher, ring, settings.router, control=videos),
        settings.http.allowed_hosts,
        local=not settings.http.anonymous,
    )
    fast_path = FastPath(dispatcher, ring, settings.router, app)
    context = tls.context if isinstance(tls, HttpsCa) else tls
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    connections = compute_max_connections(MAX_OPEN_FILES if files == resource.RLIM_INFINITY else files)
    places = ConnectionSlots(connections, settings.http.max_connections_without_key)
    await stack.enter_async_context(run_http_server(app, fast_path, [endpoints.socket], context, places))


def _create_local_key(
    options: RunOptions, state: CoordinatorState, access: Credentials, endpoints: _Endpoints, stack: AsyncExitStack
) -> None:
    """Create the key of the owner's commands, valid while the coordinator runs."""
    local, secret = new_key(access.pepper, LOCAL_KEY_NAME, ["admin"], created=time.time())
    access.ring.put(local)
    _write_access_file(state.state / "run.json", endpoints.local_url, secret, endpoints.ca_pem, stack)


def _start_periodic_tasks(
    state: CoordinatorState, access: Credentials, dispatcher: Dispatcher, endpoints: _Endpoints, stack: AsyncExitStack
) -> None:
    """Start the periodic renewal of certificates and the periodic write of usage."""
    stack.push_async_callback(_cancel_task, asyncio.create_task(_renew_certificates(state.authority, endpoints.tls)))
    stack.callback(access.admin.store_usage, dispatcher.usage)
    stack.push_async_callback(_cancel_task, asyncio.create_task(_store_usage(access.admin, dispatcher)))


def _announce_coordinator(
    options: RunOptions, state: CoordinatorState, cluster_port: int, stack: AsyncExitStack
) -> None:
    authority = state.authority
    pin = hashlib.sha256(authority.ca).hexdigest()[:16]
    advert = BonjourRecord("coord", cluster_hint(authority.cluster), state.version, pin)
    announcement = Announcement(advert, options.settings.cluster.name, authority.cluster, cluster_port)
    announcement.start()
    stack.push_async_callback(announcement.close)


async def _start_local_node(
    options: RunOptions,
    state: CoordinatorState,
    access: Credentials,
    registry: Registry,
    cluster_port: int,
    stack: AsyncExitStack,
) -> bool:
    """Start the node on this machine. Return whether it can answer requests."""
    address = f"{get_local_host(options.cluster_listen[0])}:{cluster_port}"
    node = LocalNode(
        state.state, address, options.node_arguments, lambda: str(access.tokens.create(600.0, replaces=True))
    )
    await node.start()
    stack.push_async_callback(node.close)
    return await node.wait_until_ready(registry, LOCAL_NODE_TIMEOUT_SECONDS)


def _build_ready_facts(endpoints: _Endpoints, token: str, key: str | None) -> dict[str, Any]:
    """Return the facts of the ready line. `key` is the first API key, only if it was created now."""
    tls = endpoints.tls
    answer: dict[str, Any] = {
        "schema": 1,
        "ready": True,
        "base_url": endpoints.base_url + "/v1",
        "cluster_url": endpoints.cluster_url,
        "join": build_join_command(endpoints.cluster_url, token),
        "tls": tls is not None,
        "trust": None,
    }
    if isinstance(tls, HttpsCa):
        answer["trust"] = f"cluster trust-ca {endpoints.base_url} --fingerprint {tls.fingerprint}"
    return {**answer, "api_key": key} if key else answer


def _log_guards(options: RunOptions, tls: HttpsCa | ssl.SSLContext | None) -> None:
    """Log the resolved value of every protective setting."""
    http, router = options.settings.http, options.settings.router
    webhook = options.settings.alerts.webhook_url
    log.info(
        "guards resolved",
        listen=f"{options.listen[0]}:{options.listen[1]}",
        cluster_listen=f"{options.cluster_listen[0]}:{options.cluster_listen[1]}",
        tls="off" if tls is None else "own authority" if isinstance(tls, HttpsCa) else "given files",
        anonymous=http.anonymous,
        hosts=http.allowed_hosts or "addresses, localhost and .local names",
        policy=router.policy,
        queue_limit=router.queue_limit or "max(64, 4 x nodes)",
        body_bytes=router.max_body_bytes,
        conditions=len(WATCHED),
        webhook=parse_webhook_url(webhook).host if webhook else "none",
    )


def _start_conditions(
    settings: CoordinatorSettings, metrics: MetricsService, stack: AsyncExitStack
) -> ConditionEvaluator:
    """Start to watch the conditions that need a person. Raise `AuthorityError` if the webhook address is invalid."""
    conditions = ConditionEvaluator()
    conditions.listeners.append(log_condition)
    metrics.get_conditions = conditions.get_flags
    if settings.alerts.webhook_url:
        webhook = Webhook(_parse_webhook_address(settings), settings.cluster.name)
        conditions.listeners.append(webhook.enqueue)
        stack.push_async_callback(_cancel_task, asyncio.create_task(webhook.run()))
    watch = AlertLoop(
        conditions, lambda: build_sample(metrics.take_snapshot(), metrics.take_node_snapshots()), time.time
    )
    stack.push_async_callback(_cancel_task, asyncio.create_task(watch.run()))
    return conditions


def _start_load_history(registry: Registry, dispatcher: Dispatcher, stack: AsyncExitStack) -> LoadHistory:
    """Start to sample the load of the pool."""
    history = LoadHistory()
    sampling = asyncio.create_task(sample_load(history, partial(read_load, registry, dispatcher)))
    stack.push_async_callback(_cancel_task, sampling)
    return history


def _write_access_file(file: Path, url: str, secret: str, trusted: str, stack: AsyncExitStack) -> None:
    """Write the URL and key for the owner's commands into a file that exists while the coordinator runs."""
    write_private(file, json.dumps({"url": url, "secret": secret, "pid": os.getpid(), "ca": trusted}).encode())
    stack.callback(file.unlink, missing_ok=True)


async def _renew_certificates(authority: ClusterCa, tls: HttpsCa | ssl.SSLContext | None) -> None:
    while True:
        authority.renew()
        if isinstance(tls, HttpsCa):
            tls.renew()
        await asyncio.sleep(RENEWAL_INTERVAL_SECONDS)


def _log_failure(request: ActiveRequest, code: str) -> None:
    """Log a broken request with the client's id and with the number used by node and engine."""
    log.warning(
        "request broken",
        request_id=request.spec.request_id,
        request=request.attempt,
        node=request.node_name,
        code=code[:40],
    )


async def _store_usage(admin: AccessAdmin, dispatcher: Dispatcher) -> None:
    while True:
        await asyncio.sleep(USAGE_INTERVAL_SECONDS)
        admin.store_usage(dispatcher.usage)
        gc.collect(
            1
        )  # an ended request may be in a reference cycle with its body, and few objects follow to trigger a collection
        await run_in_worker(trim)


async def _cancel_task(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
