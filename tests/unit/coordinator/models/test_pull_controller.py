"""Controller of pulls: frames to nodes, records on the disk, restarts."""

import asyncio
import os
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from coordinator.cluster.links.relay import RelayTransfers
from coordinator.models import pull_controller
from coordinator.models.hub_client import HubClient, TokenFileError
from coordinator.models.pull_controller import MAX_OPEN_PULLS, PULL_BITS, PullController, TooManyPullsError
from coordinator.models.pull_records import MAX_ENDED_RECORDS
from coordinator.models.pull_rows import build_pull_row
from coordinator.models.pull_values import PullStage
from coordinator.models.settings import HubSettings
from router.placement.cluster_view import ClusterView, NodeView
from wire.frames import (
    CancelModelOrder,
    Frame,
    JoinRelay,
    ModelOrderCode,
    ModelOrderEnded,
    ModelOrderPhase,
    ModelOrderProgress,
    PullModel,
    RemoveModel,
    ServeModel,
)
from wire.identity import PROTOCOL, NodeId
from wire.models.files import ModelFile, ModelManifest, SourceKind
from wire.state_machine import IllegalEventCounts, InvariantError

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")
MANIFEST = ModelManifest("pub/model", "c" * 40, (ModelFile("config.json", 5, "a" * 64),))


class Pool:
    """A controller with links to two nodes, the frames that it sends, and the transfers that it relays."""

    def __init__(
        self,
        folder: Path,
        epoch: int = 1,
        token_file: str = "",
        linked: tuple[NodeId, ...] = (A, B),
        members: tuple[NodeId, ...] = (A, B, C),
    ) -> None:
        self.sent: list[tuple[NodeId, Frame]] = []
        self.has_sent = asyncio.Event()
        self.linked = set(linked)
        self.members = members
        hub = HubClient(HubSettings(endpoint="http://hub.test", token_file=token_file))
        self.transfers = RelayTransfers()
        self.illegal_events = IllegalEventCounts()
        self.controller = PullController(
            folder, hub, self.send, self.transfers, epoch, self.illegal_events, wall=lambda: 1000.0
        )
        self.show(*linked)

    def send(self, node: NodeId, frame: Frame) -> bool:
        self.sent.append((node, frame))
        self.has_sent.set()
        return node in self.linked

    async def wait_for_frames(self, count: int) -> None:
        """Wait until `count` frames were sent since the last `take`."""
        while len(self.sent) < count:
            self.has_sent.clear()
            await self.has_sent.wait()

    def show(self, *linked: NodeId, epoch: int = 1) -> None:
        nodes = [NodeView(name, name, "ready" if name in linked else "lost", epoch=epoch) for name in self.members]
        self.controller.apply_view(ClusterView(tuple(nodes)))

    def take(self) -> list[tuple[NodeId, Frame]]:
        sent, self.sent = self.sent, []
        return sent


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncGenerator[Pool]:
    made = Pool(tmp_path)
    yield made
    made.controller.close()


async def test_a_pull_reaches_both_nodes_and_ends(pool: Pool) -> None:
    record = pool.controller.start_pull(MANIFEST, (A, B), "key")
    ((node, order),) = pool.take()
    assert isinstance(order, PullModel)
    assert (node, order.manifest) == (A, MANIFEST)
    assert [(one.kind, one.url, one.node) for one in order.sources] == [(SourceKind.HUB, "http://hub.test", "")]
    pool.controller.handle_frame(A, ModelOrderProgress(order.order, ModelOrderPhase.DOWNLOADING, 1, 5))
    ((node, serve),) = pool.take()
    assert isinstance(serve, ServeModel)
    assert node == A
    urls = ("https://10.0.0.2:9000", "https://[fe80::1]:9000")
    pool.controller.handle_frame(A, ModelOrderProgress(serve.order, ModelOrderPhase.SERVING, addresses=urls))
    ((node, follow),) = pool.take()
    assert isinstance(follow, PullModel)
    assert node == B
    assert [(one.kind, one.url, one.token, one.node) for one in follow.sources] == [
        *((SourceKind.MIRROR, url, serve.token, A) for url in urls),
        (SourceKind.RELAY, "", serve.token, A),
    ]
    join = JoinRelay(PROTOCOL, B, "m1", serve.token, serves=False)
    assert serve.relay
    assert pool.transfers.find(B, join) is not None
    for name, pulled in ((A, order), (B, follow)):
        pool.controller.handle_frame(name, ModelOrderEnded(pulled.order, ModelOrderCode.COMPLETED, fetched=5))
    assert pool.take() == [(A, CancelModelOrder(serve.order))]
    assert pool.transfers.find(B, join) is None, "the transfer ends with the mirror"
    row = build_pull_row(pool.controller.pulls[record.id], str)
    assert (row["state"], row["ended"]) == ("completed", 1000.0)


async def test_a_pull_survives_a_restart_of_the_coordinator(pool: Pool, tmp_path: Path) -> None:
    record = pool.controller.start_pull(MANIFEST, (A, B), "key")
    ((_, first),) = pool.take()
    pool.controller.close()
    restarted = Pool(tmp_path, epoch=2)
    ((node, order),) = restarted.take()
    assert isinstance(order, PullModel)
    assert isinstance(first, PullModel)
    assert (node, order.manifest) == (A, MANIFEST)
    assert order.order > first.order
    assert list(restarted.controller.pulls) == [record.id]
    restarted.controller.handle_frame(A, ModelOrderEnded(first.order, ModelOrderCode.FAILED))
    assert build_pull_row(restarted.controller.pulls[record.id], str)["state"] == "pulling"
    restarted.controller.close()


async def test_a_new_link_gets_the_order_again(pool: Pool) -> None:
    pool.controller.start_pull(MANIFEST, (A,), "key")
    pool.take()
    pool.show(B)
    pool.show(A, B, epoch=2)
    assert [type(frame) for _, frame in pool.take()] == [PullModel]


async def test_a_node_that_linked_again_between_two_views_gets_its_order_again(pool: Pool) -> None:
    pool.controller.start_pull(MANIFEST, (A,), "key")
    ((_, first),) = pool.take()
    pool.show(A, B, epoch=2)
    ((node, again),) = pool.take()
    assert isinstance(first, PullModel)
    assert isinstance(again, PullModel)
    assert (node, again.manifest) == (A, MANIFEST)
    assert again.order > first.order
    pool.show(A, B, epoch=2)
    assert pool.take() == [], "the link is the same"


async def test_the_same_pull_is_not_started_twice(pool: Pool) -> None:
    first = pool.controller.start_pull(MANIFEST, (A, B), "key")
    assert pool.controller.start_pull(MANIFEST, (B,), "key").id == first.id
    assert pool.controller.start_pull(replace_commit("d"), (B,), "key").id != first.id


async def test_nodes_of_two_pulls_do_not_mirror_each_others_download(pool: Pool) -> None:
    pool.controller.start_pull(MANIFEST, (A, B), "key")
    ((_, first),) = pool.take()
    assert isinstance(first, PullModel)
    pool.controller.handle_frame(A, ModelOrderProgress(first.order, ModelOrderPhase.DOWNLOADING, 1, 5))
    ((_, serve),) = pool.take()
    assert isinstance(serve, ServeModel)
    serving = ModelOrderProgress(serve.order, ModelOrderPhase.SERVING, addresses=("https://10.0.0.2:9000",))
    pool.controller.handle_frame(A, serving)
    pool.take()
    pool.controller.start_pull(MANIFEST, (B, A, C), "key")
    ((node, second),) = pool.take()
    assert isinstance(second, PullModel)
    assert (node, second.sources[0].kind) == (B, SourceKind.HUB)
    attached = ModelOrderProgress(second.order, ModelOrderPhase.DOWNLOADING, 1, 5, from_mirror=True)
    pool.controller.handle_frame(B, attached)
    ((node, third),) = pool.take()
    assert isinstance(third, PullModel), "B follows A, and is no mirror"
    assert (node, third.sources[0].kind) == (A, SourceKind.HUB)


def replace_commit(digit: str) -> ModelManifest:
    return ModelManifest(MANIFEST.repo, digit * 40, MANIFEST.files)


async def test_open_pulls_are_bounded(pool: Pool) -> None:
    for digit in range(MAX_OPEN_PULLS):
        pool.controller.start_pull(replace_commit(f"{digit:x}"), (A,), "key")
    with pytest.raises(TooManyPullsError, match="16 pulls"):
        pool.controller.start_pull(replace_commit("z"), (A,), "key")


async def test_a_pull_whose_record_cannot_be_written_is_not_started(pool: Pool, tmp_path: Path) -> None:
    (tmp_path / "pulls").touch()
    with pytest.raises(OSError, match="pulls"):
        pool.controller.start_pull(MANIFEST, (A,), "key")
    assert (pool.controller.pulls, pool.take()) == ({}, [])


async def test_cancel_sends_the_nodes_a_cancel_order(pool: Pool) -> None:
    record = pool.controller.start_pull(MANIFEST, (A, B), "key")
    ((_, order),) = pool.take()
    assert isinstance(order, PullModel)
    assert pool.controller.cancel_pull(record.id)
    assert pool.take() == [(A, CancelModelOrder(order.order))]
    assert not pool.controller.cancel_pull(record.id)
    assert not pool.controller.cancel_pull("pull-unknown")


@pytest.mark.parametrize("restarts", [False, True])
async def test_a_node_that_was_away_at_the_cancel_gets_it_with_its_next_progress(
    pool: Pool, tmp_path: Path, restarts: bool
) -> None:
    record = pool.controller.start_pull(MANIFEST, (A,), "key")
    ((_, order),) = pool.take()
    assert isinstance(order, PullModel)
    pool.show(B)
    pool.linked = {B}
    if restarts:
        pool.controller.close()
        pool = Pool(tmp_path, epoch=2, linked=(B,))
    assert pool.controller.cancel_pull(record.id)
    pool.take()
    pool.linked = {A, B}
    pool.show(A, B, epoch=2)
    pool.controller.handle_frame(A, ModelOrderProgress(order.order, ModelOrderPhase.DOWNLOADING, 1, 5))
    assert pool.take() == [(A, CancelModelOrder(order.order))]
    pool.controller.close()


async def test_a_pull_that_failed_on_a_node_is_started_again_there(pool: Pool) -> None:
    first = pool.controller.start_pull(MANIFEST, (A, B), "key")
    ((_, order),) = pool.take()
    assert isinstance(order, PullModel)
    pool.controller.handle_frame(A, ModelOrderEnded(order.order, ModelOrderCode.DISK_FULL, "the disk is full"))
    pool.take()
    assert pool.controller.start_pull(MANIFEST, (B,), "key").id == first.id
    assert pool.controller.start_pull(MANIFEST, (A,), "key").id != first.id
    assert [(node, type(frame)) for node, frame in pool.take()] == [(A, PullModel)]


async def test_find_waiting_refusal_has_the_progress_while_a_node_pulls(pool: Pool) -> None:
    record = pool.controller.start_pull(MANIFEST, (A,), "key")
    ((_, order),) = pool.take()
    assert isinstance(order, PullModel)
    frame = ModelOrderProgress(order.order, ModelOrderPhase.DOWNLOADING, 1 << 30, 4 << 30, speed=float(1 << 28))
    pool.controller.handle_frame(A, frame)
    refused = pool.controller.find_waiting_refusal("pub/model")
    assert refused is not None
    assert (
        refused.message
        == "pub/model is being pulled (25% of 4.0 GiB, about 12 s left): wait, or look at `cluster pulls`"
    )
    assert (refused.final, refused.retry_after) == (False, 12.0)
    assert pool.controller.find_waiting_refusal("pub/other") is None
    pool.controller.cancel_pull(record.id)
    assert pool.controller.find_waiting_refusal("pub/model") is None


async def test_the_refusal_has_the_progress_of_the_node_that_will_have_the_model_first(pool: Pool) -> None:
    pool.controller.start_pull(MANIFEST, (A, B), "key")
    ((_, order),) = pool.take()
    assert isinstance(order, PullModel)
    progress = ModelOrderProgress(order.order, ModelOrderPhase.DOWNLOADING, 3 << 30, 4 << 30, speed=float(1 << 28))
    pool.controller.handle_frame(A, progress)
    ((_, serve),) = pool.take()
    assert isinstance(serve, ServeModel)
    addresses = ModelOrderProgress(serve.order, ModelOrderPhase.SERVING, addresses=("https://10.0.0.2:9000",))
    pool.controller.handle_frame(A, addresses)
    ((node, follow),) = pool.take()
    assert isinstance(follow, PullModel)
    follower = ModelOrderProgress(follow.order, ModelOrderPhase.DOWNLOADING, 1 << 30, 4 << 30, speed=float(1 << 28))
    pool.controller.handle_frame(node, follower)
    refused = pool.controller.find_waiting_refusal("pub/model")
    assert refused is not None
    assert "(75% of 4.0 GiB, about 4 s left)" in refused.message
    assert refused.retry_after == 5.0
    pool.controller.handle_frame(node, msgspec.structs.replace(follower, done=7 << 29))
    refused = pool.controller.find_waiting_refusal("pub/model")
    assert refused is not None
    assert "(88% of 4.0 GiB, about 2 s left)" in refused.message


async def test_a_removed_node_ends_its_pull(pool: Pool) -> None:
    record = pool.controller.start_pull(MANIFEST, (A,), "key")
    pool.controller.remove_node(A)
    assert build_pull_row(pool.controller.pulls[record.id], str)["state"] == "failed"


async def test_a_node_that_left_before_a_restart_ends_its_pull_and_its_quantization(pool: Pool, tmp_path: Path) -> None:
    record = pool.controller.start_pull(MANIFEST, (A, C), "key")
    quantization = pool.controller.quantizations.start(B, "pub/model", 4, "small", "key")
    pool.controller.close()
    restarted = Pool(tmp_path, epoch=2, members=(A,))
    found = restarted.controller.quantizations.find(quantization.id)
    assert found is not None
    assert (found.stage, found.message) == ("failed", "the node has left the pool")
    nodes = restarted.controller.pulls[record.id].state.nodes
    assert (nodes[A].stage, nodes[C].stage) == (PullStage.PULLING, PullStage.FAILED)
    restarted.controller.close()


async def test_hub_token_is_sent_to_the_downloading_node_only(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hf_secret\n")
    token.chmod(0o600)
    pool = Pool(tmp_path / "state", token_file=str(token))
    pool.controller.start_pull(MANIFEST, (A,), "key")
    ((_, order),) = pool.take()
    assert isinstance(order, PullModel)
    assert order.sources[0].token == "hf_secret"
    stored = "".join(file.read_text() for file in (tmp_path / "state" / "pulls").iterdir())
    assert "hf_secret" not in stored
    pool.controller.close()


@pytest.mark.skipif(os.name != "posix", reason="modes of files are those of POSIX")
async def test_a_token_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("hf_secret")
    token.chmod(0o644)
    with pytest.raises(TokenFileError, match="chmod 600"):
        HubClient(HubSettings(token_file=str(token))).read_token()
    with pytest.raises(TokenFileError, match="~unknown-user/token cannot be read"):
        HubClient(HubSettings(token_file="~unknown-user/token")).read_token()
    pool = Pool(tmp_path / "state", token_file=str(token))
    record = pool.controller.start_pull(MANIFEST, (A,), "key")
    await asyncio.sleep(0)
    row = build_pull_row(pool.controller.pulls[record.id], str)
    assert row["state"] == "failed"
    assert "chmod 600" in str(row["nodes"])
    pool.controller.close()


async def test_an_awaited_order_ends_with_its_frame_or_with_the_link(pool: Pool) -> None:
    removal = asyncio.create_task(pool.controller.orders.run(RemoveModel, A, "pub/model"))
    await asyncio.sleep(0)
    ((_, order),) = pool.take()
    assert isinstance(order, RemoveModel)
    pool.controller.handle_frame(B, ModelOrderEnded(order.order, ModelOrderCode.COMPLETED))
    assert not removal.done(), "a frame of another node"
    pool.controller.handle_frame(A, ModelOrderEnded(order.order, ModelOrderCode.COMPLETED, freed=7))
    assert (await removal).freed == 7
    lost = asyncio.create_task(pool.controller.orders.run(RemoveModel, A, "pub/model"))
    await asyncio.sleep(0)
    pool.controller.handle_lost_node(A)
    assert "link" in (await lost).message
    pool.linked.clear()
    assert "not linked" in (await pool.controller.orders.run(RemoveModel, A, "pub/model")).message


async def test_a_contradiction_in_a_pull_is_counted(pool: Pool) -> None:
    record = pool.controller.start_pull(MANIFEST, (A,), "key")
    broken = replace(record.state, nodes={A: replace(record.state.nodes[A], stage=PullStage.PULLING, order=0)})
    pool.controller.pulls[record.id] = record.set_state(broken, 1000.0)
    with pytest.raises(InvariantError):
        pool.controller.handle_frame(A, ModelOrderProgress(1, ModelOrderPhase.DOWNLOADING))
    assert pool.illegal_events == IllegalEventCounts() | {"pull": 1}


async def test_the_newest_ended_pulls_stay_listed(pool: Pool, tmp_path: Path) -> None:
    ended: list[str] = []
    for number in range(MAX_ENDED_RECORDS + 3):
        record = pool.controller.start_pull(replace_commit(f"{number:02}"), (A,), "key")
        pool.controller.cancel_pull(record.id)
        ended.append(record.id)
    last = pool.controller.start_pull(MANIFEST, (A,), "key")
    listed = [*ended[-MAX_ENDED_RECORDS:], last.id]
    assert list(pool.controller.pulls) == listed
    restarted = Pool(tmp_path, epoch=2)
    assert set(restarted.controller.pulls) == set(listed)
    restarted.controller.close()


async def test_a_pull_starts_although_an_old_record_cannot_be_deleted(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pull_controller, "MAX_ENDED_RECORDS", 1)
    for commit in "de":
        record = pool.controller.start_pull(msgspec.structs.replace(MANIFEST, commit=commit * 40), (A,), "key")
        pool.controller.cancel_pull(record.id)
    oldest = next(iter(pool.controller.pulls))
    file = tmp_path / "pulls" / f"{oldest}.json"
    file.unlink()
    file.mkdir()
    pool.take()
    pool.controller.start_pull(MANIFEST, (A, B), "key")
    assert [(node, type(frame)) for node, frame in pool.take()] == [(A, PullModel)]


async def test_a_pull_without_linked_nodes_and_its_end_are_on_the_disk(pool: Pool, tmp_path: Path) -> None:
    pool.show()
    record = pool.controller.start_pull(MANIFEST, (A,), "key")
    restarted = Pool(tmp_path, epoch=2)
    ((_, order),) = restarted.take()
    assert isinstance(order, PullModel)
    restarted.controller.handle_frame(A, ModelOrderEnded(order.order, ModelOrderCode.COMPLETED))
    restarted.controller.close()
    again = Pool(tmp_path, epoch=3)
    assert again.take() == [], "the pull has ended"
    row = build_pull_row(again.controller.pulls[record.id], str)
    assert (row["state"], row["started"], row["ended"], row["actor"]) == ("completed", 1000.0, 1000.0, "key")
    again.controller.close()


async def test_order_numbers_after_a_restart_are_higher_than_all_before(pool: Pool, tmp_path: Path) -> None:
    for digit in "def":
        pool.controller.start_pull(replace_commit(digit), (A, B), "key")
    before = [frame.order for _, frame in pool.take() if isinstance(frame, PullModel)]
    pool.controller.close()
    restarted = Pool(tmp_path, epoch=2)
    after = [frame.order for _, frame in restarted.take() if isinstance(frame, PullModel)]
    assert (len(before), len(after)) == (3, 3)
    assert min(after) > max(before)
    assert len({order >> PULL_BITS for order in after}) == 3, "the orders of two pulls never have the same number"
    restarted.controller.close()


async def test_every_pull_is_resumed_at_its_own_time(pool: Pool) -> None:
    orders: dict[NodeId, int] = {}
    for node, digit, wait in ((A, "d", 1.0), (B, "e", 0.02)):
        pool.controller.start_pull(replace_commit(digit), (node,), "key")
        ((_, order),) = pool.take()
        assert isinstance(order, PullModel)
        orders[node] = order.order
        ended = ModelOrderEnded(order.order, ModelOrderCode.SOURCE_LOST, "the hub does not answer", retry_after=wait)
        pool.controller.handle_frame(node, ended)
    assert pool.take() == []
    await asyncio.wait_for(pool.wait_for_frames(2), 10)
    resumed = [(node, frame.order > orders[node]) for node, frame in pool.take() if isinstance(frame, PullModel)]
    assert resumed == [(B, True), (A, True)]


async def test_a_closed_controller_sends_nothing_more(pool: Pool, tmp_path: Path) -> None:
    other = Pool(tmp_path / "other")
    for one, wait in ((pool, 0.02), (other, 0.1)):
        one.controller.start_pull(MANIFEST, (A,), "key")
        ((_, order),) = one.take()
        assert isinstance(order, PullModel)
        ended = ModelOrderEnded(order.order, ModelOrderCode.SOURCE_LOST, retry_after=wait)
        one.controller.handle_frame(A, ended)
    pool.controller.close()
    await asyncio.wait_for(other.wait_for_frames(1), 10)
    assert pool.take() == []
    other.controller.close()


async def test_the_refusal_is_that_of_a_pull_in_progress(pool: Pool) -> None:
    pool.show(B)
    waiting = pool.controller.start_pull(replace_commit("d"), (A,), "key")
    assert pool.controller.find_waiting_refusal("pub/model") is None, "no node pulls"
    pool.controller.start_pull(MANIFEST, (B,), "key")
    refused = pool.controller.find_waiting_refusal("pub/model")
    assert refused is not None
    assert "pub/model is being pulled (it begins): wait" in refused.message
    assert refused.retry_after == 30.0
    assert waiting.ended is None


@pytest.mark.parametrize(("speed", "wait"), [(1.0, 60.0), (1000.0, 5.0), (10.0, 9.0)])
async def test_the_wait_of_a_refusal_is_between_5_and_60_seconds(pool: Pool, speed: float, wait: float) -> None:
    pool.controller.start_pull(MANIFEST, (A, B), "key")
    ((_, order),) = pool.take()
    assert isinstance(order, PullModel)
    frame = ModelOrderProgress(order.order, ModelOrderPhase.DOWNLOADING, 10, 100, speed=speed)
    pool.controller.handle_frame(A, frame)
    refused = pool.controller.find_waiting_refusal("pub/model")
    assert refused is not None
    assert refused.retry_after == wait
    assert f"10% of 0.1 KiB, about {90 / speed:.0f} s left" in refused.message


async def test_frames_links_and_removed_nodes_reach_the_quantizations(pool: Pool, tmp_path: Path) -> None:
    quantizations = pool.controller.quantizations
    first, second = (quantizations.start(node, "pub/model", 4, "small", "key") for node in (A, B))
    pool.controller.handle_frame(A, ModelOrderEnded(first.order.order, ModelOrderCode.COMPLETED, stored=7))
    pool.show(A)
    found = quantizations.find(second.id)
    assert found is not None
    assert not found.is_linked
    pool.controller.remove_node(B)
    assert [(one.stage, one.stored) for one in quantizations.list_all()] == [("completed", 7), ("failed", 0)]
    restarted = Pool(tmp_path, epoch=2)
    assert [one.stage for one in restarted.controller.quantizations.list_all()] == ["completed", "failed"]
    restarted.controller.close()


async def test_a_mirror_that_moves_to_another_node_gets_its_own_token(tmp_path: Path) -> None:
    pool = Pool(tmp_path)
    pool.show(A, B)
    pool.controller.start_pull(MANIFEST, (A, B, C), "key")
    first = next(one for _, one in pool.take() if isinstance(one, PullModel))
    pool.controller.handle_frame(A, ModelOrderEnded(first.order, ModelOrderCode.COMPLETED))
    serve = next(one for _, one in pool.take() if isinstance(one, ServeModel))
    frame = ModelOrderProgress(serve.order, ModelOrderPhase.SERVING, addresses=("https://10.0.0.1:9000",))
    pool.controller.handle_frame(A, frame)
    second = next(one for _, one in pool.take() if isinstance(one, PullModel))
    pool.controller.handle_frame(B, ModelOrderEnded(second.order, ModelOrderCode.COMPLETED))
    pool.show(A, B, C)
    follow = next(one for node, one in pool.take() if node == C and isinstance(one, PullModel))
    pool.controller.handle_frame(C, ModelOrderEnded(follow.order, ModelOrderCode.SOURCE_LOST, retry_after=60.0))
    pool.show(B, C)
    ((node, moved),) = [(name, one) for name, one in pool.take() if isinstance(one, ServeModel)]
    assert node == B
    assert moved.token != serve.token
    assert pool.transfers.find(C, JoinRelay(PROTOCOL, C, "m1", serve.token, serves=False)) is None
    assert pool.transfers.find(C, JoinRelay(PROTOCOL, C, "m2", moved.token, serves=False)) is not None
    pool.controller.close()
