"""The environment that an engine process is started in.

On Linux: malloc gives memory back as soon as it is free (by default a resting engine's footprint stays up to 50 MB too
high, and the gate would refuse what fits), and OpenBLAS takes the place of the reference BLAS that MLX bundles, 26
times slower in fp32. Kernels that MLX compiles lie in a folder of the node's own.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from host.private_files import private_folder

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
PROFILES = "MACPOOL_PROFILES"
"""The variable that says in which folder profiles are kept."""
OPENBLAS = (
    "/usr/lib/x86_64-linux-gnu/libopenblas.so.0", "/usr/lib/aarch64-linux-gnu/libopenblas.so.0",
    "/usr/lib64/libopenblas.so.0", "/usr/lib/libopenblas.so.0",
)  # fmt: skip
"""Where distributions keep it."""


def engine_environment(inherited: Mapping[str, str], scratch: Path, blas: str) -> dict[str, str]:
    """Give the environment of an engine whose temporary files lie in `scratch`; `blas` is engine.mlx.blas."""
    environment = {**inherited, "TMPDIR": str(private_folder(scratch)), "HF_HUB_OFFLINE": "1"}
    environment[PROFILES] = str(scratch.parent / "profiles")
    environment |= {"TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not sys.platform.startswith("linux"):
        return environment
    environment |= MALLOC
    library = openblas() if blas == "auto" else None
    if library is not None:
        environment["LD_PRELOAD"] = " ".join(filter(None, [inherited.get("LD_PRELOAD"), library]))
    return environment


def openblas() -> str | None:
    """Find OpenBLAS; None where it is not installed."""
    return next((path for path in OPENBLAS if os.path.exists(path)), None)
