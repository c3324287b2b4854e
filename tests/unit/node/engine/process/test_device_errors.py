"""A failed command buffer of the GPU ends the engine process, wherever MLX reports it."""

import ast
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest

from node.engine.process.device_errors import DeviceLost, is_device_error, raise_if_device_lost
from node.engine.scheduling.decode_batch import RowSampler
from tests import models
from tests.support.engine.text_engine import Driver
from wire.frames import GenerationParams

LOST = "[METAL] Command buffer execution failed: Caused GPU Timeout Error (00000002:kIOGPUCommandBufferCallback...)."
ROOT = Path(__file__).parents[5]
FOLDERS = ("node/engine/scheduling", "node/engine/embedding", "node/engine/models", "node/engine/kv")
BROAD = {"Exception", "RuntimeError", "BaseException"}
WITHOUT_MLX = {
    "node/engine/embedding/preparer.py:prepare": "the I/O thread prepares requests, without arrays",
    "node/engine/kv/disk/block_writer.py:_run": "its thread writes arrays that were evaluated before",
    "node/engine/models/profiler.py:tokenize_sample_text": "a tokenizer",
}
"""Functions with a handler of any exception that do not call MLX in its context."""


def raise_lost(*_: object) -> mx.array:
    raise RuntimeError(LOST)


@pytest.fixture
def driver() -> Driver:
    return Driver(models.path("llama"), max_batch_size=8, prefill_step_size=256)


def list_broad_handlers() -> dict[str, list[ast.ExceptHandler]]:
    """Return the handlers that catch any exception of MLX, by file and function."""
    found = dict[str, list[ast.ExceptHandler]]()
    for file in sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")):
        for function in ast.walk(ast.parse(file.read_text())):
            if isinstance(function, ast.FunctionDef):
                for node in ast.walk(function):
                    if isinstance(node, ast.ExceptHandler) and catches_any(node):
                        found.setdefault(f"{file.relative_to(ROOT)}:{function.name}", []).append(node)
    return found


def catches_any(handler: ast.ExceptHandler) -> bool:
    caught = handler.type
    return caught is None or bool(BROAD & {name.id for name in ast.walk(caught) if isinstance(name, ast.Name)})


def test_every_handler_of_exceptions_of_mlx_looks_for_failed_command_buffers():
    handlers = list_broad_handlers()
    without = {
        place
        for place, nodes in handlers.items()
        if any(ast.unparse(node.body[0]) != "raise_if_device_lost(error)" for node in nodes)
    }
    assert without == WITHOUT_MLX.keys()
    assert len(handlers) > 12


@pytest.mark.parametrize("part", ["step", "wait", "join", "drop_rows"])
def test_a_failed_command_buffer_reaches_no_handler_and_ends_no_single_request(driver: Driver, part: str):
    """MLX reports the error once, in any call, and every row's cache may be affected."""
    number = driver.ask("Hello!", GenerationParams(temperature=0.0, max_tokens=400, stop=("\0",)))
    driver.until(lambda: driver.ids[number, 0])
    (batch,) = driver.batches().values()
    setattr(batch, part, raise_lost)
    if part in ("wait", "join"):
        driver.ask("Hello again!")
    continues = partial(driver.cancel, number) if part == "drop_rows" else partial(driver.end, number)
    with pytest.raises(DeviceLost, match="GPU Timeout"):
        continues()
    assert driver.ended(number) is None


def test_a_sampler_and_a_processor_do_not_keep_the_error_for_their_row():
    guard = RowSampler(raise_lost, (raise_lost,))
    with pytest.raises(DeviceLost):
        guard.sampler(mx.zeros(4))
    with pytest.raises(DeviceLost):
        guard.processors[0](mx.zeros(1), mx.zeros(4))


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError(LOST), True),
        (DeviceLost(LOST), True),
        (RuntimeError("[metal::malloc] Attempting to allocate 21474836480 bytes"), False),
        (RuntimeError(f"its text names {LOST}"), False),
        (ValueError(LOST), False),
    ],
)
def test_only_failed_command_buffers_lose_the_device(error: BaseException, lost: bool):
    assert is_device_error(error) is lost
    if lost:
        with pytest.raises(DeviceLost, match="GPU Timeout") as raised:
            raise_if_device_lost(error)
        assert raised.value.__cause__ is error
    else:
        raise_if_device_lost(error)
