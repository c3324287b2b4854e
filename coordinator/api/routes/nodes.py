"""Routes of nodes: their state, log, cordon, drain, pause, permission for videos, labels and removal."""

import time
from typing import Annotated, Any

import msgspec
from fastapi.responses import Response
from pydantic import Field

from coordinator.api.body import Body
from coordinator.api.dispatcher_api import DispatcherApi
from coordinator.api.errors import ProblemError
from coordinator.api.log_stream import FOLLOW_INTERVAL_SECONDS, LogBytes, stream_log
from coordinator.api.route import TEXT, Route
from coordinator.cluster.assembly import NodePool
from coordinator.cluster.member_transitions import DELETE_AFTER_SECONDS
from coordinator.cluster.node_directory import NodeDirectory
from coordinator.state.database import Database
from router.errors import Problem
from wire.identity import NodeId
from wire.node_state import NodeState

LABEL = "^[A-Za-z0-9][A-Za-z0-9._=-]{0,62}$"
"""Pattern of a valid label: 1 to 63 letters, digits or characters of `._=-`, the first a letter or digit."""
MAX_PAUSE_SECONDS = 365 * 86400.0
"""Maximum seconds of a pause with an end. A pause without an end lasts until the node is resumed."""


class LabelsBody(Body):
    """Body with the new labels of a node. They replace all earlier labels."""

    labels: Annotated[list[Annotated[str, Field(pattern=LABEL)]], Field(max_length=16)]


class DrainBody(Body):
    """Body of a drain: maximum seconds to wait until the node has no requests; 0 to return at once."""

    wait_seconds: Annotated[float, Field(ge=0, le=86400)] = 0.0


class PauseBody(Body):
    """Body of a pause: its duration in seconds. Without a duration the pause lasts until the node is resumed."""

    seconds: Annotated[float | None, Field(gt=0, le=MAX_PAUSE_SECONDS)] = None


def find_node(directory: NodeDirectory, node: str) -> NodeId:
    """Return the id of the node with this id or name. Raise `ProblemError` (404) if there is none."""
    node_id = directory.find_member(node)
    if node_id is None:
        raise ProblemError(Problem(404, "node_not_found", f"there is no node {node[:100]!r}: look at `cluster nodes`"))
    return node_id


class NodeRoutes:
    """Routes of `cluster nodes`, `cluster node`, `cluster pause` and `cluster resume`.

    The parameter `node` is the name or id of a node. If a change cannot be stored, the handler raises `StoreError`,
    which becomes 503.
    """

    def __init__(self, nodes: NodePool, traffic: DispatcherApi, store: Database) -> None:
        self._nodes = nodes
        self._traffic = traffic
        self._store = store

    def list_routes(self) -> tuple[Route, ...]:
        """Return the routes of nodes: list, log, cordon, drain, pause, video permission, labels and removal."""
        return (
            Route("GET", "/api/v1/nodes", "metrics", self.nodes),
            Route("GET", "/api/v1/nodes/{node}", "metrics", self.node),
            Route("GET", "/api/v1/nodes/{node}/logs", "admin", self.logs, (503,), TEXT),
            Route("POST", "/api/v1/nodes/{node}/cordon", "admin", self.cordon, (409,)),
            Route("POST", "/api/v1/nodes/{node}/uncordon", "admin", self.uncordon, (409,)),
            Route("POST", "/api/v1/nodes/{node}/allow-video", "admin", self.allow_video, (409,)),
            Route("POST", "/api/v1/nodes/{node}/deny-video", "admin", self.deny_video, (409,)),
            Route("POST", "/api/v1/nodes/{node}/drain", "admin", self.drain, (409,)),
            Route("POST", "/api/v1/nodes/{node}/pause", "admin", self.pause, (409, 503)),
            Route("POST", "/api/v1/nodes/{node}/resume", "admin", self.resume, (409, 503)),
            Route("PUT", "/api/v1/nodes/{node}/labels", "admin", self.label, (409,)),
            Route("DELETE", "/api/v1/nodes/{node}", "admin", self.remove, (409,)),
        )

    def build_rows(self) -> list[dict[str, Any]]:
        """Return a row for each listed node, as in the response of `/api/v1/nodes`. Nodes that have left are included.

        The field `breaker` is the state of the node's circuit breaker, with `until` in Unix seconds.
        """
        return [self._build_row(node) for node in self._nodes.registry.pool.members]

    def _build_row(self, node: NodeId) -> dict[str, Any]:
        return self._nodes.directory.build_node_row(node, self._traffic.count_in_flight(node)) | {
            "breaker": self._build_breaker_row(node)
        }

    def _build_breaker_row(self, node: NodeId) -> dict[str, Any]:
        """Return the state of a node's circuit breaker, which opens after engine faults. `until` is Unix seconds."""
        now = self._traffic.get_time()
        breaker = self._traffic.breakers.get_state(node, now)
        if breaker is None:
            return {"state": "closed", "why": "", "until": None, "opened": 0}
        until = round(time.time() + breaker.until - now)
        return {"state": breaker.state, "why": breaker.why, "until": until, "opened": breaker.opened}

    def _find_node(self, node: str) -> NodeId:
        return find_node(self._nodes.directory, node)

    def _find_member(self, node: str) -> NodeId:
        """Return the id of a node that has not left. Raise `ProblemError` with 404 or 409."""
        node_id = self._find_node(node)
        if self._nodes.registry.pool.members[node_id].state == NodeState.LEFT:
            minutes = DELETE_AFTER_SECONDS / 60
            text = f"{self._build_row(node_id)['name']} has left the cluster: it stays listed for {minutes:.0f} minutes"
            raise ProblemError(Problem(409, "node_left", text))
        return node_id

    async def nodes(self) -> dict[str, Any]:
        """List the nodes with their memory arithmetic; sizes in bytes. A node that left is listed for 10 minutes."""
        return {"schema": 1, "nodes": self.build_rows()}

    async def node(self, node: str) -> dict[str, Any]:
        """Return all details of a node; sizes in bytes.

        Raise `ProblemError` 404 for an unknown node.
        """
        return {"schema": 1, "node": self._build_row(self._find_node(node))}

    async def logs(self, node: str, size: LogBytes = 65536, follow: bool = False) -> Response:
        """Return the last `bytes` bytes of a node's log as text. With `follow`, stream new lines.

        `bytes` is 65536 by default. The log is fetched over the node's link. Once the key is revoked, rotated or
        expired, the stream ends before its next piece. Raise `ProblemError`: 404 for an unknown node, 503 if the node
        is not linked or sends nothing for 10 s. If that happens later, the text ends with a log line that has the
        reason.
        """
        fetches, node_id = self._nodes.links.fetches, self._find_node(node)
        pieces = (
            fetches.follow_source(node_id, "logs", size, FOLLOW_INTERVAL_SECONDS)
            if follow
            else fetches.fetch_source(node_id, "logs", size)
        )
        return await stream_log(pieces)

    # -- cordon, drain, pause, videos --------------------------------------------------------------

    async def cordon(self, node: str) -> dict[str, Any]:
        """Cordon a node: it gets no new requests; running requests finish.

        Return the node's id and `cordoned`. Raise `ProblemError`: 404 for an unknown node, 409 for one that has left.
        Raise `StoreError` (503) if the change cannot be stored.
        """
        return await self._set_cordon(node, on=True)

    async def uncordon(self, node: str) -> dict[str, Any]:
        """Uncordon a node, so that it gets requests again. This has no effect on a node that is not cordoned.

        Return the node's id and `cordoned`. Raise `ProblemError`: 404 for an unknown node, 409 for one that has left.
        Raise `StoreError` (503) if the change cannot be stored.
        """
        return await self._set_cordon(node, on=False)

    async def _set_cordon(self, node: str, *, on: bool) -> dict[str, Any]:
        node_id = self._find_member(node)
        self._nodes.administration.set_cordoned(node_id, on=on)
        await self._store.flush()
        return {"schema": 1, "node": node_id, "cordoned": on}

    async def allow_video(self, node: str) -> dict[str, Any]:
        """Allow the placement of video jobs on a node.

        Return the node's id and `video_allowed`. Raise `ProblemError`: 404 for an unknown node, 409 for one that has
        left. Raise `StoreError` (503) if the change cannot be stored.
        """
        return await self._set_video(node, on=True)

    async def deny_video(self, node: str) -> dict[str, Any]:
        """Stop placing video jobs on a node. A running job finishes.

        Return the node's id and `video_allowed`. Raise `ProblemError`: 404 for an unknown node, 409 for one that has
        left. Raise `StoreError` (503) if the change cannot be stored.
        """
        return await self._set_video(node, on=False)

    async def _set_video(self, node: str, *, on: bool) -> dict[str, Any]:
        node_id = self._find_member(node)
        self._nodes.administration.set_video_allowed(node_id, on=on)
        await self._store.flush()
        return {"schema": 1, "node": node_id, "video_allowed": on}

    async def drain(self, node: str, body: DrainBody) -> dict[str, Any]:
        """Cordon a node, migrate its requests, and return the number of requests left after `wait_seconds`.

        The response is sent earlier if no requests are left, or if the node is uncordoned; in that case, `cordoned` is
        false. Requests that no other node can continue stay until they end. The node stays cordoned if the client
        disconnects. Raise `ProblemError`: 404 for an unknown node, 409 for one that has left. Raise `StoreError` (503)
        if the cordon cannot be stored.
        """
        node_id = self._find_member(node)
        self._nodes.administration.set_cordoned(node_id, on=True)
        await self._store.flush()
        if self._is_cordoned(node_id):  # a node can be uncordoned while its cordon is written
            await self._traffic.wait_drained(node_id, body.wait_seconds)
        left = self._traffic.count_in_flight(node_id)
        return {"schema": 1, "node": node_id, "cordoned": self._is_cordoned(node_id), "left": left}

    def _is_cordoned(self, node: NodeId) -> bool:
        return self._nodes.registry.pool.members[node].cordoned

    async def pause(self, node: str, body: PauseBody) -> dict[str, Any]:
        """Pause a node: migrate its requests and free its memory for its owner.

        The node enforces the pause, even without the coordinator. Without `seconds`, the pause lasts until a resume.
        Return the node's sharing state, and the number of its requests (`in_flight`), once the node has confirmed.
        Raise `ProblemError`: 404 for an unknown node, 409 for one that has left. Also: 503 if the node is not linked,
        is too old, or does not confirm within 10 s. A node that does not confirm may be paused nevertheless.
        """
        return await self._set_pause(node, body.seconds)

    async def resume(self, node: str) -> dict[str, Any]:
        """End a node's pause. The node's setting `sharing.when` can still keep the node paused.

        Return the node's sharing state, and the number of its requests (`in_flight`), once the node has confirmed.
        Raise `ProblemError`: 404 for an unknown node, 409 for one that has left. Also: 503 if the node is not linked,
        is too old, or does not confirm within 10 s.
        """
        return await self._set_pause(node, 0.0)

    async def _set_pause(self, node: str, seconds: float | None) -> dict[str, Any]:
        node_id = self._find_member(node)
        name = self._nodes.directory.get_name(node_id)
        try:
            sharing = await self._nodes.administration.pause_node(node_id, seconds, "an administrator of the pool")
        except LookupError as error:
            raise ProblemError(Problem(503, "node_unreachable", f"{name}: {error}")) from None
        if sharing is None:
            raise ProblemError(Problem(503, "node_unreachable", f"{name} did not confirm the pause: check its log"))
        left = self._traffic.count_in_flight(node_id)
        return {"schema": 1, "node": node_id, "sharing": msgspec.structs.asdict(sharing), "in_flight": left}

    # -- labels and membership --------------------------------------------------------------------

    async def label(self, node: str, body: LabelsBody) -> dict[str, Any]:
        """Replace the labels of a node, and return them without repetitions. A key can be limited to labels.

        Raise `ProblemError`: 404 for an unknown node, 409 for one that has left. Raise `StoreError` (503) if the change
        cannot be stored.
        """
        node_id = self._find_member(node)
        labels = list(dict.fromkeys(body.labels))
        self._nodes.administration.set_labels(node_id, tuple(labels))
        await self._store.flush()
        return {"schema": 1, "node": node_id, "labels": labels}

    async def remove(self, node: str) -> dict[str, Any]:
        """Revoke a node's certificate at once and remove the node from the pool. Return the node's id.

        The node's link ends. Its requests continue on other nodes if that is possible, or fail. The node is still
        listed for 10 minutes, and can join again with a new token or code.
        Raise `ProblemError`: 404 for an unknown node, 409 for one that has left. Raise `StoreError` (503) if the change
        cannot be stored.
        """
        node_id = self._find_member(node)
        self._nodes.administration.remove_node(node_id)
        await self._store.flush()
        return {"schema": 1, "node": node_id}
