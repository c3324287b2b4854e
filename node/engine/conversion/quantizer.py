"""Child process that quantizes a model with mlx-lm: `python -m node.engine.conversion.quantizer`.

The order is a line of the standard input (`node.hub.child_messages.QuantizeOrder`). The weights are those of
`mlx_lm.convert(quantize=True)`, but each tensor is computed alone, and a file is written when 1 GiB of tensors are
ready. The memory is therefore bounded by one layer and one file (`node.hub.quantization.prediction`), and the order can
be cancelled after each tensor. Tokenizer, template and further files (`COPIED`) are copied unchanged, because they
determine the prompts. `config.json` and the index of the weights are written by the child.

Code of a model folder is neither run nor copied.
"""

import errno
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, cast

import msgspec

from host.private_files import sync_tree
from node.hub.child_messages import ChildChannel, ChildEnd, ChildProgress, QuantizeOrder, build_end, perform_order
from node.hub.errors import OrderStopped
from node.hub.quantization.prediction import GROUP_WEIGHTS, SHARD_BYTES
from node.models.embedding_files import DENSE_FILES
from node.models.weight_files import list_visible_files
from wire.frames.model_files import ModelOrderCode, ModelOrderPhase
from wire.units import GIB, MIB

REPORT_SECONDS = 0.5
"""Minimum seconds between two reports of progress."""
FULL_DISK_BYTES = 64 * MIB
"""Free bytes below which a failed write of MLX, whose errors have no number, counts as a full disk."""
COPIED = ("*.json", "*.model", "*.txt", "*.jinja", "1_Pooling/config.json", "1_LogitScore/config.json", *DENSE_FILES)
"""Patterns of the files that are copied unchanged, without those in `REPLACED`."""
REPLACED = frozenset({"config.json", "model.safetensors.index.json"})
"""Files at the top of the model folder that are not copied, because the quantization writes them."""


class QuantizationRun:
    """Quantization of the model folder `order.source` into the new folder `order.target`. Progress goes to
    `channel`."""

    def __init__(self, order: QuantizeOrder, channel: ChildChannel) -> None:
        self._source = Path(order.source)
        self._target = Path(order.target)
        self._bits = order.bits
        self._channel = channel
        self._began = time.monotonic()
        self._reported_at = 0.0

    def run(self) -> ChildEnd:
        """Write the quantized model. Return the `completed` message, with the bytes of the weights.

        Raise `OSError` if a file cannot be read or written, or if the target exists. Raise `ValueError` or
        `RuntimeError` if mlx-lm refuses the model or MLX cannot write a file. Raise `OrderStopped` if the order is
        cancelled.
        """
        from mlx_lm.utils import load_model, quantize_model

        self._target.mkdir()
        model, config = load_model(self._source, lazy=True)
        _convert_type(model, config)
        keeps_vision = "vision_tower" in getattr(model, "model", {})
        with redirect_stdout(sys.stderr):  # mlx-lm prints, and the standard output is for messages
            model, config = quantize_model(model, config, GROUP_WEIGHTS, self._bits)
        stored = self._write_weights(model)
        self._copy_files()
        self._write_config(config, keeps_vision=keeps_vision)
        sync_tree(self._target)
        return ChildEnd(code=ModelOrderCode.COMPLETED, stored=stored)

    def _write_weights(self, model: Any) -> int:
        """Compute and write all tensors, and return their bytes. The model loses its tensors. Raise `OrderStopped` if
        the order is cancelled, `OSError` or `RuntimeError` if a file cannot be written."""
        import mlx.core as mx
        from mlx import utils as mlx_utils
        from mlx_lm.utils import make_shards

        core: Any = mx
        evaluate: Callable[[mx.array], None] = core.eval
        trees: Any = mlx_utils
        weights = cast("dict[str, mx.array]", dict(trees.tree_flatten(model.parameters())))
        self._began, total, done = time.monotonic(), sum(weight.nbytes for weight in weights.values()), 0
        shards = cast("list[dict[str, mx.array]]", make_shards(weights, SHARD_BYTES // GIB))
        files = {name: _name_file(at, len(shards)) for at, shard in enumerate(shards) for name in shard}
        # A tensor that the model still holds would keep its unquantized weights in memory.
        model.update(trees.tree_map(_build_empty, model.parameters()))
        weights.clear()
        for at, shard in enumerate(shards):
            for tensor in shard.values():
                if self._channel.stop.is_set():
                    raise OrderStopped
                evaluate(tensor)
                mx.clear_cache()
                done += tensor.nbytes
                self._report(done, total)
            core.save_safetensors(str(self._target / _name_file(at, len(shards))), shard, {"format": "mlx"})
            shard.clear()
        index = {"metadata": {"total_size": total}, "weight_map": {name: files[name] for name in sorted(files)}}
        (self._target / "model.safetensors.index.json").write_bytes(msgspec.json.encode(index))
        return total

    def _report(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self._reported_at >= REPORT_SECONDS:
            self._reported_at = now
            speed = done / (now - self._began) if now > self._began else 0.0
            self._channel.send(ChildProgress(phase=ModelOrderPhase.QUANTIZING, done=done, total=total, speed=speed))

    def _copy_files(self) -> None:
        for pattern in COPIED:
            for file in list_visible_files(self._source, pattern):
                name = file.relative_to(self._source)
                if file.name in REPLACED and name.parent == Path():
                    continue
                (self._target / name.parent).mkdir(exist_ok=True)
                shutil.copyfile(file, self._target / name)

    def _write_config(self, config: dict[str, Any], *, keeps_vision: bool) -> None:
        from mlx_lm.utils import save_config

        save_config(config, self._target / "config.json", keep_vision_config=keeps_vision)


def _build_empty(_: object) -> object:
    import mlx.core as mx

    return mx.array([])


def _convert_type(model: Any, config: dict[str, Any]) -> None:
    """Convert the floating-point weights to the `torch_dtype` of the config, except those that the model excludes. Do
    nothing for an unknown type. `mlx_lm.convert` has the same rule."""
    import mlx.core as mx
    from mlx import utils as mlx_utils
    from mlx_lm.convert import MODEL_CONVERSION_DTYPES

    text: dict[str, Any] = config.get("text_config") or {}
    named = str(config.get("torch_dtype") or text.get("dtype"))
    if named not in MODEL_CONVERSION_DTYPES:
        return
    wanted: mx.Dtype = getattr(mx, named)
    may_convert: Callable[[str], bool] | None = getattr(model, "cast_predicate", None)

    def convert(name: str, tensor: mx.array) -> mx.array:
        kept = may_convert is not None and not may_convert(name)
        return tensor if kept or not mx.issubdtype(tensor.dtype, mx.floating) else tensor.astype(wanted)

    trees: Any = mlx_utils
    model.update(trees.tree_map_with_path(convert, model.parameters()))


def _name_file(at: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{at + 1:05d}-of-{count:05d}.safetensors"


def run_quantization(order: QuantizeOrder, channel: ChildChannel) -> ChildEnd:
    """Quantize the model of an order, and return the final message for the agent.

    The message also reports a cancel, `OSError`, `ValueError` or `RuntimeError`. Other exceptions propagate. After a
    failure or a cancel, the incomplete result stays in `order.target`.
    """
    try:
        return QuantizationRun(order, channel).run()
    except OrderStopped:
        return build_end(ModelOrderCode.CANCELLED)
    except OSError as error:
        code = ModelOrderCode.DISK_FULL if error.errno == errno.ENOSPC else ModelOrderCode.FAILED
        file = "" if error.filename is None else f"{error.filename}: "
        return build_end(code, f"the model cannot be quantized: {file}{error.strerror or error}")
    except (ValueError, RuntimeError) as error:
        if shutil.disk_usage(order.target).free < FULL_DISK_BYTES:
            return build_end(ModelOrderCode.DISK_FULL, "the quantized model cannot be written: the disk is full")
        return build_end(ModelOrderCode.FAILED, f"mlx-lm cannot quantize this model: {error}"[:1000])


def _discard_result(order: QuantizeOrder) -> None:
    """Delete the incomplete result and end the process at once, because only the agent watches its memory."""
    shutil.rmtree(order.target, ignore_errors=True)
    os._exit(1)


def main() -> None:
    """Read an order from the standard input, perform it, write its final message to the standard output, and exit.

    The exit code is 0, or 2 if the order cannot be read. When the agent ends, delete the incomplete result and end with
    the code 1.
    """
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
    perform_order(QuantizeOrder, run_quantization, _discard_result)


if __name__ == "__main__":
    main()
