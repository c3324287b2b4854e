"""Start and stop of the coordinator: state, certificates, links, router, HTTP, Bonjour and the local node on one loop.

`serve` starts all parts, reports ready, waits for a signal and stops the parts in reverse order. The child process (the
node on this machine) ends with the coordinator, even after SIGKILL, because the child watches its standard input.
"""

import asyncio
import errno
import gc
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import structlog

from coordinator.cluster.local_node import check_node_cluster
from coordinator.http.listen import open_listener
from coordinator.startup.background import announce_coordinator, start_local_node, start_periodic_tasks, start_wishes
from coordinator.startup.cluster import start_cluster
from coordinator.startup.endpoint import (
    MAX_OPEN_FILES,
    build_ready_facts,
    create_endpoint,
    create_local_key,
    serve_http,
)
from coordinator.startup.options import RunOptions, check_options, log_guards
from coordinator.startup.state import load_credentials, open_state
from coordinator.startup.superseded import SupersededHandler
from coordinator.state.state_lock import StateLock
from host.heap import map_long_blocks
from host.log_setup import hide_warnings

log = structlog.get_logger("coordinator.run")

GC_THRESHOLD_OBJECTS = 20_000
"""Objects after whose creation Python collects the youngest generation. Its default of 700 costs 4 % of a request."""
SWITCH_SECONDS = 0.001
"""Interval, in seconds, after which Python switches threads.

An example is a switch from a thread that parses a long body to the loop. Python's default is 5 ms, and such delays add
up.
"""


async def serve(options: RunOptions, ready: Callable[[dict[str, Any]], None]) -> None:
    """Run the coordinator until SIGTERM or SIGINT. Call `ready` once, with the facts of the ready line.

    Raise `SettingsError`, `AuthorityError`, `LocalNodeElsewhereError`, `StoreError` or `OSError` if a part cannot
    start. Raise `StoreError` if the state can no longer be written, and `SupersededError` if another coordinator of
    this cluster is newer.
    """
    stop = asyncio.Event()
    superseded = SupersededHandler(options.state, stop)
    loop = asyncio.get_running_loop()
    _raise_file_limit()
    map_long_blocks()
    sys.setswitchinterval(SWITCH_SECONDS)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with AsyncExitStack() as stack:
        facts = await _start_parts(options, stack, superseded, stop)
        # Freeze the permanent objects. Requests create few reference cycles, hence a rare collection is enough.
        gc.collect()
        gc.freeze()
        gc.set_threshold(GC_THRESHOLD_OBJECTS, 20, 20)
        announce_ready(ready, facts)
        log.info("ready", **{name: value for name, value in facts.items() if name.endswith("url")})
        await stop.wait()
        hide_warnings()
        log.info("stopping")
    superseded.check()


def announce_ready(ready: Callable[[dict[str, Any]], None], facts: dict[str, Any]) -> None:
    """Call `ready` with `facts`. An `OSError` is logged, because the pool serves even if nothing reads its output."""
    try:
        ready(facts)
    except OSError as error:
        log.warning("ready line not printed", error=str(error))


def _raise_file_limit() -> None:
    """Raise this process's limit of open files. macOS starts with 256, and each client needs an open file."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if most == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, most)
    if now != resource.RLIM_INFINITY and now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _open_endpoint(options: RunOptions) -> socket.socket:
    """Open the listening socket of the endpoint.

    Raise `OSError` if the address cannot be used. Raise `StateLockedError` instead if the port is in use and another
    coordinator with the same state runs, which is the probable user of the port.
    """
    try:
        return open_listener(*options.listen)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and (options.state / "lock").exists():
            StateLock(options.state).release()
        raise


async def _start_parts(
    options: RunOptions, stack: AsyncExitStack, superseded: SupersededHandler, stop: asyncio.Event
) -> dict[str, Any]:
    """Start every part after its dependencies. The stack stops them in reverse order.

    `stop` is set by a signal, a newer coordinator, or a state that can no longer be written. When it is set, the start
    does not wait for the local node.
    """
    check_options(options)
    settings = options.settings
    listener = _open_endpoint(options)
    stack.callback(listener.close)
    on_death = partial(asyncio.get_running_loop().call_soon_threadsafe, stop.set)
    state = open_state(options.state, settings.cluster, stack, on_death)
    if options.local_node:
        check_node_cluster(options.state, state.authority.cluster)
    access = load_credentials(state, settings.http, options.listen[0])
    cluster = await start_cluster(options, state, access, superseded.handle, stack)
    endpoint = create_endpoint(options, state.state, cluster.port, listener)
    await serve_http(options, state, access, cluster, endpoint, stack)

    create_local_key(state, access, endpoint, stack)
    await state.store.flush()
    start_periodic_tasks(state, access, cluster.dispatcher, endpoint.tls, stack)
    start_wishes(cluster.wishes, stack)
    if settings.cluster.bonjour:
        announce_coordinator(options, state, cluster.port, stack)
    node_ready = await start_local_node(options, state, access, cluster, stop, stack) if options.local_node else None
    # The last callback runs first: running requests end before their dependencies are closed.
    stack.push_async_callback(cluster.dispatcher.drain, settings.http.drain_seconds)
    token = access.tokens.create()
    # Created last, because a start that fails prints no key, and the next start then creates it.
    key = access.admin.create_key("first", ["infer"], None)["key"] if state.needs_first_key else None
    await state.store.flush()
    log_guards(options, endpoint.tls)
    return {**build_ready_facts(endpoint, str(token), key), "local_node_ready": node_ready}
