import re
from pathlib import Path

import pytest

from node.video import environment

LOCKS = sorted(environment.HERE.glob("*.lock"))


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.name)
def test_every_lock_demands_hashes_and_names_no_host(lock: Path):
    text = lock.read_text()
    assert "://" not in text
    wanted = [part for part in re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE | re.IGNORECASE) if "==" in part]
    assert len(wanted) > 50
    assert [part.split()[0] for part in wanted if "--hash=sha256:" not in part] == []
    assert environment.read_engine_version([lock]) == "0.18.14", "newer engines hold eight bits as sixteen"
    assert re.search(r"^pillow==12\.", text, re.MULTILINE), "the engine imports a private name that 13 has not"
    assert not re.search(r"^(nvidia|cuda|triton)", text, re.MULTILINE)


def test_there_is_a_lock_for_each_system_and_torch_comes_without_cuda_on_linux():
    names = {lock.stem for lock in LOCKS}
    assert names == set(environment.LOCKS.values())
    text = (environment.HERE / "linux-x86_64.torch").read_text()
    assert re.fullmatch(r"torch==[\d.]+\+cpu --hash=sha256:[0-9a-f]{64}\n", text)
    assert not re.search(r"^torch==", (environment.HERE / "linux-x86_64.lock").read_text(), re.MULTILINE)
    assert re.search(r"^torch==[\d.]+ ", (environment.HERE / "macos-arm64.lock").read_text(), re.MULTILINE)


def test_an_environment_is_named_by_its_locks(tmp_path: Path):
    (tmp_path / "a").write_text("x==1 --hash=sha256:0")
    (tmp_path / "b").write_text("x==2 --hash=sha256:0")
    one, other = (environment.get_environment_path(tmp_path, [tmp_path / name]) for name in "ab")
    assert one.parent == other.parent == tmp_path
    assert one != other
    assert one == environment.get_environment_path(tmp_path, [tmp_path / "a"])


def test_what_is_not_probed_is_not_there(tmp_path: Path):
    assert "cluster video install" in environment.describe_missing(tmp_path)
    place = environment.get_environment_path(tmp_path, environment.find_requirement_files())
    interpreter = environment.get_interpreter(place)
    interpreter.parent.mkdir(parents=True)
    interpreter.touch()
    assert "cluster video install" in environment.describe_missing(tmp_path)
    (place / environment.READY).touch()
    assert environment.describe_missing(tmp_path) == ""


@pytest.mark.parametrize("system", [("Windows", "AMD64"), ("Darwin", "x86_64"), ("Linux", "riscv64")])
def test_an_unsupported_system_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: tuple[str, str]):
    monkeypatch.setattr("platform.system", lambda: system[0])
    monkeypatch.setattr("platform.machine", lambda: system[1])
    with pytest.raises(environment.EnvironmentBuildError, match="does not run on"):
        environment.install_environment(tmp_path)


def test_a_failed_build_leaves_nothing_and_its_error_has_the_last_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(environment, "PROBE", "raise ImportError('no such engine')")
    monkeypatch.setattr(
        environment,
        "build_environment",
        lambda built, *rest: environment.run_command(
            [environment.sys.executable, "-m", "venv", "--without-pip", str(built)], "no"
        ),
    )
    with pytest.raises(environment.EnvironmentBuildError, match=r"cannot be imported.*no such engine"):
        environment.install_environment(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_where_torch_is_only_to_be_had_with_cuda_nothing_is_pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """pip is asked only for the CPU build. It finds nothing where that build does not exist."""
    asked: list[list[str]] = []

    def run(command: list[str], otherwise: str) -> None:
        asked.append(command)
        if "download" in command:
            raise environment.EnvironmentBuildError(otherwise)

    monkeypatch.setattr(environment, "run_command", run)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    with pytest.raises(environment.EnvironmentBuildError, match="gigabytes of CUDA"):
        environment.install_environment(tmp_path)
    assert len(asked) == 2, "no package was installed before"
    assert "--no-deps" in asked[1]


@pytest.mark.parametrize("uv", ["/opt/bin/uv", None], ids=["uv", "pip"])
def test_with_a_wheelhouse_all_packages_come_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uv: str | None
):
    asked: list[list[str]] = []
    monkeypatch.setattr(environment, "run_command", lambda command, otherwise: asked.append(command))
    monkeypatch.setattr("shutil.which", lambda name: uv)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    locks = [tmp_path / "linux.lock", tmp_path / "linux.torch"]
    environment.build_environment(tmp_path / "built", locks, tmp_path / "wheelhouse", tmp_path / "wheels")
    created, install = asked
    assert "venv" in created
    assert install[0] == (uv or str(environment.get_interpreter(tmp_path / "built")))
    where = install.index("--find-links")
    assert install[where : where + 3] == ["--find-links", str(tmp_path / "wheelhouse"), "--no-index"]
    assert {"--require-hashes", *map(str, locks)} < set(install)


@pytest.mark.parametrize("name", ["MACPOOL_X", "PYTHONX", "VIRTUAL_X"])
def test_commands_run_without_the_variables_of_this_program(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(name, "1")
    monkeypatch.setenv("OTHER_X", "1")
    program = f"import os; raise SystemExit(str([one for one in ({name!r}, 'OTHER_X') if one in os.environ]))"
    with pytest.raises(environment.EnvironmentBuildError, match=r"names: \['OTHER_X'\]"):
        environment.run_command([environment.sys.executable, "-I", "-c", program], "names")


def test_an_environment_that_exists_is_not_built_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "describe_missing", lambda folder: "")
    monkeypatch.setattr(environment, "build_environment", lambda *_: pytest.fail("it was built"))
    assert environment.install_environment(tmp_path).parent == tmp_path
