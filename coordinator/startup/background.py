"""Periodic tasks of the coordinator, its announcement by Bonjour, and the node on this machine."""

import asyncio
import gc
import hashlib
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial

import structlog

from coordinator.alerts.evaluator import AlertLoop, ConditionEvaluator, build_sample, log_condition
from coordinator.cluster.local_node import LocalNode
from coordinator.http.listen import get_local_host
from coordinator.metrics.metrics_source import MetricsSource
from coordinator.models.wish_runner import WishRunner
from coordinator.observe.load_history import LoadHistory
from coordinator.observe.load_sampler import read_load, sample_load
from coordinator.startup.cluster import ClusterSide
from coordinator.startup.options import RunOptions, parse_webhook_address
from coordinator.startup.state import CoordinatorState, Credentials
from coordinator.state.settings import CoordinatorSettings
from coordinator.state.store_errors import StoreError
from coordinator.state.usage_history import UsageHistory
from coordinator.tls.certificate_files import CertificateFiles
from coordinator.tls.cluster_ca import AuthorityError, ClusterCa
from coordinator.tls.https_ca import HttpsCa
from coordinator.tls.https_config import EndpointTls
from host.bonjour_announce import Announcement
from host.heap import trim
from host.local_names import list_addresses
from router.admission.usage import UsageCounter
from router.dispatch.dispatcher import Dispatcher
from router.worker_thread import run_in_worker
from wire.bonjour_record import BonjourRecord, shorten_cluster_id

log = structlog.get_logger("coordinator.startup.background")

RENEWAL_INTERVAL_SECONDS = 60.0
"""Seconds between two checks of the coordinator's certificates."""
CHANGE_CHECK_SECONDS = 5.0
"""Seconds between two checks for changed addresses of the machine and for a changed clock."""
CLOCK_STEP_SECONDS = 60.0
"""Change of the offset between clock and monotonic clock, in seconds since the last renewal, that means a set clock."""
USAGE_INTERVAL_SECONDS = 10.0
"""Seconds between two writes of usage to the disk. Each write also returns free memory to the system."""
LOCAL_NODE_TIMEOUT_SECONDS = 60.0
"""Maximum seconds for which the coordinator waits for the node on this machine before it reports ready.

An engine starts in 2 to 20 s.
"""


def start_periodic_tasks(
    state: CoordinatorState,
    access: Credentials,
    dispatcher: Dispatcher,
    tls: EndpointTls,
    stack: AsyncExitStack,
) -> None:
    """Start the periodic renewal of certificates (`renew_certificates`) and the writing of usage (`store_usage`).

    `stack` stops both and writes the usage a last time. `tls` is the TLS of the endpoint; None for plain HTTP.
    """
    stack.push_async_callback(_cancel_task, asyncio.create_task(renew_certificates(state.authority, tls)))
    stack.callback(access.admin.usage.record, dispatcher.usage)
    stack.push_async_callback(_cancel_task, asyncio.create_task(store_usage(access.admin.usage, dispatcher.usage)))


def start_wishes(wishes: WishRunner, stack: AsyncExitStack) -> None:
    """Start the loop that loads and unloads models for the wishes. `stack` stops the loop."""
    stack.push_async_callback(_cancel_task, asyncio.create_task(wishes.run()))


def start_conditions(
    conditions: ConditionEvaluator, settings: CoordinatorSettings, metrics: MetricsSource, stack: AsyncExitStack
) -> None:
    """Start to evaluate conditions, and to send them to the log and, if one is set, to the webhook.

    `stack` stops the evaluation and the webhook. Raise `AuthorityError` if the webhook address is invalid.
    """
    conditions.listeners.append(log_condition)
    if settings.alerts.webhook_url:
        from coordinator.alerts.webhook import Webhook

        webhook = Webhook(parse_webhook_address(settings), settings.cluster.name)
        conditions.listeners.append(webhook.enqueue)
        stack.push_async_callback(_cancel_task, asyncio.create_task(webhook.run()))
    watch = AlertLoop(
        conditions,
        lambda: build_sample(metrics.take_snapshot(), metrics.take_node_snapshots()),
        time.monotonic,
        time.time,
    )
    stack.push_async_callback(_cancel_task, asyncio.create_task(watch.run()))


def start_load_history(cluster: ClusterSide, stack: AsyncExitStack) -> LoadHistory:
    """Start to sample the load of the pool, and return its history. `stack` stops the sampling."""
    history = LoadHistory()
    sampling = asyncio.create_task(sample_load(history, partial(read_load, cluster.nodes.registry, cluster.dispatcher)))
    stack.push_async_callback(_cancel_task, sampling)
    return history


def announce_coordinator(
    options: RunOptions, state: CoordinatorState, cluster_port: int, stack: AsyncExitStack
) -> None:
    """Announce the cluster port by Bonjour until `stack` is closed."""
    authority = state.authority
    pin = hashlib.sha256(authority.ca).hexdigest()[:16]
    advert = BonjourRecord("coord", shorten_cluster_id(authority.cluster), state.version, pin)
    announcement = Announcement(advert, options.settings.cluster.name, authority.cluster, cluster_port)
    announcement.start()
    stack.push_async_callback(announcement.close)


async def start_local_node(
    options: RunOptions,
    state: CoordinatorState,
    access: Credentials,
    cluster: ClusterSide,
    stop: asyncio.Event,
    stack: AsyncExitStack,
) -> bool:
    """Start the node on this machine. Return whether it can answer requests within `LOCAL_NODE_TIMEOUT_SECONDS`.

    Return False at once when `stop` is set, or when the node is not restarted any more (`LocalNode.given_up`). `stack`
    stops the node. Raise `OSError` if its process cannot be started, and `StoreError` if the join token cannot be
    stored.
    """
    address = f"{get_local_host(options.cluster_listen[0])}:{cluster.port}"
    node = LocalNode(
        state.state, address, options.node_arguments, lambda: str(access.tokens.create(600.0, replaces=True))
    )
    await node.start()
    stack.push_async_callback(node.close)
    return await node.wait_until_ready(cluster.nodes.registry, stop, LOCAL_NODE_TIMEOUT_SECONDS)


async def renew_certificates(authority: ClusterCa, tls: EndpointTls, wall: Callable[[], float] = time.time) -> None:
    """Renew due certificates, and load replaced certificate files, now and every `RENEWAL_INTERVAL_SECONDS`.

    Also renew within `CHANGE_CHECK_SECONDS` after the clock was set. If the endpoint has its own authority, also renew
    after this machine's addresses changed. A failed renewal is logged. The loop runs until it is cancelled. `wall`
    returns Unix seconds.
    """
    due, known, known_offset = 0.0, list[str](), 0.0
    while True:
        now, addresses = time.monotonic(), list_addresses() if isinstance(tls, HttpsCa) else known
        offset = wall() - now
        if now >= due or addresses != known or abs(offset - known_offset) > CLOCK_STEP_SECONDS:
            due, known, known_offset = now + RENEWAL_INTERVAL_SECONDS, addresses, offset
            _renew_certificate(authority)
            if tls is not None:
                _renew_certificate(tls)
        await asyncio.sleep(CHANGE_CHECK_SECONDS)


def _renew_certificate(certificate: ClusterCa | HttpsCa | CertificateFiles) -> None:
    try:
        certificate.renew()
    except Exception as error:
        is_bug = not isinstance(error, AuthorityError)
        log.exception("certificate not renewed", error=str(error), retry_in=RENEWAL_INTERVAL_SECONDS, exc_info=is_bug)


async def store_usage(history: UsageHistory, usage: UsageCounter) -> None:
    """Write usage every `USAGE_INTERVAL_SECONDS` until cancelled, and return free memory to the system.

    Each write also deletes usage that is too old (`UsageHistory.record`). At the cancellation, later usage is not
    written. The first of consecutive failed writes is logged.
    """
    failed = False
    while True:
        await asyncio.sleep(USAGE_INTERVAL_SECONDS)
        try:
            history.record(usage)
            failed = False
        except StoreError as error:
            if not failed:
                log.warning("usage not stored", error=str(error))
            failed = True
        gc.collect(
            1
        )  # an ended request may be in a reference cycle with its body, and few objects follow to trigger a collection
        await run_in_worker(trim)


async def _cancel_task(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
