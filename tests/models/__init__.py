"""Tiny models for the tests, never downloaded.

Trained models are kept in the repository: the llama is the model in the package, the rest are in `trained/` and are
made by `make models`. Random models are made at their first use and kept in .cache/models. Those with the preset `tiny`
are made by one process, because its imports take three quarters of the time of a model.
"""

import ctypes.util
import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.models.architectures import ARCHITECTURES
from tests.support.processes import ROOT, environment

EMBEDDED = ROOT / "node" / "models" / "macpool-tiny"
STORED = Path(__file__).parent / "trained"
TRAINED = ("qwen3_next", "gemma3_text", "qwen3", "lfm2")
"""The architectures in `trained/`, the one with the longest training first."""
CACHE = ROOT / ".cache" / "models"


def path(arch: str, *, trained: bool = True, preset: str = "tiny") -> Path:
    """Return the folder of a model; make a random model that does not exist yet.

    `arch` is one of architectures.ARCHITECTURES and `preset` one of its PRESETS. Raise ValueError if the repository has
    no such trained model, and CalledProcessError, with the output as a note, if making the model fails.
    """
    if trained:
        if preset != "tiny" or arch not in ("llama", *TRAINED):
            raise ValueError(f"there is no trained {preset} model of {arch}")
        return EMBEDDED if arch == "llama" else STORED / arch
    digest = recipe()
    made_together = ARCHITECTURES if preset == "tiny" else (arch,)
    folders = {one: CACHE / f"{one}-{preset}-random-{digest}" for one in made_together}
    CACHE.mkdir(parents=True, exist_ok=True)
    with _alone(CACHE / f"{made_together[0]}-{preset}-random-{digest}.lock"):
        missing = {one: folder for one, folder in folders.items() if not folder.exists()}
        if arch in missing:
            _make(missing, ["--preset", preset, "--random"])
    return folders[arch]


def train(arch: str) -> None:
    """Train a model for a minute or two and replace the stored one."""
    with tempfile.TemporaryDirectory() as making:
        _make({arch: Path(making) / arch}, [])
        shutil.rmtree(STORED / arch, ignore_errors=True)
        shutil.copytree(Path(making) / arch, STORED / arch)


def answers(folder: Path = EMBEDDED) -> list[dict[str, str]]:
    """Return the prompts that a trained model answers verbatim, with their answers and optional system and reasoning
    texts."""
    return json.loads((folder / "answers.json").read_text())


def recipe() -> str:
    """Return a short hash of everything that a model is made from."""
    files = (file for file in Path(__file__).parent.iterdir() if file.suffix in (".py", ".jinja"))
    contents = (file.name.encode() + b"\0" + file.read_bytes() for file in sorted(files) if file.name != "__init__.py")
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:12]


def fast_blas() -> dict[str, str]:
    """Return the environment that lets OpenBLAS, where it is installed, replace the slow BLAS in MLX's Linux wheel."""
    found = ctypes.util.find_library("openblas") if sys.platform == "linux" else None
    return {"LD_PRELOAD": found, "OPENBLAS_NUM_THREADS": "1"} if found else {}


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folders: dict[str, Path], options: list[str]) -> None:
    """Make the models of these architectures in one process, and move each one to its folder."""
    place = next(iter(folders.values())).parent
    with tempfile.TemporaryDirectory(dir=place, prefix="making-") as making:
        command = [sys.executable, "-m", "tests.models.make", making, *options, "--each", *folders]
        done = subprocess.run(command, cwd=ROOT, env=environment(**fast_blas()), capture_output=True, text=True)
        try:
            done.check_returncode()
        except subprocess.CalledProcessError as failed:
            failed.add_note(done.stdout + done.stderr)
            raise
        for arch, folder in folders.items():
            os.rename(Path(making) / arch, folder)
