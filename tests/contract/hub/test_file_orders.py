"""Orders about model files on a node, from a coordinator over a real link."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from node.hub.cache_layout import RepositoryFolder
from node.hub.file_orders import MAX_ORDERS
from tests.support.cluster.cluster_port import Line
from tests.support.cluster.model_node import ModelNode, get_files, make_identity, wait_end, wait_ready
from tests.support.hub.downloads import PIECE, download, hub_source, list_children
from tests.support.hub.hub import Hub, running_hub
from tests.support.processes import until
from wire.frames import (
    CancelModelOrder,
    LoadModel,
    ModelOrderEnded,
    ModelOrderProgress,
    PullModel,
    RemoveModel,
    Report,
    ServeModel,
    VerifyModel,
)
from wire.frames.model_files import ModelOrderCode, ModelOrderPhase
from wire.models.files import ModelManifest, ModelSource, SourceKind

pytestmark = pytest.mark.slow

WEIGHTS = "model.safetensors"
FILES = {"config.json": b'{"model_type": "llama"}', WEIGHTS: random.Random(8).randbytes(40 * PIECE + 5)}
TOTAL = sum(map(len, FILES.values()))
SECRET = "hf_secretsecretsecretsecret"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with running_hub() as made:
        yield made


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ModelNode]:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    made = ModelNode(tmp_path, [tmp_path])
    yield made
    await made.stop()


def repository(folder: Path, manifest: ModelManifest) -> RepositoryFolder:
    return RepositoryFolder(folder / "hub", manifest.repo)


def is_complete(folder: Path, manifest: ModelManifest) -> bool:
    root = repository(folder, manifest).get_snapshot(manifest.commit)
    return {file.path: (root / file.path).read_bytes() for file in manifest.files} == FILES


async def wait_progress(line: Line, order: int, is_enough: Callable[[ModelOrderProgress], bool]) -> ModelOrderProgress:
    while True:
        frame = await line.until(ModelOrderProgress)
        if frame.order == order and is_enough(frame):
            return frame


async def test_a_pull_reports_its_progress_and_one_end(hub: Hub, node: ModelNode, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.chunk_seconds = 0.1
    line = await node.start()
    assert not node.is_working()
    line.send(PullModel(7, manifest, (hub_source(hub.url, SECRET),)))
    await wait_progress(line, 7, lambda one: one.phase == ModelOrderPhase.DOWNLOADING and one.fetched > 0)
    assert node.is_working(), "the Mac does not sleep meanwhile"
    hub.faults.chunk_seconds = 0.0
    end, _ = await wait_end(line, 7)
    assert not node.is_working()
    assert (end.code, end.message, end.fetched, len(end.content)) == (ModelOrderCode.COMPLETED, "", TOTAL, 64)
    assert is_complete(tmp_path, manifest)
    assert {request.authorization for request in hub.requests} == {f"Bearer {SECRET}"}
    assert list_children("node.hub") == []


async def test_tokens_are_in_no_frame_and_no_command_line(hub: Hub, node: ModelNode):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.chunk_seconds = 0.1
    line = await node.start()
    line.send(PullModel(1, manifest, (hub_source("http://127.0.0.1:9", SECRET), hub_source(hub.url, SECRET))))
    shown = str(await wait_progress(line, 1, lambda one: bool(one.message)))
    commands = [" ".join(child.cmdline()) for child in list_children("node.hub")]
    line.send(CancelModelOrder(1))
    end, progress = await wait_end(line, 1)
    assert len(commands) == 1
    assert SECRET not in f"{shown}{commands}{end}{progress}"


async def test_a_pull_can_be_cancelled_and_continued(hub: Hub, node: ModelNode, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.chunk_seconds = 0.05
    line = await node.start()
    line.send(PullModel(1, manifest, (hub_source(hub.url),)))
    await wait_progress(line, 1, lambda one: one.fetched > 0)
    line.send(CancelModelOrder(1), PullModel(2, manifest, (hub_source(hub.url),)))
    assert (await wait_end(line, 1))[0].code == ModelOrderCode.CANCELLED
    hub.faults.chunk_seconds = 0.0
    assert (await wait_end(line, 2))[0].code == ModelOrderCode.COMPLETED
    assert is_complete(tmp_path, manifest)


async def test_a_pull_continues_without_a_link_and_a_repeated_order_attaches(hub: Hub, node: ModelNode, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.chunk_seconds = 0.2
    line = await node.start()
    order = (manifest, (hub_source(hub.url),))
    line.send(PullModel(1, *order))
    await wait_progress(line, 1, lambda one: one.fetched > 0)
    (child,) = list_children("node.hub")
    line.close()
    second = await node.next_link()
    second.send(PullModel(5, *order), PullModel(5, *order))
    await wait_progress(second, 5, lambda one: one.fetched > 0)
    assert list_children("node.hub") == [child]
    hub.faults.chunk_seconds = 0.0
    ends = [await second.until(ModelOrderEnded) for _ in range(2)]
    assert [(end.order, end.code) for end in ends] == [(1, ModelOrderCode.COMPLETED), (5, ModelOrderCode.COMPLETED)]
    assert is_complete(tmp_path, manifest)


async def test_an_end_without_a_link_is_sent_on_the_next_link(hub: Hub, node: ModelNode, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.chunk_seconds = 0.05
    line = await node.start()
    line.send(PullModel(1, manifest, (hub_source(hub.url),)))
    await wait_progress(line, 1, lambda one: one.fetched > 0)
    node.welcoming.clear()
    line.close()
    await asyncio.to_thread(until, lambda: not list_children("node.hub"), what="the end of the pull")
    await asyncio.sleep(0.5)  # the agent sees the end of its child
    node.welcoming.set()
    second = await node.next_link()
    end, _ = await wait_end(second, 1)
    assert end.code == ModelOrderCode.COMPLETED
    assert is_complete(tmp_path, manifest)


async def test_an_end_that_may_be_lost_with_its_link_is_sent_again_once(hub: Hub, node: ModelNode):
    manifest = hub.add("tests/tiny", FILES)
    line = await node.start()
    line.send(PullModel(1, manifest, (hub_source(hub.url),)))
    first, _ = await wait_end(line, 1)
    line.close()
    second = await node.next_link()
    assert (await wait_end(second, 1))[0] == first
    second.send(RemoveModel(2, "tests/none"))
    assert (await second.until(ModelOrderEnded)).order == 2


async def test_a_second_commit_of_a_repository_waits_for_the_first(hub: Hub, node: ModelNode):
    first = hub.add("tests/tiny", FILES)
    second = hub.add("tests/tiny", {**FILES, "config.json": b"{}"})
    hub.faults.chunk_seconds = 0.2
    line = await node.start()
    line.send(PullModel(1, first, (hub_source(hub.url),)), PullModel(2, second, (hub_source(hub.url),)))
    end = await line.until(ModelOrderEnded)
    assert (end.order, end.code) == (2, ModelOrderCode.IN_USE)
    line.send(RemoveModel(3, "tests/tiny"))
    end = await line.until(ModelOrderEnded)
    assert (end.order, end.code) == (3, ModelOrderCode.IN_USE)


async def test_a_model_that_a_model_folder_has_is_not_pulled_into_the_cache(hub: Hub, node: ModelNode, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    folder = tmp_path / "tests" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    line = await node.start()
    line.send(PullModel(1, manifest, (hub_source(hub.url),)))
    end, _ = await wait_end(line, 1)
    assert (end.code, end.message) == (
        ModelOrderCode.FAILED,
        f"this node serves tests/tiny from {folder}, and would not use a copy in the Hugging Face cache: remove that "
        "model, then pull again",
    )
    assert hub.requests == []


async def test_an_order_for_the_hub_that_attaches_to_a_download_from_a_mirror_reports_the_mirror(
    hub: Hub, node: ModelNode
):
    manifest = hub.add("tests/tiny", FILES)
    line = await node.start()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        mirror = ModelSource(SourceKind.MIRROR, f"https://127.0.0.1:{silent.getsockname()[1]}", "transfer", "n2")
        line.send(PullModel(1, manifest, (mirror,)), PullModel(2, manifest, (hub_source(hub.url),)))
        assert (await wait_progress(line, 2, lambda one: True)).from_mirror
        line.send(CancelModelOrder(1))
        await wait_end(line, 1)
    hub.faults.chunk_seconds = 0.1
    line.send(PullModel(3, manifest, (hub_source(hub.url),)))
    assert not (await wait_progress(line, 3, lambda one: True)).from_mirror


async def test_unsafe_manifests_are_refused(hub: Hub, node: ModelNode, tmp_path: Path):
    manifest = hub.add("../tiny", FILES)
    line = await node.start()
    line.send(PullModel(1, manifest, (hub_source(hub.url),)))
    assert (await wait_end(line, 1))[0].code == ModelOrderCode.INVALID
    line.send(ServeModel(2, manifest, "token"))
    assert (await wait_end(line, 2))[0].code == ModelOrderCode.INVALID
    assert not (tmp_path / "hub").exists()


async def test_a_killed_process_ends_its_order_as_interrupted(hub: Hub, node: ModelNode):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.chunk_seconds = 0.2
    line = await node.start()
    line.send(PullModel(1, manifest, (hub_source(hub.url),)))
    await wait_progress(line, 1, lambda one: one.fetched > 0)
    for child in list_children("node.hub"):
        child.kill()
    end, _ = await wait_end(line, 1)
    assert (end.code, "SIGKILL" in end.message) == (ModelOrderCode.INTERRUPTED, True)


async def test_a_mirror_serves_another_node(hub: Hub, node: ModelNode, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    line = await node.start()
    line.send(PullModel(1, manifest, (hub_source(hub.url),)))
    assert (await wait_end(line, 1))[0].code == ModelOrderCode.COMPLETED
    line.send(ServeModel(2, manifest, "transfer", idle=60.0))
    serving = await wait_progress(line, 2, lambda one: one.phase == ModelOrderPhase.SERVING)
    source = ModelSource(SourceKind.MIRROR, serving.addresses[0], "transfer", "n1")
    follower = tmp_path / "follower"
    files = get_files(make_identity(follower, node.authority, "n2"))
    end = await asyncio.to_thread(download, follower, manifest, [source], cluster=files)
    assert (end.code, end.fetched) == (ModelOrderCode.COMPLETED, TOTAL)
    await wait_progress(line, 2, lambda one: one.done == TOTAL)
    line.send(CancelModelOrder(2))
    assert (await wait_end(line, 2))[0].code == ModelOrderCode.CANCELLED


async def test_verify_hashes_a_model_and_remove_deletes_it(hub: Hub, node: ModelNode, tmp_path: Path):
    manifest = hub.add("tests/tiny", FILES)
    line = await node.start()
    line.send(PullModel(1, manifest, (hub_source(hub.url),)))
    pulled, _ = await wait_end(line, 1)
    line.send(VerifyModel(2, "tests/tiny"))
    verified, _ = await wait_end(line, 2)
    assert (verified.code, verified.content) == (ModelOrderCode.COMPLETED, pulled.content)
    blob = repository(tmp_path, manifest).get_blob(manifest.files[1].etag)
    blob.write_bytes(bytes(100))
    line.send(VerifyModel(3, "tests/tiny"))
    changed, _ = await wait_end(line, 3)
    assert changed.content not in ("", pulled.content)
    assert (changed.code, changed.message) == (
        ModelOrderCode.CONTENT_MISMATCH,
        "model.safetensors changed on the disk since the download: remove the model and pull it again",
    )
    line.send(RemoveModel(4, "tests/tiny"))
    removed, _ = await wait_end(line, 4)
    assert (removed.code, removed.freed > 0) == (ModelOrderCode.COMPLETED, True)
    assert not repository(tmp_path, manifest).root.exists()
    for missing in (RemoveModel(5, "tests/tiny"), VerifyModel(6, "tests/tiny")):
        line.send(missing)
        assert (await wait_end(line, missing.order))[0].code == ModelOrderCode.NOT_FOUND


async def test_a_loaded_model_is_not_removed(node: ModelNode, tmp_path: Path):
    folder = tmp_path / "scripted-1"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    line = await node.start()
    report = await wait_ready(line)
    if not report.models[0].loaded:
        line.send(LoadModel(1, report.models[0].name))
        while not (await line.until(Report)).models[0].loaded:
            pass
    line.send(RemoveModel(2, report.models[0].name))
    end, _ = await wait_end(line, 2)
    assert (end.code, "unload it first" in end.message) == (ModelOrderCode.IN_USE, True)
    assert (folder / "config.json").exists()


async def test_children_end_with_the_node_and_their_orders_get_no_end(hub: Hub, node: ModelNode):
    manifest = hub.add("tests/tiny", FILES)
    hub.faults.chunk_seconds = 0.2
    line = await node.start()
    line.send(PullModel(1, manifest, (hub_source(hub.url),)))
    await wait_progress(line, 1, lambda one: one.fetched > 0)
    await node.stop()
    assert list_children("node.hub") == []
    frames = await line.ended()
    assert [frame for frame in frames if isinstance(frame, ModelOrderEnded)] == [], "the order is sent again later"


async def test_orders_with_wrong_names_or_without_a_token_are_refused_at_once(hub: Hub, node: ModelNode):
    manifest = hub.add("tests/tiny", FILES)
    line = await node.start()
    for number, order in enumerate((RemoveModel(1, "a\nb"), VerifyModel(2, " "), ServeModel(3, manifest, "")), 1):
        line.send(order)
        end, _ = await wait_end(line, number)
        assert end.code == ModelOrderCode.INVALID
        wanted = "a mirror needs a token" if number == 3 else "is not the name of a model"
        assert wanted in end.message


async def test_an_order_that_is_cancelled_before_its_process_starts_none(node: ModelNode, tmp_path: Path):
    folder = tmp_path / "me" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(1000))
    line = await node.start()
    line.send(VerifyModel(1, "me/tiny"), CancelModelOrder(1))
    end, progress = await wait_end(line, 1)
    assert (end.code, progress) == (ModelOrderCode.CANCELLED, [])
    line.send(VerifyModel(2, "me/tiny"))
    assert (await wait_end(line, 2))[0].code == ModelOrderCode.COMPLETED


async def test_orders_for_other_models_are_independent_and_removals_of_one_are_not(node: ModelNode, tmp_path: Path):
    for name in ("a", "b"):
        repository = RepositoryFolder(tmp_path / "hub", f"tests/{name}")
        repository.prepare()
        (repository.blobs / "x").write_bytes(bytes(8192))
    line = await node.start()
    with RepositoryFolder(tmp_path / "hub", "tests/a").lock():
        line.send(RemoveModel(1, "tests/a"), RemoveModel(2, "tests/a"), RemoveModel(3, "tests/b"))
        ends = {end.order: end for end in [await line.until(ModelOrderEnded) for _ in range(3)]}
    assert (ends[2].code, ends[2].message) == (
        ModelOrderCode.IN_USE,
        "another order works on tests/a: cancel it or wait for its end",
    )
    assert (ends[3].code, ends[3].freed) == (ModelOrderCode.COMPLETED, 8192)
    assert (ends[1].code, "another process works on tests/a" in ends[1].message) == (ModelOrderCode.IN_USE, True)
    line.send(RemoveModel(4, "tests/a"))
    assert (await wait_end(line, 4))[0].code == ModelOrderCode.COMPLETED


async def test_more_orders_than_the_limit_are_refused_until_others_end(node: ModelNode, tmp_path: Path):
    line = await node.start()
    with ExitStack() as held:
        for number in range(MAX_ORDERS):
            repository = RepositoryFolder(tmp_path / "hub", f"tests/{number}")
            repository.prepare()
            held.enter_context(repository.lock())
            line.send(RemoveModel(number + 1, f"tests/{number}"))
        line.send(VerifyModel(99, "tests/none"))
        end = await line.until(ModelOrderEnded)
        assert (end.order, end.code) == (99, ModelOrderCode.IN_USE)
        assert end.message == f"{MAX_ORDERS} orders are in progress on this node: try again later"
    for _ in range(MAX_ORDERS):
        await line.until(ModelOrderEnded)
    line.send(VerifyModel(100, "tests/none"))
    assert (await wait_end(line, 100))[0].code == ModelOrderCode.NOT_FOUND
