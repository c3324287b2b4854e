"""Tiny models for the tests: made here on first use, kept in .cache/models, never downloaded.

The trained llama is the model that the package brings. All other trained ones take half a minute of one core, where
OpenBLAS is installed, and far longer where it is not; whoever comes second waits for whoever came first.
"""

import ctypes.util
import fcntl
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.processes import ROOT, environment

EMBEDDED = ROOT / "node" / "models" / "macpool-tiny"
CACHE = ROOT / ".cache" / "models"


def path(arch: str, *, trained: bool = True, preset: str = "tiny") -> Path:
    """Give the folder of a model, made if it is not there yet.

    `arch` is one of architectures.ARCHITECTURES and `preset` one of its PRESETS; only tiny ones are trained.
    CalledProcessError, with what it wrote as a note, when making it fails.
    """
    if trained and preset != "tiny":
        raise ValueError(f"a {preset} model is not trained")
    if trained and arch == "llama":
        return EMBEDDED
    folder = CACHE / f"{arch}-{preset}-{'trained' if trained else 'random'}-{recipe()}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with _alone(folder.with_suffix(".lock")):
        if not folder.exists():
            _make(folder, ["--arch", arch, "--preset", preset, *([] if trained else ["--random"])])
    return folder


def answers(folder: Path = EMBEDDED) -> list[dict[str, str]]:
    """Give what a trained model answers verbatim: prompt and answer, and perhaps system and reasoning."""
    return json.loads((folder / "answers.json").read_text())


def recipe() -> str:
    """Give a short hash of everything that a model is made from."""
    files = (file for file in Path(__file__).parent.iterdir() if file.suffix in (".py", ".jinja"))
    contents = (file.name.encode() + b"\0" + file.read_bytes() for file in sorted(files) if file.name != "__init__.py")
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:12]


def fast_blas() -> dict[str, str]:
    """Give the environment that lets OpenBLAS, if it is there, stand in for the slow BLAS in MLX's Linux wheel."""
    found = ctypes.util.find_library("openblas") if sys.platform == "linux" else None
    return {"LD_PRELOAD": found, "OPENBLAS_NUM_THREADS": "1"} if found else {}


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make(folder: Path, options: list[str]) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE, prefix="making-", ignore_cleanup_errors=True) as making:
        command = [sys.executable, "-m", "tests.models.make", making, *options]
        done = subprocess.run(command, cwd=ROOT, env=environment(**fast_blas()), capture_output=True, text=True)
        try:
            done.check_returncode()
        except subprocess.CalledProcessError as failed:
            failed.add_note(done.stdout + done.stderr)
            raise
        Path(making).chmod(0o755)
        os.rename(making, folder)
