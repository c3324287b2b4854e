"""Build the environment variables of an engine process.

On Linux, malloc is set to return free memory at once. By default, the footprint of an idle engine stays up to 50 MB too
high, and the gate refuses requests that would fit. On Linux, OpenBLAS also replaces the reference BLAS of MLX, which is
26 times slower in fp32. Temporary files, such as kernels that MLX compiles, are stored in a folder of the node.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from host.private_files import create_private_folder
from node.hub.digests import STORE_NAME

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Environment variables that make malloc of glibc return free memory at once."""
PROFILES = "MACPOOL_PROFILES"
"""Environment variable with the folder of the engine's measurements.

These are memory profiles, durations of loads, trials of tokenizers and times of last use.
"""
DIGESTS = "MACPOOL_DIGESTS"
"""Environment variable with the file in which digests of model files are stored."""
DISK_CACHE = "MACPOOL_DISK_CACHE"
"""Environment variable with the folder of the disk cache."""
OPENBLAS = (
    "/usr/lib/x86_64-linux-gnu/libopenblas.so.0",
    "/usr/lib/aarch64-linux-gnu/libopenblas.so.0",
    "/usr/lib64/libopenblas.so.0",
    "/usr/lib/libopenblas.so.0",
)
"""Paths of OpenBLAS in Linux distributions."""


def build_engine_environment(inherited: Mapping[str, str], scratch: Path, blas: str) -> dict[str, str]:
    """Return the environment variables of an engine process, based on `inherited`.

    `scratch` is the folder for temporary files, which is created. Profiles, digests and the disk cache are stored next
    to it. `blas` is the value of `engine.mlx.blas`; on Linux, "auto" loads OpenBLAS if installed. Raise `OSError` if
    the folder cannot be created.
    """
    environment = {**inherited, "TMPDIR": str(create_private_folder(scratch)), "HF_HUB_OFFLINE": "1"}
    environment[PROFILES] = str(scratch.parent / "profiles")
    environment[DISK_CACHE] = str(scratch.parent / "prefix-cache")
    environment[DIGESTS] = str(scratch.parent / STORE_NAME)
    environment |= {"TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if not sys.platform.startswith("linux"):
        return environment
    environment |= MALLOC
    library = find_openblas() if blas == "auto" else None
    if library is not None:
        environment["LD_PRELOAD"] = " ".join(filter(None, [inherited.get("LD_PRELOAD"), library]))
    return environment


def find_openblas() -> str | None:
    """Return the first path in `OPENBLAS` that exists: an installed OpenBLAS library. Return None if none exists."""
    return next((path for path in OPENBLAS if os.path.exists(path)), None)
