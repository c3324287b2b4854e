"""Video worker: a program that generates one clip and exits, started as `ENVIRONMENT/bin/python -I worker.py`.

The worker runs in its own process group. This file imports no other module of the project, because the worker's
environment contains none.

    stdin    one line, the job as JSON; then no more data. At the end of stdin the worker exits at once, because its
             parent has ended. An orphan would keep the memory of the lease
    stdout   one JSON object per line: start, loading, loaded, progress, beat, done | failed. Output of libraries goes
             to stderr, because the descriptor of stdout is replaced before any of them is loaded
    exit     0 done, 2 no job, 3 failed and reported, 4 parent ended

MLX's cache of free buffers is small. Unless the job forbids it (`wire`), the wired limit is set below the lease before
any weight is read. Of two experts, only one is in memory at a time: each is unloaded when its steps are done. A counter
of transformer blocks is the sign of progress that a hanging GPU cannot produce. The watchdog enforces its bounds from
outside of this process.

Versions of the engine differ in their parameters. `call_supported` passes only arguments that the installed version
has, so that versions 0.18 and 0.38 both work.
"""

import contextlib
import errno
import importlib
import importlib.metadata
import inspect
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

VERSION = 1
"""Version of the format of the events, in their field `v`."""
UNWIRED_BYTES = 2 * 1024**3
"""Bytes of the lease that are not wired, at most half of the lease.

Python, torch's text encoder, and memory of the system for the worker use these bytes.
"""
MAX_CACHE_BYTES = 10**9
"""Maximum bytes of free buffers in MLX's cache."""
PROGRESS_INTERVAL_SECONDS = 1.0
"""Seconds between two `beat` events."""
TRANSFORMER = (
    "in_channels",
    "out_channels",
    "num_layers",
    "num_attention_heads",
    "attention_head_dim",
    "ffn_dim",
    "patch_size",
    "text_dim",
    "freq_dim",
    "cross_attn_norm",
    "eps",
    "rope_max_seq_len",
)
"""Keys of a transformer's config that describe its shape."""
EXIT_NO_JOB, EXIT_FAILED, EXIT_UNNEEDED = 2, 3, 4
"""Exit codes: no valid job on stdin, a failed job, and an end of stdin during the job."""


class EventWriter:
    """Writer of the worker's events to a file descriptor, as one JSON object per line. Thread-safe."""

    def __init__(self, descriptor: int) -> None:
        self._file = os.fdopen(descriptor, "w", buffering=1, encoding="utf-8")
        self._lock = threading.Lock()
        self._began = time.monotonic()

    def write_event(self, event: str, **facts: object) -> None:
        """Write one event with the fields `facts`, and with the seconds since the start of the worker as `at`."""
        line = json.dumps({"v": VERSION, "event": event, "at": round(time.monotonic() - self._began, 3), **facts})
        with self._lock:
            self._file.write(line + "\n")


class ProgressReporter:
    """Counter of computed transformer blocks, which is reported every `PROGRESS_INTERVAL_SECONDS`.

    `blocks` is the count. `peak()` returns the peak memory of MLX in bytes, which is reported as well.
    """

    def __init__(self, writer: EventWriter) -> None:
        self._writer = writer
        self.blocks = 0
        self.peak: Callable[[], int] = lambda: 0

    def count_calls(self, kind: Any) -> None:
        """Patch the class `kind` (a transformer block) so that every later call of its instances is counted."""
        call: Callable[..., object] = kind.__call__

        def call_and_count(this: object, *arguments: object, **named: object) -> object:
            result = call(this, *arguments, **named)
            self.blocks += 1
            return result

        kind.__call__ = call_and_count

    def run(self) -> None:
        """Write a `beat` event with count and peak every `PROGRESS_INTERVAL_SECONDS`, until the process ends."""
        pause = threading.Event()
        while not pause.wait(PROGRESS_INTERVAL_SECONDS):
            self._writer.write_event("beat", blocks=self.blocks, peak=self.peak())


def redirect_stdout() -> int:
    """Redirect descriptor 1 and `sys.stdout` to stderr, and return a duplicate of the original stdout, for events."""
    descriptor = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return descriptor


def read_job() -> dict[str, Any] | None:
    """Read the job, one line of JSON, from stdin; None if stdin ends before the end of the line.

    Raise `ValueError` for invalid JSON.
    """
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(0, 65536)
        if not piece:
            return None
        data += piece
    return json.loads(data)


def exit_at_end_of_stdin() -> None:
    """Read stdin until it ends, then exit the process at once."""
    while os.read(0, 4096):
        pass
    os._exit(EXIT_UNNEEDED)


def call_supported(call: Callable[..., Any], **named: object) -> Any:
    """Call a function with those arguments of `named` that its signature has, and return its result."""
    known = inspect.signature(call).parameters
    return call(**{name: value for name, value in named.items() if name in known})


def build_package_config(root: Path, config_class: Any) -> Any:
    """Return the engine's config for a package: the catalogue's values, overridden by the package's own configs.

    `root` is the folder of the package, `config_class` is the engine's `ModelConfig`. A quantized package has no
    configs of its components, which then have the catalogue's values. Raise `OSError` or `ValueError` for a config that
    cannot be read or parsed.
    """
    index = json.loads((root / "model_index.json").read_text())
    two = bool((index.get("transformer_2") or [None])[0]) or (root / "transformer_2").is_dir()
    base = config_class.wan2_2_t2v_a14b() if two else config_class.wan2_2_ti2v_5b()
    shape, vae, text = (_read_config(root, part) for part in ("transformer", "vae", "text_encoder"))
    known = dict(base.transformer_overrides)
    known |= {name: shape[name] for name in TRANSFORMER if name in shape}
    known |= {name: index[name] for name in ("boundary_ratio", "expand_timesteps") if index.get(name) is not None}
    known["has_transformer_2"] = two
    known["vae_config"] = _override_known(known["vae_config"], vae)
    return call_supported(
        config_class,
        priority=base.priority,
        aliases=[],
        model_name=str(root),
        base_model=base.model_name,
        controlnet_model=None,
        custom_transformer_model=None,
        num_train_steps=base.num_train_steps,
        max_sequence_length=base.max_sequence_length,
        supports_guidance=True,
        requires_sigma_shift=False,
        transformer_overrides=known,
        text_encoder_overrides=_override_known(base.text_encoder_overrides, text),
    )


def _read_config(root: Path, part: str) -> dict[str, Any]:
    file = root / part / "config.json"
    return json.loads(file.read_text()) if file.exists() else {}


def _override_known(known: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    return {name: overrides.get(name, value) for name, value in known.items()}


def set_memory_limits(mx: Any, size: int, *, wire: bool = True) -> int:
    """Set the limits of MLX for a lease of `size` bytes. Call before any weight is loaded.

    Return the wired limit in bytes; 0 without `wire`, because then no wired limit is set.
    """
    mx.set_memory_limit(size)
    mx.set_cache_limit(min(MAX_CACHE_BYTES, size // 8))
    if not wire:
        return 0
    wired = max(size - UNWIRED_BYTES, size // 2)
    try:
        most = int(mx.device_info().get("max_recommended_working_set_size", 0))
    except Exception:
        most = 0
    if most:
        wired = min(wired, most)
    mx.set_wired_limit(wired)
    return wired


def make_clip(job: dict[str, Any], writer: EventWriter, reporter: ProgressReporter) -> dict[str, Any]:
    """Generate the clip of a job with MLX, and write its progress as events to `writer`.

    `job` is the JSON object from stdin. `reporter` counts transformer blocks. Return the fields of the `done` event:
    `width` and `height` in pixels, `frames`, `fps`, `files`, `seed`, `steps`, and `mlx_peak` in bytes. Raise
    `ValueError` if the clip has no frames, `OSError` or `ValueError` for a config that cannot be read or parsed. Errors
    of the engine propagate.
    """
    mx: Any = importlib.import_module("mlx.core")
    wired = set_memory_limits(mx, int(job["size"]), wire=job.get("wire", True))
    writer.write_event(
        "start",
        pid=os.getpid(),
        wired=wired,
        isolated=sys.flags.isolated,
        names=sorted(os.environ),
        device=str(mx.default_device()),
    )
    reporter.peak = mx.get_peak_memory
    threading.Thread(target=reporter.run, daemon=True).start()
    engine: Any = importlib.import_module("mflux.models.wan.variants")
    blocks: Any = importlib.import_module("mflux.models.wan.model.wan_transformer.wan_transformer_block")
    configs: Any = importlib.import_module("mflux.models.common.config")

    reporter.count_calls(blocks.WanTransformerBlock)
    writer.write_event("loading")
    root = Path(job["package"])
    model = call_supported(
        engine.Wan2_2_TI2V,
        model_path=str(root),
        model_config=build_package_config(root, configs.ModelConfig),
        quantize=job.get("quantize"),
        prompt_embed_disk_cache=False,
    )
    writer.write_event(
        "loaded", bits=model.bits, engine=importlib.metadata.version("mlx-gen"), mlx=importlib.metadata.version("mlx")
    )

    def report_progress(event: Any) -> None:
        writer.write_event("progress", phase=event.phase, step=event.step, steps=event.total_steps)

    wanted = {name: job[name] for name in ("guidance", "guidance_2", "negative_prompt") if job.get(name) is not None}
    video = call_supported(
        model.generate_video,
        seed=job["seed"],
        prompt=job["prompt"],
        width=job["width"],
        height=job["height"],
        num_frames=job["frames"],
        fps=job["fps"],
        num_inference_steps=job["steps"],
        progress_callback=report_progress,
        release_inactive_denoiser=True,
        release_denoisers_before_decode=True,
        clear_cache_each_step=True,
        clear_cache_each_transformer_block=True,
        **wanted,
    )
    writer.write_event("progress", phase="save", step=job["steps"], steps=job["steps"])
    return save_clip(video, job, mx)


def save_clip(video: Any, job: dict[str, Any], mx: Any) -> dict[str, Any]:
    """Write clip and thumbnail to the folder `out` of the job, and return the fields of the `done` event.

    The fields are `width` and `height` in pixels, `frames`, `fps`, `files` (names in `out`), `seed`, `steps`, and
    `mlx_peak` in bytes. Width and height are those of the clip, because the engine rounds the sizes of the job without
    an error. Raise `ValueError` if the clip has no frames. Errors of the engine propagate.
    """
    out = Path(job["out"])
    part = out / "part.mp4"
    call_supported(video.save, path=part, overwrite=True, validate_health=True)
    facts = inspect_clip(part, out / "thumbnail.webp")
    part.replace(out / "video.mp4")
    files = ["video.mp4"] + ["thumbnail.webp"] * (out / "thumbnail.webp").exists()
    return {**facts, "files": files, "seed": job["seed"], "steps": job["steps"], "mlx_peak": mx.get_peak_memory()}


def inspect_clip(clip: Path, thumbnail: Path) -> dict[str, Any]:
    """Decode the whole clip, and save its first frame as `thumbnail`.

    Return the clip's `width` and `height` in pixels, its number of `frames`, and `fps`. Raise `ValueError` if the clip
    has no frames. The engine itself checks for black frames.
    """
    av: Any = importlib.import_module("av")
    with av.open(str(clip)) as opened:
        stream = opened.streams.video[0]
        rate, frames = float(stream.average_rate), 0
        for frame in opened.decode(stream):
            if frames == 0:
                frame.to_image().save(thumbnail)
            frames += 1
        if not frames:
            raise ValueError("the clip has no frames")
        return {"width": stream.width, "height": stream.height, "frames": frames, "fps": rate}


def classify_error(error: BaseException, *, began: bool) -> str:
    """Return the code of a failure: `output_invalid`, `disk_full`, `generation_failed` or `model_invalid`.

    `began` is whether a transformer block was computed. After that, and for a `ValueError` or an error of the GPU (lack
    of memory, or work that macOS has ended), the code is `generation_failed`. All other errors count as a broken
    package, `model_invalid`.
    """
    if type(error).__name__ in ("VideoHealthError", "TensorHealthError"):
        return "output_invalid"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full"
    of_device = isinstance(error, RuntimeError) and str(error).lower().startswith("[metal")
    return "generation_failed" if began or of_device or isinstance(error, ValueError) else "model_invalid"


def main() -> int:
    """Generate the clip of the job on stdin. Return the exit code: 0, `EXIT_NO_JOB` or `EXIT_FAILED`."""
    writer = EventWriter(redirect_stdout())
    try:
        job = read_job()
    except ValueError:
        job = None
    if job is None:
        return EXIT_NO_JOB
    threading.Thread(target=exit_at_end_of_stdin, daemon=True).start()
    reporter = ProgressReporter(writer)
    try:
        properties = make_clip(job, writer, reporter)
    except BaseException as error:
        code = classify_error(error, began=reporter.blocks > 0)
        writer.write_event(
            "failed", code=code, message=f"{type(error).__name__}: {error}"[:600], trace=traceback.format_exc()[-4000:]
        )
        return EXIT_FAILED
    writer.write_event("done", made=properties)
    return 0


if __name__ == "__main__":
    code = main()
    with contextlib.suppress(OSError):  # a full disk
        sys.stderr.flush()
    os._exit(code)
