"""Build the Python environment of the video worker: installed once, locked by hash, and never changed.

The environment is a folder with an interpreter and exactly the packages that a lock file names, each with its hash. The
folder's name has the version of Python and the sha256 of its locks. For a new lock, a new environment is built next to
the old one. The environment is built in a temporary folder, tested by importing the engine in isolation, and only then
renamed. A folder with the final name is therefore complete.

    macOS on Apple silicon    the product
    Linux on x86-64           tests and development: the engine's text encoder runs on a build of torch for the CPU,
                              which comes from the indexes of pip's own configuration. If these have only builds
                              with gigabytes of CUDA, the installation ends with an error

The installer is uv if it is available (on PATH, or as a module of this interpreter), or else pip. Both require every
hash. With `--wheelhouse FOLDER`, all packages are installed from that folder without the network.

`cluster video install` runs this module as `python -m node.video.environment --folder FOLDER`.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from host.private_files import create_private_folder, write_private

HERE = Path(__file__).parent
LOCKS = {("Darwin", "arm64"): "macos-arm64", ("Linux", "x86_64"): "linux-x86_64"}
"""Name of the lock file `<name>.lock` by platform.

A file `<name>.torch` next to it lists packages from an index that only pip knows.
"""
ENGINE = "mlx-gen"
"""Name of the package of the video engine."""
PROBE = "import mflux.models.wan.variants"
"""Python program, run in a new environment, that fails unless the engine can be imported."""
READY = "ready.json"
"""File in a complete environment, with the versions of its engine and of Python, and the names of its lock files."""
NO_TORCH = (
    "the package indexes have only builds of torch with gigabytes of CUDA; nothing was installed: add an index with a "
    "CPU build to pip's configuration (extra-index-url or find-links), or use a --wheelhouse that has one"
)
"""Message if the indexes have no suitable build of torch."""


class EnvironmentBuildError(Exception):
    """Raised when the environment of the video worker cannot be built. The text is a sentence for a person."""


def find_requirement_files() -> tuple[Path, ...]:
    """Return the requirement files of the video worker for this machine's platform.

    They are `<name>.lock`, and `<name>.torch` if it exists. Return an empty tuple for a platform on which `mlx-gen`
    does not run.
    """
    name = LOCKS.get((platform.system(), platform.machine()))
    files = (HERE / f"{name}.lock", HERE / f"{name}.torch") if name else ()
    return tuple(file for file in files if file.exists())


def get_environment_path(folder: Path, files: Sequence[Path]) -> Path:
    """Return the path below `folder` of the environment for these requirement files and this version of Python."""
    digest = hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()
    return folder / f"py{sys.version_info.major}.{sys.version_info.minor}-{digest[:20]}"


def read_engine_version(files: Sequence[Path]) -> str:
    """Return the version of `mlx-gen` that the requirement files name; empty if they do not name it."""
    matches = (re.search(rf"^{ENGINE}==([\w.]+)", file.read_text(), re.MULTILINE) for file in files)
    return next((match[1] for match in matches if match), "")


def get_interpreter(environment: Path) -> Path:
    """Return the path of the environment's Python."""
    return environment / "bin" / "python"


def describe_missing(folder: Path) -> str:
    """Return the reason why `folder` has no complete environment for this machine; empty if it has one."""
    files = find_requirement_files()
    if not files:
        return f"the video engine does not run on {platform.system()} {platform.machine()}"
    environment = get_environment_path(folder, files)
    if (environment / READY).exists() and get_interpreter(environment).exists():
        return ""
    return "the worker's environment is not installed: run `cluster video install` on this machine"


def install_environment(folder: Path, wheelhouse: Path | None = None) -> Path:
    """Build the environment below `folder` unless it exists, and return its path.

    `wheelhouse` is a folder with all packages; None downloads them. Raise `EnvironmentBuildError` or `OSError` if the
    environment cannot be built. A failed build leaves no files of the new environment.
    """
    files = find_requirement_files()
    if not files:
        raise EnvironmentBuildError(describe_missing(folder))
    environment = get_environment_path(folder, files)
    if not describe_missing(folder):
        return environment
    create_private_folder(folder)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=folder) as making:
        built = Path(making) / "environment"
        build_environment(built, files, wheelhouse, Path(making) / "wheels")
        _probe_import(built)
        facts = {
            "engine": read_engine_version(files),
            "python": platform.python_version(),
            "locks": [file.name for file in files],
        }
        write_private(built / READY, json.dumps(facts).encode())
        shutil.rmtree(environment, ignore_errors=True)
        built.rename(environment)
    return environment


def build_environment(built: Path, files: Sequence[Path], wheelhouse: Path | None, wheels: Path) -> None:
    """Create a virtual environment in `built` with the packages of the requirement `files`.

    `wheelhouse` is a folder with all packages; None downloads them, and stores builds of torch in the folder `wheels`.
    Raise `EnvironmentBuildError` if a command fails, and `OSError` if it cannot be started.
    """
    run_command([sys.executable, "-m", "venv", str(built)], "the environment could not be created")
    for torch in (file for file in files if file.suffix == ".torch" and wheelhouse is None):
        run_command(
            [
                *_build_pip_command(built),
                "download",
                "--quiet",
                "--no-deps",
                "--only-binary=:all:",
                "--require-hashes",
                "--dest",
                str(wheels),
                "--requirement",
                str(torch),
            ],
            NO_TORCH,
        )
    where = ["--find-links", str(wheelhouse or wheels)] if wheelhouse or wheels.exists() else []
    where += ["--no-index"] if wheelhouse else []
    uv = _find_uv_command()
    if uv:
        install = [*uv, "pip", "sync", "--quiet", "--python", str(get_interpreter(built)), "--require-hashes"]
        run_command([*install, *where, *map(str, files)], "the packages could not be installed")
    else:
        install = [
            *_build_pip_command(built),
            "install",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
            "--require-hashes",
            *where,
        ]
        run_command(
            [*install, *(word for file in files for word in ("--requirement", str(file)))],
            "the packages could not be installed",
        )


def _build_pip_command(built: Path) -> list[str]:
    return [str(get_interpreter(built)), "-m", "pip", "--disable-pip-version-check", "--no-input"]


def _find_uv_command() -> list[str]:
    """Return the command that starts uv; empty if uv is not available."""
    uv = shutil.which("uv")
    if uv:
        return [uv]
    return [sys.executable, "-m", "uv"] if importlib.util.find_spec("uv") else []


def _probe_import(built: Path) -> None:
    """Import the engine in the same way as the worker. Raise `EnvironmentBuildError` if that fails."""
    run_command(
        [str(get_interpreter(built)), "-I", "-c", PROBE], "the engine cannot be imported in its new environment"
    )


def run_command(command: Sequence[str], otherwise: str) -> None:
    """Run a command and wait for its end, without environment variables `MACPOOL_*`, `PYTHON*` and `VIRTUAL_*`.

    Raise `EnvironmentBuildError` with the text `otherwise` and the last lines of the output if the command fails,
    `OSError` if it cannot be started.
    """
    variables = {
        name: value for name, value in os.environ.items() if not name.startswith(("MACPOOL_", "PYTHON", "VIRTUAL_"))
    }
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        env=variables,
    )
    if done.returncode:
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        raise EnvironmentBuildError(f"{otherwise}: {' / '.join(lines[-3:])[:600]}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the environment of this machine unless it exists, and print its folder and engine version as JSON.

    Return the exit code: 0, or 1 after an error. Raise `SystemExit` for invalid arguments.
    """
    parser = argparse.ArgumentParser(prog="cluster video install", allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="folder of the environments")
    parser.add_argument("--wheelhouse", type=Path, help="install all packages from this folder, without the network")
    options = parser.parse_args(arguments)
    try:
        environment = install_environment(
            options.folder.absolute(), options.wheelhouse and options.wheelhouse.absolute()
        )
    except (EnvironmentBuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(
        json.dumps(
            {"schema": 1, "environment": str(environment), "engine": read_engine_version(find_requirement_files())}
        )
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
