"""The coordinator's composition root: state, certificates, links, router, HTTP, Bonjour and the local node on one loop.

`serve` starts everything, says that it is ready, waits for a signal and takes everything down again in the opposite
order. What it starts as processes (the node on this machine) ends with it, also when it is killed: the child watches
its standard input.
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

from coordinator.alerts.evaluator import Conditions, Watch, log_conditions, sample_of
from coordinator.alerts.rules import WATCHED
from coordinator.alerts.webhook import Address, Webhook, WebhookError, parse
from coordinator.api.control import Api, Seen
from coordinator.api.server_info import Facts
from coordinator.backup import generation_fence
from coordinator.backup.generation_fence import Mark, SupersededError, moved_on
from coordinator.bootstrap import Access, Home, open_access, open_home
from coordinator.cluster.local_node import LocalNode, check_node
from coordinator.cluster.model_operations import Loads
from coordinator.cluster.registry import Registry
from coordinator.http.chat_fast_path import Door
from coordinator.http.connection_slots import Places, room_for
from coordinator.http.listen import cluster_addresses, from_here, listen, reachable
from coordinator.http.origin_check import Guard, Private
from coordinator.http.server import http_server
from coordinator.joining.enrollment import Cluster, Enrolment
from coordinator.joining.join_tokens import join_line
from coordinator.metrics.service import Metrics
from coordinator.observe.load_history import LoadHistory
from coordinator.observe.load_sampler import read_load, sample_load
from coordinator.state.access_admin import LOCAL, Admin
from coordinator.state.database import MemberRow
from coordinator.state.settings import CoordinatorSettings
from coordinator.tls.cluster_ca import Authority, AuthorityError
from coordinator.tls.https_ca import Endpoint
from coordinator.tls.https_config import check_http, lives_of, tls_of
from coordinator.ui.browser_sessions import Visitors
from coordinator.ui.static_files import Page
from coordinator.video.api import Videos
from coordinator.video.controller import Conductor
from coordinator.video.fanout import Both
from host.bonjour_announce import Announcement
from host.heap import map_long_blocks, trim
from host.log_setup import hide_warnings
from host.private_files import write_private
from host.settings_loader import SettingsError
from router.admission.api_keys import KeyRing, new_key
from router.admission.cache_scope import open_scopes
from router.admission.rate_limits import Quotas
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.request import Ticket
from router.http.app import FrontDoor, openapi_paths
from router.worker_thread import beside
from wire.bonjour_record import Advert, cluster_hint
from wire.identity import NodeId

log = structlog.get_logger("coordinator.run")

MOST_FILES = 8192
"""Open files and connections that this process allows itself."""
RENEW_SECONDS = 60.0
"""Between two looks at our own certificates: this machine may have got another address."""
COUNT_SECONDS = 10.0
"""Seconds between two times that usage is written to disk, and free memory is returned to the system."""
COLLECT_AFTER = 20_000
"""Objects made and not freed after which the youngest are searched for rings; Python's 700 costs 4 % of a request."""
SWITCH_SECONDS = 0.001
"""Longest time for which a thread that parses a long body keeps the loop waiting, where Python's 5 ms add up."""
LOCAL_NODE_SECONDS = 60.0
"""Longest wait for the node on this machine before the coordinator reports ready without it: an engine starts in 2 to
20 s."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line gives. Addresses are (host, port), port 0 for any."""

    state: Path
    listen: tuple[str, int]
    cluster_listen: tuple[str, int]
    local_node: bool
    node_arguments: tuple[str, ...]
    settings: CoordinatorSettings
    origins: tuple[dict[str, object], ...] = ()
    """The same settings one by one: key, value, origin, description."""


class _Superseded:
    """What a node's proof that the cluster moved on leads to: it is noted, and we end."""

    def __init__(self, state: Path, stop: asyncio.Event) -> None:
        self._state = state
        self._stop = stop
        self.mark: Mark | None = None

    def __call__(self, mark: Mark) -> None:
        if self.mark is not None:
            return
        self.mark = mark
        log.error("superseded", generation=mark.generation, node=mark.node)
        with contextlib.suppress(OSError):  # then it is found out again after the next start
            generation_fence.note(self._state, mark)
        self._stop.set()

    def check(self) -> None:
        """SupersededError where there was such a proof."""
        if self.mark is not None:
            raise SupersededError(moved_on(self.mark, self._state))


async def serve(options: Options, ready: Callable[[dict[str, Any]], None]) -> None:
    """Run until SIGTERM or SIGINT. StoreError or OSError when it cannot start, StoreError also when the state can no
    longer be written; SupersededError when another coordinator of this cluster counts; `ready` gets the facts once."""
    stop = asyncio.Event()
    superseded = _Superseded(options.state, stop)
    loop = asyncio.get_running_loop()
    _allow_files()
    map_long_blocks()
    sys.setswitchinterval(SWITCH_SECONDS)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        facts = await _start(options, stack, superseded, partial(loop.call_soon_threadsafe, stop.set))
        # What lives as long as we do is not looked at again; requests leave few rings, so the collector may be rare.
        gc.collect()
        gc.freeze()
        gc.set_threshold(COLLECT_AFTER, 20, 20)
        ready(facts)
        log.info("ready", **{name: value for name, value in facts.items() if name.endswith("url")})
        await stop.wait()
        hide_warnings()
        log.info("stopping")
    superseded.check()


def _allow_files() -> None:
    """Let this process open as many files as it may: macOS begins with 256, and each client takes one."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if most == resource.RLIM_INFINITY else min(MOST_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def _start(
    options: Options, stack: AsyncExitStack, superseded: _Superseded, on_death: Callable[[], object]
) -> dict[str, Any]:
    """Start every part after those that it needs; the stack takes them down in the opposite order. `on_death` is called
    when the state can no longer be written."""
    check_options(options)
    opened = listen(*options.listen)
    stack.callback(opened.close)
    home = open_home(options.state, options.settings.cluster, stack)
    home.store.on_death = on_death
    if options.local_node:
        check_node(options.state, home.authority.cluster)
    access = open_access(home, options.settings.http, options.listen[0])
    registry = _registry(options, home, access, superseded, stack)
    dispatcher = _dispatcher(options, home.epoch, registry, access.ring)
    pool = _Pool(registry, dispatcher, _video(options, home.state, registry, dispatcher, stack))
    cluster_port = await registry.links.start(*options.cluster_listen, home.authority.server_context())
    stack.push_async_callback(registry.links.close)
    entrance = _entrance(options, home.state, cluster_port, opened)
    registry.addresses = cluster_addresses(options.cluster_listen[0], cluster_port)
    await _serve_http(options, home, access, pool, entrance, stack)

    key = access.admin.create_key("first", ["infer"], None)["key"] if home.first else None
    _let_owner_in(options, home, access, entrance, stack)
    await home.store.flush()
    _keep_up(home, access, dispatcher, entrance, stack)
    if options.settings.cluster.bonjour:
        _announce(options, home, cluster_port, stack)
    node_ready = (
        await _start_local_node(options, home, access, registry, cluster_port, stack) if options.local_node else None
    )
    # The last to be pushed is the first to be done: running requests end before anything that they need is taken away.
    stack.push_async_callback(dispatcher.drain, options.settings.http.drain_seconds)
    token = access.tokens.create()
    await home.store.flush()
    _say_guards(options, entrance.tls)
    return {**_told(entrance, str(token), key), "local_node_ready": node_ready}


def _registry(options: Options, home: Home, access: Access, superseded: _Superseded, stack: AsyncExitStack) -> Registry:
    name, enrolled = options.settings.cluster.name, list[Callable[[MemberRow], None]]()

    def tell(row: MemberRow) -> None:
        for listener in enrolled:
            listener(row)

    def linked_from(node: NodeId) -> str:
        return registry.links.address(node)

    cluster = Cluster(
        name, home.authority, access.tokens, home.store, access.approvals, time.time, tell, linked_from
    )  # fmt: skip
    registry = Registry(home.store, home.authority, Enrolment(cluster), name=name, version=home.version,
                        epoch=home.epoch, fence=home.fence)  # fmt: skip
    registry.on_superseded = superseded
    enrolled.append(registry.enrolled)
    stack.callback(registry.close)
    return registry


def _dispatcher(options: Options, epoch: int, registry: Registry, ring: KeyRing) -> Dispatcher:
    counter = itertools.count(1)

    def numbers() -> tuple[int, int]:
        number = epoch << 40 | next(counter)
        return number, number

    dispatcher = Dispatcher(
        registry.links.send, options.settings.router, clock=time.monotonic, numbers=numbers,
        quotas=Quotas(ring.limits, options.settings.router), scopes=open_scopes(options.settings.cache),
    )  # fmt: skip
    dispatcher.on_trouble = _log_trouble
    return dispatcher


def _video(
    options: Options, state: Path, registry: Registry, dispatcher: Dispatcher, stack: AsyncExitStack
) -> Conductor:
    conductor = Conductor(state, options.settings.video, registry.links)
    stack.push_async_callback(conductor.close)
    registry.placing = Both(dispatcher, conductor)
    return conductor


@dataclass(frozen=True, slots=True)
class _Pool:
    """The nodes and what runs on them."""

    registry: Registry
    dispatcher: Dispatcher
    conductor: Conductor


@dataclass(frozen=True, slots=True)
class _Entrance:
    """Where clients and nodes reach us. `here` is the URL from this machine; `ca_pem` is empty without our own TLS."""

    socket: socket.socket
    tls: Endpoint | ssl.SSLContext | None
    base: str
    here: str
    cluster_url: str
    ca_pem: str


def check_options(options: Options) -> None:
    """Check everything that can be checked before the first file is created.

    SettingsError for settings that contradict each other or cannot be used.
    """
    try:
        check_http(options.settings.http, options.listen[0])
        if options.settings.conditions.webhook:
            _webhook_address(options.settings)
    except AuthorityError as error:
        raise SettingsError(str(error)) from None


def _webhook_address(settings: CoordinatorSettings) -> Address:
    try:
        return parse(settings.conditions.webhook)
    except WebhookError as error:
        raise AuthorityError(str(error)) from None


def _entrance(options: Options, state: Path, cluster_port: int, opened: socket.socket) -> _Entrance:
    host, port = options.listen[0], opened.getsockname()[1]
    tls = tls_of(options.settings.http, host, state)
    scheme = "http" if tls is None else "https"
    return _Entrance(
        opened, tls, f"{scheme}://{reachable(host)}:{port}", f"{scheme}://{from_here(host)}:{port}",
        f"macpool://{reachable(options.cluster_listen[0])}:{cluster_port}",
        tls.ca_pem if isinstance(tls, Endpoint) else "",
    )  # fmt: skip


async def _serve_http(
    options: Options, home: Home, access: Access, pool: _Pool, entrance: _Entrance, stack: AsyncExitStack
) -> None:
    """Put the routes together, and answer on them from now on."""
    settings, ring, tls = options.settings, access.ring, entrance.tls
    registry, dispatcher, conductor = pool.registry, pool.dispatcher, pool.conductor
    facts = Facts(settings.cluster.name, home.version, home.epoch, entrance.base + "/v1", entrance.cluster_url,
                  home.authority.cluster, time.monotonic(), entrance.ca_pem, options.origins)  # fmt: skip
    metrics = Metrics(registry, dispatcher, ring, home.version,
                      partial(lives_of, home.authority, tls, settings.http.certificate))  # fmt: skip
    metrics.video = conductor.picture
    load = _load_history(registry, dispatcher, stack)
    seen = Seen(metrics, _conditions(settings, metrics, stack), load, home.events, home.log_file)
    api = Api(registry, access.admin, access.approvals, ring, dispatcher, Loads(dispatcher, time.monotonic), conductor,
              facts, openapi_paths(), Visitors(ring, access.pepper, time.time), seen)  # fmt: skip
    videos = Videos(
        conductor, ring, dispatcher.quotas, settings.router, dispatcher.counters, Page(Private(api.app))
    )  # fmt: skip
    app = Guard(
        FrontDoor(dispatcher, ring, settings.router, control=videos),
        settings.http.hosts,
        local=not settings.http.anonymous,
    )
    door = Door(dispatcher, ring, settings.router, app)
    context = tls.context if isinstance(tls, Endpoint) else tls
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = room_for(MOST_FILES if files == resource.RLIM_INFINITY else files)
    places = Places(room, settings.http.stranger_connections)
    await stack.enter_async_context(http_server(app, door, [entrance.socket], context, places))


def _let_owner_in(options: Options, home: Home, access: Access, entrance: _Entrance, stack: AsyncExitStack) -> None:
    """Make the key of the owner's commands, which lives as long as we run."""
    local, secret = new_key(access.pepper, LOCAL, ["admin"], created=time.time())
    access.ring.put(local)
    _tell_owner(home.state / "run.json", entrance.here, secret, entrance.ca_pem, stack)


def _keep_up(home: Home, access: Access, dispatcher: Dispatcher, entrance: _Entrance, stack: AsyncExitStack) -> None:
    """Renew our certificates and write down what was used, again and again."""
    stack.push_async_callback(_cancel, asyncio.create_task(_renew(home.authority, entrance.tls)))
    stack.callback(access.admin.count, dispatcher.usage)
    stack.push_async_callback(_cancel, asyncio.create_task(_count(access.admin, dispatcher)))


def _announce(options: Options, home: Home, cluster_port: int, stack: AsyncExitStack) -> None:
    authority = home.authority
    pin = hashlib.sha256(authority.ca).hexdigest()[:16]
    advert = Advert("coord", cluster_hint(authority.cluster), home.version, pin)
    announcement = Announcement(advert, options.settings.cluster.name, authority.cluster, cluster_port)
    announcement.start()
    stack.push_async_callback(announcement.close)


async def _start_local_node(
    options: Options, home: Home, access: Access, registry: Registry, cluster_port: int, stack: AsyncExitStack
) -> bool:
    """Start the node on this machine; return whether it answers requests already."""
    address = f"{from_here(options.cluster_listen[0])}:{cluster_port}"
    node = LocalNode(
        home.state, address, options.node_arguments, lambda: str(access.tokens.create(600.0, replaces=True))
    )
    await node.start()
    stack.push_async_callback(node.close)
    return await node.ready(registry, LOCAL_NODE_SECONDS)


def _told(entrance: _Entrance, token: str, key: str | None) -> dict[str, Any]:
    """Give the facts of the ready line; the first API key only where it was made now."""
    tls = entrance.tls
    answer: dict[str, Any] = {
        "schema": 1,
        "ready": True,
        "base_url": entrance.base + "/v1",
        "cluster_url": entrance.cluster_url,
        "join": join_line(entrance.cluster_url, token),
        "tls": tls is not None,
        "trust": None,
    }
    if isinstance(tls, Endpoint):
        answer["trust"] = f"cluster trust-ca {entrance.base} --fingerprint {tls.fingerprint}"
    return {**answer, "api_key": key} if key else answer


def _say_guards(options: Options, tls: Endpoint | ssl.SSLContext | None) -> None:
    """Put into the log what every guard of ours resolved to."""
    http, router = options.settings.http, options.settings.router
    webhook = options.settings.conditions.webhook
    log.info(
        "guards resolved",
        listen=f"{options.listen[0]}:{options.listen[1]}",
        cluster_listen=f"{options.cluster_listen[0]}:{options.cluster_listen[1]}",
        tls="off" if tls is None else "own authority" if isinstance(tls, Endpoint) else "given files",
        anonymous=http.anonymous,
        hosts=http.hosts or "addresses, localhost and .local names",
        policy=router.policy,
        queue_limit=router.queue_limit or "max(64, 4 x nodes)",
        body_bytes=router.body_bytes,
        conditions=len(WATCHED),
        webhook=parse(webhook).host if webhook else "none",
    )


def _conditions(settings: CoordinatorSettings, metrics: Metrics, stack: AsyncExitStack) -> Conditions:
    """Begin to watch what needs a person. AuthorityError when the webhook is none."""
    conditions = Conditions()
    conditions.listeners.append(log_conditions)
    metrics.conditions = conditions.flags
    if settings.conditions.webhook:
        webhook = Webhook(_webhook_address(settings), settings.cluster.name)
        conditions.listeners.append(webhook.tell)
        stack.push_async_callback(_cancel, asyncio.create_task(webhook.run()))
    watch = Watch(conditions, lambda: sample_of(metrics.picture(), metrics.nodes()), time.time)
    stack.push_async_callback(_cancel, asyncio.create_task(watch.run()))
    return conditions


def _load_history(registry: Registry, dispatcher: Dispatcher, stack: AsyncExitStack) -> LoadHistory:
    """Begin to sample the load of the pool."""
    history = LoadHistory()
    sampling = asyncio.create_task(sample_load(history, partial(read_load, registry, dispatcher)))
    stack.push_async_callback(_cancel, sampling)
    return history


def _tell_owner(file: Path, url: str, secret: str, trusted: str, stack: AsyncExitStack) -> None:
    """Write where the owner's commands reach us, for as long as we run."""
    write_private(file, json.dumps({"url": url, "secret": secret, "pid": os.getpid(), "ca": trusted}).encode())
    stack.callback(file.unlink, missing_ok=True)


async def _renew(authority: Authority, tls: Endpoint | ssl.SSLContext | None) -> None:
    while True:
        authority.renew()
        if isinstance(tls, Endpoint):
            tls.renew()
        await asyncio.sleep(RENEW_SECONDS)


def _log_trouble(ticket: Ticket, code: str) -> None:
    """Say which request broke, by the client's own id and by the number that node and engine know."""
    log.warning("request broken", request_id=ticket.job.request_id, request=ticket.request, node=ticket.node_name,
                code=code[:40])  # fmt: skip


async def _count(admin: Admin, dispatcher: Dispatcher) -> None:
    while True:
        await asyncio.sleep(COUNT_SECONDS)
        admin.count(dispatcher.usage)
        gc.collect(1)  # an ended request may lie in a ring with its body, and few objects come after it
        await beside(trim)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
