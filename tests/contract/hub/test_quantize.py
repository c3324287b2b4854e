"""Quantization on a node under a lease of memory, with mlx-lm on the CPU, over a real link."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

import node as package
from node.engine.conversion.quantizer import run_quantization
from node.hub.child_messages import ChildChannel, ChildEnd, ChildMessage, QuantizeOrder
from node.models.catalogue import describe_folder
from tests import models
from tests.effort import thin_cases
from tests.models import EMBEDDED
from tests.support.cluster.cluster_port import Line
from tests.support.cluster.model_node import ModelNode, wait_end, wait_ready
from tests.support.engine.embedders import make_embedder
from tests.support.processes import until
from wire.frames import (
    CancelModelOrder,
    LeaseRefused,
    LeaseRequest,
    ModelOrderProgress,
    PauseNode,
    QuantizeModel,
    Report,
)
from wire.frames.model_files import ModelOrderCode, ModelOrderPhase
from wire.units import GIB

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

CONVERTER = "node.engine.conversion.quantizer"
ORDER = QuantizeModel(5, "me/tiny", 4, "me/tiny-4bit")


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ModelNode]:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    shutil.copytree(EMBEDDED, tmp_path / "models" / "me" / "tiny")
    made = ModelNode(tmp_path, [tmp_path / "models"])
    yield made
    await made.stop()


def list_children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if CONVERTER in child.cmdline()]


async def hold_child() -> psutil.Process:
    """Suspend the child as soon as it runs, and return it."""
    await asyncio.to_thread(until, list_children, 30)
    (child,) = list_children()
    child.suspend()
    return child


async def wait_leases(line: Line, *, held: bool) -> Report:
    while True:
        report = await line.until(Report)
        if bool(report.memory.leases) == held:
            return report


def list_models(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.glob("*/*"))


def load_tensors(folder: Path) -> dict[str, Any]:
    import mlx.core as mx

    core: Any = mx
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in core.load(str(file)).items()}


CONVERT = """
import json, sys
from mlx_lm.convert import convert
for source, target, bits in json.loads(sys.argv[1]):
    convert(source, target, quantize=True, q_bits=bits)
"""
"""mlx-lm's own conversion. Its import takes 4 s of CPU, and therefore one process converts all models."""


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the models of mlx-lm's converter, by architecture."""
    folder = tmp_path_factory.mktemp("theirs")
    orders = [(str(models.path(arch)), str(folder / arch), bits) for arch, bits in TODAY]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", CONVERT, json.dumps(orders)]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    return folder


async def test_a_model_is_quantized_under_a_lease_and_found(node: ModelNode, tmp_path: Path):
    line = await node.start()
    before = await wait_ready(line)
    line.send(ORDER)
    child = await hold_child()
    leased = await wait_leases(line, held=True)
    assert leased.memory.ceiling == before.memory.ceiling - leased.memory.leases
    assert list_models(tmp_path / "models") == ["me/tiny"], "half a model is not in the catalogue"
    child.resume()
    end, progress = await wait_end(line, 5)
    assert (end.code, end.message) == (ModelOrderCode.COMPLETED, "")
    assert {one.phase for one in progress} <= {ModelOrderPhase.LEASING, ModelOrderPhase.QUANTIZING}
    assert 0 < end.peak < leased.memory.leases
    await wait_leases(line, held=False)
    assert list_models(tmp_path / "models") == ["me/tiny", "me/tiny-4bit"]
    files = {path.name: path.read_bytes() for path in (tmp_path / "models" / "me" / "tiny-4bit").iterdir()}
    assert files["tokenizer.json"] == (EMBEDDED / "tokenizer.json").read_bytes()
    assert files["tokenizer_config.json"] == (EMBEDDED / "tokenizer_config.json").read_bytes()


CONVERTED = [("llama", 4), ("gemma3_text", 3), ("lfm2", 8), ("qwen3_next", 6)]
"""Architectures and bits of the comparison with mlx-lm. CI draws a transformer and one with states."""
TODAY = thin_cases(CONVERTED, 2)


@pytest.mark.parametrize(("arch", "bits"), TODAY)
def test_the_weights_are_those_of_mlx_lms_converter(converted: Path, tmp_path: Path, arch: str, bits: int):
    import mlx.core as mx

    source = models.path(arch)
    order = QuantizeOrder(source=str(source), target=str(tmp_path / "ours"), bits=bits)
    assert run_child(order).code == ModelOrderCode.COMPLETED
    ours, theirs = load_tensors(tmp_path / "ours"), load_tensors(converted / arch)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not mx.array_equal(ours[name], theirs[name])] == []
    config = msgspec.json.decode((tmp_path / "ours" / "config.json").read_bytes())
    assert config == msgspec.json.decode((converted / arch / "config.json").read_bytes())
    assert config["quantization"]["bits"] == bits


ROOT = Path(package.__file__).parents[1]


def run_child(order: QuantizeOrder) -> ChildEnd:
    with subprocess.Popen([sys.executable, "-m", CONVERTER], stdin=-1, stdout=-1, cwd=ROOT) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(msgspec.json.encode(order) + b"\n")
        child.stdin.flush()
        last = msgspec.json.decode(child.stdout.read().splitlines()[-1], type=ChildMessage)
    assert isinstance(last, ChildEnd)
    return last


def test_the_result_of_an_embedding_model_keeps_its_modules(tmp_path: Path):
    source = make_embedder(tmp_path / "source", dense=[(64, "torch.nn.modules.activation.Tanh")])
    target = tmp_path / "ours"
    assert run_child(QuantizeOrder(source=str(source), target=str(target), bits=4)).code == ModelOrderCode.COMPLETED
    before, after = describe_folder("before", source), describe_folder("after", target)
    assert before is not None
    assert after is not None
    assert after.cause == ""
    assert before.layout is not None
    assert after.layout == before.layout
    weights = "2_Dense/model.safetensors"
    assert (target / weights).read_bytes() == (source / weights).read_bytes()


def test_a_file_error_names_its_file(tmp_path: Path):
    target, source = tmp_path / "gone" / "ours", tmp_path / "empty"
    end = run_quantization(QuantizeOrder(source=str(EMBEDDED), target=str(target), bits=4), ChildChannel())
    assert end.code == ModelOrderCode.FAILED
    assert end.message == f"the model cannot be quantized: {target}: No such file or directory"
    source.mkdir()
    order = QuantizeOrder(source=str(source), target=str(tmp_path / "ours"), bits=4)
    assert f": {source}/config.json: " in run_quantization(order, ChildChannel()).message


@pytest.mark.parametrize(
    ("order", "code"),
    [
        (QuantizeModel(5, "me/tiny", 7, "me/tiny-7bit"), ModelOrderCode.INVALID),
        (QuantizeModel(5, "me/tiny", 4, "../tiny"), ModelOrderCode.INVALID),
        (QuantizeModel(5, "me/other", 4, "me/other-4bit"), ModelOrderCode.NOT_FOUND),
        (QuantizeModel(5, "me/tiny", 4, "me/tiny"), ModelOrderCode.NAME_TAKEN),
    ],
)
async def test_impossible_orders_take_no_memory(node: ModelNode, order: QuantizeModel, code: ModelOrderCode):
    line = await node.start()
    await wait_ready(line)
    line.send(order)
    end, progress = await wait_end(line, 5)
    assert (end.code, progress) == (code, [])


async def test_a_quantization_that_exceeds_its_lease_is_ended(
    node: ModelNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("node.hub.quantization.prediction.BASE_BYTES", 1024)
    line = await node.start()
    await wait_ready(line)
    line.send(ORDER)
    end, _ = await wait_end(line, 5)
    assert end.code == ModelOrderCode.NO_MEMORY
    assert "of a lease of" in end.message
    assert list_models(tmp_path / "models") == ["me/tiny"]
    await wait_leases(line, held=False)


async def test_a_quantization_without_progress_fails_and_is_no_lack_of_memory(
    node: ModelNode, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("node.hub.quantization.quantizer.STALL_TIMEOUT_SECONDS", 0.0)
    line = await node.start()
    await wait_ready(line)
    line.send(ORDER)
    end, _ = await wait_end(line, 5)
    assert (end.code, end.message) == (ModelOrderCode.FAILED, "the quantization was ended: no progress for 0 s")
    await wait_leases(line, held=False)


async def test_a_lease_that_never_fits_is_refused_with_the_numbers(node: ModelNode, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("node.hub.quantization.prediction.BASE_BYTES", 100 * GIB)
    line = await node.start()
    await wait_ready(line)
    line.send(ORDER)
    end, _ = await wait_end(line, 5)
    assert end.code == ModelOrderCode.NO_MEMORY
    assert "needs 100.0 GiB and can never fit on this node: the cap of 90.0 GiB leaves" in end.message


async def test_a_cancelled_quantization_leaves_nothing(node: ModelNode, tmp_path: Path):
    line = await node.start()
    await wait_ready(line)
    line.send(ORDER)
    child = await hold_child()
    line.send(CancelModelOrder(5))
    await asyncio.sleep(0.1)
    with suppress(psutil.NoSuchProcess):
        child.resume()
    end, _ = await wait_end(line, 5)
    assert end.code == ModelOrderCode.CANCELLED
    assert list_models(tmp_path / "models") == ["me/tiny"]
    await wait_leases(line, held=False)


async def test_a_cancelled_quantization_can_be_started_again_at_once(node: ModelNode, tmp_path: Path):
    line = await node.start()
    await wait_ready(line)
    line.send(ORDER)
    child = await hold_child()
    line.send(CancelModelOrder(5), QuantizeModel(6, "me/tiny", 4, "me/tiny-4bit"))
    with suppress(psutil.NoSuchProcess):
        child.resume()
    codes = [(await wait_end(line, order))[0].code for order in (5, 6)]
    assert codes == [ModelOrderCode.CANCELLED, ModelOrderCode.COMPLETED]
    assert list_models(tmp_path / "models") == ["me/tiny", "me/tiny-4bit"]


async def test_a_killed_child_leaves_nothing(node: ModelNode, tmp_path: Path):
    line = await node.start()
    await wait_ready(line)
    line.send(ORDER)
    (await hold_child()).send_signal(signal.SIGKILL)
    end, _ = await wait_end(line, 5)
    assert (end.code, "SIGKILL" in end.message) == (ModelOrderCode.INTERRUPTED, True)
    assert list_models(tmp_path / "models") == ["me/tiny"]
    await wait_leases(line, held=False)


async def test_one_lease_at_a_time(node: ModelNode):
    line = await node.start()
    await wait_ready(line)
    line.send(ORDER)
    child = await hold_child()
    line.send(QuantizeModel(6, "me/tiny", 8, "me/tiny-8bit"))
    assert (await wait_end(line, 6))[0].code == ModelOrderCode.IN_USE
    line.send(LeaseRequest("lease", 1, "job", "wan", GIB, b"{}"))
    refused = await line.until(LeaseRefused)
    assert (refused.code, "to a quantization: one lease at a time" in refused.message) == ("lease_held", True)
    line.send(QuantizeModel(7, "me/tiny", 4, "me/tiny-4bit"))
    child.resume()
    ends = {order: (await wait_end(line, order))[0].code for order in (5, 7)}
    assert set(ends.values()) == {ModelOrderCode.COMPLETED}, "a repeated order attaches to the running one"


async def test_pause_ends_a_quantization(node: ModelNode):
    line = await node.start()
    await wait_ready(line)
    line.send(PauseNode(None, "alice"))
    line.send(ORDER)
    end, _ = await wait_end(line, 5)
    assert (end.code, "stopped sharing" in end.message) == (ModelOrderCode.IN_USE, True)


def test_the_child_ends_with_the_agent_and_deletes_its_files(tmp_path: Path):
    order = QuantizeOrder(
        source=str(models.path("llama", trained=False, preset="bench50m")), target=str(tmp_path / "q"), bits=4
    )
    with subprocess.Popen([sys.executable, "-m", CONVERTER], stdin=-1, stdout=-1, cwd=ROOT) as child:
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(order) + b"\n")
        child.stdin.flush()
        until((tmp_path / "q").exists, 30)
        child.stdin.close()
        assert child.wait(30) == 1
    assert not (tmp_path / "q").exists()


async def test_a_quantization_without_progress_is_reported_on_the_next_link(
    node: ModelNode, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("node.hub.quantization.quantizer.REPEAT_SECONDS", 0.1)
    line = await node.start()
    await wait_ready(line)
    line.send(ORDER)
    child = await hold_child()
    line.close()
    second = await node.next_link()
    progress = await second.until(ModelOrderProgress, 10.0)
    assert progress.order == 5
    child.resume()
    end, _ = await wait_end(second, 5)
    assert end.code == ModelOrderCode.COMPLETED


async def test_progress_counts_the_bytes_of_the_result(node: ModelNode):
    line = await node.start()
    await wait_ready(line)
    line.send(ORDER)
    while True:
        progress = await line.until(ModelOrderProgress)
        if progress.phase == ModelOrderPhase.QUANTIZING:
            break
    assert 0 < progress.done <= progress.total
    end, _ = await wait_end(line, 5)
    assert end.stored == progress.total
