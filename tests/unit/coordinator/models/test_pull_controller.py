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
from coordinator.models.pull_controller import MAX_OPEN_PULLS, PullController, TooManyPullsError
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

A, B = NodeId("a"), NodeId("b")
MANIFEST = ModelManifest("pub/model", "c" * 40, (ModelFile("config.json", 5, "a" * 64),))


class Pool:
    """A controller with links to two nodes, the frames that it sends, and the transfers that it relays."""

    def __init__(self, folder: Path, epoch: int = 1, token_file: str = "") -> None:
        self.sent: list[tuple[NodeId, Frame]] = []
        self.linked = {A, B}
        hub = HubClient(HubSettings(endpoint="http://hub.test", token_file=token_file))
        self.transfers = RelayTransfers()
        self.illegal_events = IllegalEventCounts()
        self.controller = PullController(
            folder, hub, self.send, self.transfers, epoch, self.illegal_events, wall=lambda: 1000.0
        )
        self.show(A, B)

    def send(self, node: NodeId, frame: Frame) -> bool:
        self.sent.append((node, frame))
        return node in self.linked

    def show(self, *linked: NodeId, epoch: int = 1) -> None:
        nodes = [NodeView(name, name, "ready" if name in linked else "lost", epoch=epoch) for name in (A, B)]
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


def replace_commit(digit: str) -> ModelManifest:
    return ModelManifest(MANIFEST.repo, digit * 40, MANIFEST.files)


async def test_open_pulls_are_bounded(pool: Pool) -> None:
    for digit in range(MAX_OPEN_PULLS):
        pool.controller.start_pull(replace_commit(f"{digit:x}"), (A,), "key")
    with pytest.raises(TooManyPullsError, match="16 pulls"):
        pool.controller.start_pull(replace_commit("z"), (A,), "key")


async def test_cancel_sends_the_nodes_a_cancel_order(pool: Pool) -> None:
    record = pool.controller.start_pull(MANIFEST, (A, B), "key")
    ((_, order),) = pool.take()
    assert isinstance(order, PullModel)
    assert pool.controller.cancel_pull(record.id)
    assert pool.take() == [(A, CancelModelOrder(order.order))]
    assert not pool.controller.cancel_pull(record.id)
    assert not pool.controller.cancel_pull("pull-unknown")


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


async def test_a_removed_node_ends_its_pull(pool: Pool) -> None:
    record = pool.controller.start_pull(MANIFEST, (A,), "key")
    pool.controller.remove_node(A)
    assert build_pull_row(pool.controller.pulls[record.id], str)["state"] == "failed"


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
