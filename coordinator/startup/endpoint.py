"""HTTP side of the coordinator: the endpoint with all routes, the access file of local commands, and the ready line."""

import json
import os
import resource
import socket
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.alerts.evaluator import ConditionEvaluator
from coordinator.api.control import ControlApi, Observability
from coordinator.api.server_info import ServerInfo
from coordinator.http.chat_fast_path import FastPath
from coordinator.http.connection_slots import ConnectionSlots, compute_max_connections
from coordinator.http.listen import ListenerAddress
from coordinator.http.origin_check import OriginCheck, PrivateResponses
from coordinator.http.server import run_http_server
from coordinator.joining.join_tokens import build_join_command
from coordinator.metrics.metrics_source import MetricsSource
from coordinator.model_tools.benchmark_records import BenchmarkRecords
from coordinator.startup.background import start_conditions, start_load_history
from coordinator.startup.cluster import ClusterSide
from coordinator.startup.options import RunOptions
from coordinator.startup.state import CoordinatorState, Credentials
from coordinator.state.access_admin import LOCAL_KEY_NAME
from coordinator.tls.https_ca import HttpsCa
from coordinator.tls.https_config import EndpointTls, create_https_tls, read_https_validity
from coordinator.ui.browser_sessions import BrowserSessions
from coordinator.ui.static_files import PageApp
from coordinator.video.api import VideoApp
from host.private_files import write_private
from host.settings_loader import SettingsError
from router.admission.api_keys import new_key
from router.dispatch.dispatcher import Dispatcher
from router.http.app import Forwarder, RouterApp, build_openapi_paths
from router.settings import RouterSettings

MAX_OPEN_FILES = 8192
"""Limit of open files, including connections, to which this process raises a lower limit if the system permits it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Listening socket, TLS and addresses of the endpoint for clients, and the address of the cluster port."""

    socket: socket.socket
    """Listening socket of the endpoint."""
    tls: EndpointTls
    """TLS of the endpoint: an authority of its own, or given certificate files; None for plain HTTP."""
    address: ListenerAddress
    """Address at which clients reach the endpoint."""
    cluster_address: ListenerAddress
    """Address at which nodes reach the cluster port, with the scheme `macpool`."""
    ca_pem: str
    """CA of the endpoint (PEM); empty unless it has a CA of its own."""


def create_endpoint(options: RunOptions, state: Path, cluster_port: int, listener: socket.socket) -> Endpoint:
    """Return the endpoint of an open listening socket, with its TLS.

    `state` is the state folder. Raise `AuthorityError` if the TLS settings cannot be used, and `OSError` if a
    certificate cannot be written.
    """
    host, port = options.listen[0], listener.getsockname()[1]
    tls = create_https_tls(options.settings.http, host, state)
    scheme = "http" if tls is None else "https"
    return Endpoint(
        listener,
        tls,
        ListenerAddress(scheme, host, port),
        ListenerAddress("macpool", options.cluster_listen[0], cluster_port),
        tls.ca_pem if isinstance(tls, HttpsCa) else "",
    )


async def serve_http(
    options: RunOptions,
    state: CoordinatorState,
    access: Credentials,
    cluster: ClusterSide,
    endpoint: Endpoint,
    stack: AsyncExitStack,
) -> None:
    """Create the routes and serve them. Start to sample the load and to evaluate conditions.

    `stack` stops all of this. Raise `SettingsError` for an unusable key file of an upstream, and `AuthorityError` for
    an invalid webhook.
    """
    settings, ring, dispatcher = options.settings, access.ring, cluster.dispatcher
    api = ControlApi(
        cluster.nodes,
        access.admin,
        access.approvals,
        ring,
        dispatcher,
        cluster.operations,
        cluster.wishes,
        cluster.video_controller,
        cluster.pulls,
        BenchmarkRecords(state.state),
        _build_server_info(options, state, endpoint),
        build_openapi_paths(),
        BrowserSessions(ring, access.pepper, time.time),
        _start_observability(options, state, access, cluster, endpoint, stack),
    )
    videos = VideoApp(
        cluster.video_controller,
        ring,
        dispatcher.quotas,
        settings.router,
        dispatcher.counters,
        PageApp(PrivateResponses(api.app)),
    )
    forwarder = create_forwarder(settings.router, dispatcher, stack)
    app = OriginCheck(
        RouterApp(dispatcher, ring, settings.router, control=videos, forwarder=forwarder),
        settings.http.allowed_hosts,
        local=not settings.http.anonymous,
        origins=settings.http.allowed_origins,
    )
    fast_path = FastPath(dispatcher, ring, settings.router, app)
    context = None if endpoint.tls is None else endpoint.tls.context
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    connections = compute_max_connections(MAX_OPEN_FILES if files == resource.RLIM_INFINITY else files)
    places = ConnectionSlots(connections, settings.http.max_connections_without_key)
    await stack.enter_async_context(run_http_server(app, fast_path, [endpoint.socket], context, places))


def create_forwarder(settings: RouterSettings, dispatcher: Dispatcher, stack: AsyncExitStack) -> Forwarder | None:
    """Create the forwarder to the upstreams of the settings; None without upstreams. `stack` closes its connections.

    Raise `SettingsError` if the file of a key or an authority cannot be used.
    """
    if not settings.upstreams:
        return None
    # the HTTP client takes a tenth of a second to load, which only pools with upstreams need
    from router.http.upstream.client import KeyFileError, create_clients
    from router.http.upstream.forward import UpstreamForwarder

    try:
        clients = create_clients(settings.upstreams)
    except KeyFileError as error:
        raise SettingsError(str(error)) from None
    for client in clients.values():
        stack.push_async_callback(client.close)
    return UpstreamForwarder(dispatcher, clients, settings)


def _build_server_info(options: RunOptions, state: CoordinatorState, endpoint: Endpoint) -> ServerInfo:
    return ServerInfo(
        options.settings.cluster.name,
        state.version,
        state.epoch,
        endpoint.address,
        endpoint.cluster_address,
        state.authority.cluster,
        time.monotonic(),
        endpoint.ca_pem,
        options.origins,
    )


def _start_observability(
    options: RunOptions,
    state: CoordinatorState,
    access: Credentials,
    cluster: ClusterSide,
    endpoint: Endpoint,
    stack: AsyncExitStack,
) -> Observability:
    """Start to sample the load and to evaluate the conditions. Return the observed state of the pool."""
    conditions = ConditionEvaluator()
    metrics = MetricsSource(
        cluster.nodes,
        cluster.dispatcher,
        access.ring,
        state.version,
        partial(read_https_validity, state.authority, endpoint.tls),
        conditions.get_flags,
        cluster.video_controller.take_snapshot,
        cluster.wishes.take_snapshot,
        lambda: state.store.count_unwritten() + cluster.video_controller.records.count_unwritten(),
    )
    load = start_load_history(cluster, stack)
    start_conditions(conditions, options.settings, metrics, stack)
    return Observability(metrics, conditions, load, state.events, state.log_file)


def create_local_key(state: CoordinatorState, access: Credentials, endpoint: Endpoint, stack: AsyncExitStack) -> None:
    """Create the API key of local commands, with the scope `admin`, valid while the coordinator runs.

    The key is in the file `run.json` of the state folder, which `stack` deletes. Raise `OSError` if the file cannot be
    written.
    """
    local, secret = new_key(access.pepper, LOCAL_KEY_NAME, ["admin"], created=time.time())
    access.ring.put(local)
    _write_access_file(state.state / "run.json", endpoint.address.build_local_url(), secret, endpoint.ca_pem, stack)


def _write_access_file(file: Path, url: str, secret: str, trusted: str, stack: AsyncExitStack) -> None:
    """Write the URL and key for the owner's commands into a file that exists while the coordinator runs."""
    write_private(file, json.dumps({"url": url, "secret": secret, "pid": os.getpid(), "ca": trusted}).encode())
    stack.callback(file.unlink, missing_ok=True)


def build_ready_facts(endpoint: Endpoint, token: str, key: str | None) -> dict[str, Any]:
    """Return the facts of the ready line as a JSON object.

    `token` is a join token. `key` is the first API key if this start created it, else None.
    """
    tls, base_url, cluster_url = endpoint.tls, endpoint.address.build_url(), endpoint.cluster_address.build_url()
    answer: dict[str, Any] = {
        "schema": 1,
        "ready": True,
        "base_url": base_url + "/v1",
        "cluster_url": cluster_url,
        "join": build_join_command(cluster_url, token),
        "tls": tls is not None,
        "trust": None,
    }
    if isinstance(tls, HttpsCa):
        answer["trust"] = f"cluster trust-ca {base_url} --fingerprint {tls.fingerprint}"
    return {**answer, "api_key": key} if key else answer
