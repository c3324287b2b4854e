"""The coordinator's composition root: state, certificates, links, router, HTTP, Bonjour and the local node on one loop.

`serve` starts everything, says that it is ready, waits for a signal and takes everything down again in the opposite
order. What it starts as processes (the node on this machine) ends with it, also when it is killed: the child watches
its standard input.
"""

import asyncio
import contextlib
import gc
import hashlib
import ipaddress
import itertools
import json
import os
import resource
import signal
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any

import structlog
import uvicorn

from coordinator.admin import LOCAL, Admin, load_pepper
from coordinator.api.control import Api, Seen
from coordinator.api.facts import Facts
from coordinator.approvals import Approvals
from coordinator.authority import Authority, AuthorityError
from coordinator.conditions.rules import WATCHED
from coordinator.conditions.watch import Conditions, Watch, log_conditions, sample_of
from coordinator.conditions.webhook import Webhook, WebhookError, parse
from coordinator.deadline import ShortBodies
from coordinator.endpoint import Endpoint, from_files, is_loopback, life_of
from coordinator.enrolment import Cluster, Enrolment
from coordinator.events import Events
from coordinator.guard import Guard
from coordinator.http import Door, protocol
from coordinator.keeping import fence
from coordinator.keeping.fence import Fence, Mark, SupersededError, moved_on
from coordinator.loads import Loads
from coordinator.local import LocalNode
from coordinator.metrics.service import Metrics
from coordinator.registry import Registry
from coordinator.settings import CoordinatorSettings
from coordinator.store import MemberRow, Store
from coordinator.tokens import Tokens
from coordinator.video.api import Videos
from coordinator.video.conductor import Conductor
from coordinator.video.placing import Both
from coordinator.video.rays import Rays
from coordinator.web.page import Page
from coordinator.web.visitors import Visitors
from machine.announce import Announcement, addresses
from machine.journal import open_journal
from machine.private import private_folder, write_private
from router.app import FrontDoor, openapi_paths
from router.dispatch import Dispatcher
from router.keys import KeyRing, new_key, nobody_known
from router.quotas import Quotas
from router.ticket import Ticket
from wire.advert import Advert, cluster_hint

log = structlog.get_logger("coordinator.run")

MOST_FILES = 8192
"""Open files and connections that this process allows itself."""
HANDSHAKE_SECONDS = 10.0
"""For a TLS handshake, from the connection on."""
DAY = 86400.0
RENEW_SECONDS = 60.0
"""Between two looks at our own certificates: this machine may have got another address."""
COUNT_SECONDS = 10.0
"""Between two times that what was used is written down; a crash loses no more."""
COLLECT_AFTER = 20_000
"""Objects made and not freed after which the youngest are searched for rings; Python's 700 costs 4 % of a request."""
LOCAL_NODE_SECONDS = 20.0
"""Longest wait for the node on this machine before we say that we are ready without it."""


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


class Server(uvicorn.Server):
    """uvicorn without its own signal handling: the composition root decides when to stop. And with a deadline for
    handshakes, for until one is done no protocol of ours sees the connection."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen."""
        config = self.config
        protocol_class = partial(
            config.http_protocol_class, config=config, server_state=self.server_state, app_state=self.lifespan.state
        )
        patience = None if config.ssl is None else HANDSHAKE_SECONDS
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(protocol_class, sock=one, ssl=config.ssl, ssl_handshake_timeout=patience,
                                     backlog=config.backlog)
            for one in sockets or ()
        ]  # fmt: skip
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Leave signals alone."""
        yield


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
            fence.note(self._state, mark)
        self._stop.set()

    def check(self) -> None:
        """SupersededError where there was such a proof."""
        if self.mark is not None:
            raise SupersededError(moved_on(self.mark, self._state))


async def serve(options: Options, ready: Callable[[dict[str, Any]], None]) -> None:
    """Run until SIGTERM or SIGINT. StoreError or OSError when it cannot start; SupersededError when another coordinator
    of this cluster counts; `ready` is told the facts once."""
    stop = asyncio.Event()
    superseded = _Superseded(options.state, stop)
    loop = asyncio.get_running_loop()
    _allow_files()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        facts = await _start(options, stack, superseded)
        # What lives as long as we do is not looked at again; requests leave few rings, so the collector may be rare.
        gc.collect()
        gc.freeze()
        gc.set_threshold(COLLECT_AFTER, 20, 20)
        ready(facts)
        log.info("ready", **{name: value for name, value in facts.items() if name.endswith("url")})
        await stop.wait()
        log.info("stopping")
    superseded.check()


def _allow_files() -> None:
    """Let this process open as many files as it may: macOS begins with 256, and each client takes one."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if most == resource.RLIM_INFINITY else min(MOST_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def _start(options: Options, stack: AsyncExitStack, superseded: _Superseded) -> dict[str, Any]:
    state, settings = private_folder(options.state), options.settings
    events, log_file = Events(), state / "logs" / "coordinator.log"
    open_journal(log_file, "info", events.tell)
    store = Store(state)
    stack.callback(store.close)
    first = store.meta.cluster == ""
    authority = Authority(state / "authority", time.time, settings.cluster.certificate_days * DAY)
    if first:
        store.found(authority.cluster, settings.cluster.name)
    guard = Fence(authority, store.meta.generation)
    guard.check(state)
    epoch = store.next_epoch()
    version = installed("macpool")

    tokens, approvals, pepper = Tokens(store, authority.ca, time.time), Approvals(), load_pepper(state)
    ring = _ring(options, pepper)
    admin = Admin(store, tokens, ring, pepper, time.time)
    admin.load()
    enrolled: list[Callable[[MemberRow], None]] = []

    def tell(row: MemberRow) -> None:
        for listener in enrolled:
            listener(row)

    enrolment = Enrolment(Cluster(settings.cluster.name, authority, tokens, store, approvals, time.time, tell))
    registry = Registry(store, authority, enrolment, name=settings.cluster.name, version=version, epoch=epoch,
                        fence=guard)  # fmt: skip
    registry.on_superseded = superseded
    enrolled += [registry.enrolled, partial(_joined, store)]
    stack.callback(registry.close)

    counter = itertools.count(1)

    def numbers() -> tuple[int, int]:
        number = epoch << 40 | next(counter)
        return number, number

    dispatcher = Dispatcher(
        registry.links.send, settings.router, clock=asyncio.get_running_loop().time, numbers=numbers,
        quotas=Quotas(ring.limits),
    )  # fmt: skip
    conductor = Conductor(state, settings.video, registry.links)
    stack.push_async_callback(conductor.close)
    dispatcher.on_trouble = _log_trouble
    registry.placing = Both(dispatcher, conductor)
    rays = Rays(state, settings.video, lambda: _ray_host(options.cluster_listen[0]), registry.links,
                conductor.not_started)  # fmt: skip
    stack.push_async_callback(rays.close)
    conductor.starter = rays
    cluster_port = await registry.links.start(*options.cluster_listen, authority.server_context())
    stack.push_async_callback(registry.links.close)

    sockets = [_listen(*options.listen)]
    port = sockets[0].getsockname()[1]
    tls = _tls(options, state)
    scheme = "http" if tls is None else "https"
    base = f"{scheme}://{_reachable(options.listen[0])}:{port}"
    cluster_url = f"macpool://{_reachable(options.cluster_listen[0])}:{cluster_port}"
    registry.addresses = _addresses(options.cluster_listen[0], cluster_port)
    trusted = tls.ca_pem if isinstance(tls, Endpoint) else ""
    facts = Facts(settings.cluster.name, version, epoch, base + "/v1", cluster_url, authority.cluster, time.monotonic(),
                  trusted, options.origins)  # fmt: skip
    loads = Loads(dispatcher, time.monotonic)
    metrics = Metrics(registry, dispatcher, ring, version, partial(_lives, authority, tls, settings.http.certificate))
    metrics.video = conductor.picture
    conditions = _conditions(settings, metrics, stack)
    api = Api(registry, admin, approvals, ring, dispatcher, loads, conductor, facts, openapi_paths(),
              Visitors(ring, pepper, time.time), Seen(metrics, conditions, events, log_file))  # fmt: skip
    videos = Videos(conductor, ring, settings.router, dispatcher.counters, Page(ShortBodies(api.app)))
    app = Guard(FrontDoor(dispatcher, ring, settings.router, control=videos), settings.http.hosts)
    door = Door(dispatcher, ring, settings.router, app)
    context = tls.context if isinstance(tls, Endpoint) else tls
    await stack.enter_async_context(_http(app, door, sockets, context))

    key = None
    if first:
        key = admin.create_key("first", ["infer"], None)["key"]
    local, secret = new_key(pepper, LOCAL, ["admin"], created=time.time())
    ring.put(local)
    _tell_owner(state / "run.json", f"{scheme}://{_from_here(options.listen[0])}:{port}", secret, trusted, stack)
    await store.flush()

    stack.push_async_callback(_cancel, asyncio.create_task(_renew(authority, tls)))
    stack.callback(admin.count, dispatcher.usage)
    stack.push_async_callback(_cancel, asyncio.create_task(_count(admin, dispatcher)))
    if settings.cluster.bonjour:
        advert = Advert(
            "coord", cluster_hint(authority.cluster), version, hashlib.sha256(authority.ca).hexdigest()[:16]
        )
        announcement = Announcement(advert, settings.cluster.name, authority.cluster, cluster_port)
        announcement.start()
        stack.push_async_callback(announcement.close)
    if options.local_node:
        address = f"{_from_here(options.cluster_listen[0])}:{cluster_port}"
        node = LocalNode(state, address, options.node_arguments, lambda: str(tokens.create(600.0)))
        await node.start()
        stack.push_async_callback(node.close)
        await node.linked(registry, LOCAL_NODE_SECONDS)
    # The last to be pushed is the first to be done: running requests end before anything that they need is taken away.
    stack.push_async_callback(dispatcher.drain, settings.http.drain_seconds)
    token = tokens.create()
    await store.flush()
    _say_guards(options, tls)
    answer: dict[str, Any] = {
        "schema": 1,
        "ready": True,
        "base_url": facts.base_url,
        "cluster_url": cluster_url,
        "join": f"cluster join {cluster_url} --token {token}",
        "tls": tls is not None,
        "trust": f"cluster trust-ca {base} --fingerprint {tls.fingerprint}" if isinstance(tls, Endpoint) else None,
    }
    return {**answer, "api_key": key} if key else answer


def _ring(options: Options, pepper: bytes) -> KeyRing:
    """Make the key ring. Programs without a key are let in where only this machine reaches us, and only when said."""
    ring, host = KeyRing(pepper), options.listen[0]
    if options.settings.http.anonymous:
        if not is_loopback(host):
            raise AuthorityError(
                f"http.anonymous is for this machine alone, but {host} can be reached from others: listen on "
                "127.0.0.1, or make keys"
            )
        ring.anonymous = nobody_known(time.time())
    return ring


def _tls(options: Options, state: Path) -> Endpoint | ssl.SSLContext | None:
    """Say how the endpoint is secured: by our own authority, by given files, or not at all."""
    http = options.settings.http
    if http.certificate and http.tls == "off":
        raise AuthorityError("http.certificate is given, but http.tls is off: leave one of them out")
    if http.key and not http.certificate:
        raise AuthorityError("http.key is given without http.certificate")
    if http.certificate:
        return from_files(Path(http.certificate).expanduser(), Path(http.key or http.certificate).expanduser())
    if http.tls == "on" or (http.tls == "auto" and not is_loopback(options.listen[0])):
        return Endpoint(state / "authority", (host.strip().lower() for host in http.hosts.split(",") if host.strip()),
                        time.time)  # fmt: skip
    if not is_loopback(options.listen[0]):
        log.warning("endpoint without TLS", listen=options.listen[0], danger="keys and prompts can be read")
    return None


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
        try:
            webhook = Webhook(parse(settings.conditions.webhook), settings.cluster.name)
        except WebhookError as error:
            raise AuthorityError(str(error)) from None
        conditions.listeners.append(webhook.tell)
        stack.push_async_callback(_cancel, asyncio.create_task(webhook.run()))
    watch = Watch(conditions, lambda: sample_of(metrics.picture(), metrics.nodes()), time.time)
    stack.push_async_callback(_cancel, asyncio.create_task(watch.run()))
    return conditions


def _lives(authority: Authority, tls: Endpoint | ssl.SSLContext | None, file: str) -> dict[str, tuple[float, float]]:
    """Read begin and end of our certificates, and of one that we were given."""
    lives = authority.lives()
    if isinstance(tls, Endpoint):
        lives["endpoint"] = tls.life
    elif tls is not None:
        with contextlib.suppress(AuthorityError):
            lives["endpoint"] = life_of(Path(file).expanduser())
    return lives


def _tell_owner(file: Path, url: str, secret: str, trusted: str, stack: AsyncExitStack) -> None:
    """Write where the owner's commands reach us, for as long as we run."""
    write_private(file, json.dumps({"url": url, "secret": secret, "pid": os.getpid(), "ca": trusted}).encode())
    stack.callback(file.unlink, missing_ok=True)


@asynccontextmanager
async def _http(
    app: Guard, door: Door, sockets: list[socket.socket], tls: ssl.SSLContext | None
) -> AsyncGenerator[None]:
    config = uvicorn.Config(
        app,
        loop="none",
        http=protocol(door),
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
        h11_max_incomplete_event_size=None,
    )
    config.load()
    config.ssl = tls
    server = Server(config)
    task = asyncio.create_task(server.serve(sockets))
    try:
        yield
    finally:
        server.should_exit = True
        await task


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


def _joined(store: Store, row: MemberRow) -> None:
    store.note(time.time(), "node", "joined", f"{row.name} {row.node}")


async def _count(admin: Admin, dispatcher: Dispatcher) -> None:
    while True:
        await asyncio.sleep(COUNT_SECONDS)
        admin.count(dispatcher.usage)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def _listen(host: str, port: int) -> socket.socket:
    """Open the HTTP socket ourselves, so that port 0 is known before anything is announced."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
    listener.listen(1024)
    listener.setblocking(False)
    return listener


def _reachable(host: str) -> str:
    """Give the host that others should use for a listening address; the best LAN address for a wildcard."""
    if host not in ("0.0.0.0", "::"):  # noqa: S104
        return f"[{host}]" if ":" in host else host
    best = next(iter(addresses()), "127.0.0.1")
    return f"[{best}]" if ipaddress.ip_address(best).version == 6 else best


def _ray_host(host: str) -> str:
    """Give the address at which Ray's head listens: the one where nodes reach us."""
    return host if host not in ("0.0.0.0", "::") else next(iter(addresses()), "127.0.0.1")  # noqa: S104


def _from_here(host: str) -> str:
    """Give the host at which this machine itself reaches a listening address."""
    own = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104
    return f"[{own}]" if ":" in own else own


def _addresses(host: str, port: int) -> tuple[str, ...]:
    if host not in ("0.0.0.0", "::"):  # noqa: S104
        return (f"{_reachable(host)}:{port}",)
    return tuple(f"[{a}]:{port}" if ":" in a else f"{a}:{port}" for a in addresses())
