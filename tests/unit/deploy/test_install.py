"""The scripts, the formula and the examples of deploy/: their effects, and their acceptance by the programs that read
them."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.service import launchd
from deploy.formula import main, render_formula
from docs.generate import PAGES
from router.settings import RouterSettings
from wire.units import MIB

DEPLOY = Path(__file__).parents[3] / "deploy"
SCRIPTS = sorted(DEPLOY.glob("*.sh"))
SHELLS = [name for name in ("dash", "sh", "bash") if shutil.which(name)]
ANSWERS = {
    "id": "501",
    "uname": "Darwin",
    "sysctl": "1",
    "sw_vers": "15.5",
    "uv": "",
    "cluster": "",
    "sudo": "",
}


def run(
    script: str, home: Path, *arguments: str, typed: str = "", **answers: str | None
) -> subprocess.CompletedProcess[str]:
    """Run a script with these answers of the system's tools; None: the tool is missing. The tools record their
    calls."""
    folder = home / "bin"
    folder.mkdir(exist_ok=True)
    for name, answer in {**ANSWERS, **answers}.items():
        (folder / name).unlink(missing_ok=True)
        if answer is not None:
            (folder / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "{home}/calls"\necho "{answer}"\n')
            (folder / name).chmod(0o755)
    for name in ("sh", "cat", "cut", "dirname", "rm"):
        if not (folder / name).exists():
            (folder / name).symlink_to(shutil.which(name) or name)
    shell = shutil.which(SHELLS[0]) or "/bin/sh"
    return subprocess.run(
        [shell, str(DEPLOY / script), *arguments],
        input=typed,
        capture_output=True,
        text=True,
        env={"PATH": str(folder), "HOME": str(home)},
        timeout=20,
    )


def called(home: Path, tool: str) -> list[str]:
    lines = (home / "calls").read_text().splitlines() if (home / "calls").exists() else []
    return [line for line in lines if line.startswith(f"{tool} ")]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda one: one.name)
@pytest.mark.parametrize("shell", SHELLS)
def test_every_shell_can_read_the_scripts(script: Path, shell: str):
    assert subprocess.run([shell, "-n", script]).returncode == 0
    assert script.read_text().startswith("#!/bin/sh\n")
    assert "\nset -eu\n" in script.read_text()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda one: one.name)
def test_the_scripts_keep_to_the_shell_that_every_system_has(script: Path):
    beside = Path(sys.executable).parent / "shellcheck"
    tool = str(beside) if beside.exists() else shutil.which("shellcheck")
    if tool is not None:
        done = subprocess.run([tool, "--shell=sh", script], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout
    text = script.read_text()
    assert re.findall(r"\[\[|\bfunction \w|\blocal \w|<<<|\$'|=~|curl .*\| *(?:ba)?sh|\beval\b", text) == []


def test_install_calls_only_uv(tmp_path: Path):
    done = run("install.sh", tmp_path, "--from", "./macpool", "--video")
    assert done.returncode == 0, done.stderr
    assert called(tmp_path, "uv") == [
        "uv tool install --force --managed-python --python 3.12 ./macpool[node,video]",
        "uv tool update-shell",
    ]
    assert called(tmp_path, "sudo") == []
    assert "cluster doctor" in done.stdout


def test_a_dry_run_only_prints(tmp_path: Path):
    done = run("install.sh", tmp_path, "--dry-run", "--coordinator-only", uname="Linux")
    assert f"uv tool install --force --managed-python --python 3.12 {DEPLOY.parent}\n" in done.stdout
    assert called(tmp_path, "uv") == []


def test_a_script_outside_the_repository_installs_nothing_by_a_name(tmp_path: Path):
    alone = tmp_path / "elsewhere" / "install.sh"
    alone.parent.mkdir()
    shutil.copy(DEPLOY / "install.sh", alone)
    done = run(str(alone), tmp_path)
    assert (done.returncode, "--from" in done.stderr) == (2, True), done.stderr
    assert called(tmp_path, "uv") == []


@pytest.mark.parametrize(
    ("arguments", "answers", "code", "says"),
    [
        ([], {"id": "0"}, 6, "without sudo"),
        ([], {"uv": None}, 5, "uv is not installed"),
        ([], {"sw_vers": "13.6.1"}, 1, "macOS 14 or newer"),
        ([], {"sysctl": "0"}, 1, "Apple silicon"),
        ([], {"uname": "FreeBSD"}, 1, "macOS and Linux"),
        (["--python", "3.9"], {}, 2, "3.11 to 3.14"),
        (["--no-such"], {}, 2, "unknown option"),
        (["--from"], {}, 2, "needs a value"),
        (["--from", "macpool"], {}, 2, "write ./macpool"),
    ],
)
def test_where_it_cannot_be_installed(tmp_path: Path, arguments: list[str], answers: dict, code: int, says: str):
    done = run("install.sh", tmp_path, *arguments, **answers)
    assert (done.returncode, says in done.stderr) == (code, True), done.stderr
    assert called(tmp_path, "uv") == []


def test_uninstall_leaves_the_data(tmp_path: Path):
    state = tmp_path / "state"
    (state / "node").mkdir(parents=True)
    done = run("uninstall.sh", tmp_path, "--state", str(state))
    assert done.returncode == 0, done.stderr
    assert called(tmp_path, "uv") == ["uv tool uninstall macpool"]
    assert done.stdout.endswith(f"kept: {state}\n")
    assert state.exists()


@pytest.mark.parametrize(("typed", "left"), [("yes\n", False), ("no\n", True), ("", True), ("y\n", True)])
def test_purge_asks_for_confirmation(tmp_path: Path, typed: str, left: bool):
    state = tmp_path / "state of mine"
    state.mkdir()
    (state / "cluster.db").touch()
    done = run("uninstall.sh", tmp_path, "--state", str(state), "--purge", typed=typed)
    assert state.exists() is left
    assert (done.returncode == 0) is not left


@pytest.mark.parametrize("state", ["/", "relative", "HOME", "empty"])
def test_purge_removes_nothing_that_is_no_state_folder(tmp_path: Path, state: str):
    (tmp_path / "mine").write_text("x")
    folder = {"HOME": str(tmp_path), "empty": str(tmp_path / "other")}.get(state, state)
    (tmp_path / "other").mkdir()
    done = run("uninstall.sh", tmp_path, "--state", folder, "--purge", typed="yes\n")
    assert done.returncode in (2, 5), done.stderr
    assert (tmp_path / "mine").exists()
    assert (tmp_path / "other").exists()


# formula and examples


def test_the_formula_is_one_that_ruby_could_read():
    text = render_formula("1.2.3", "https://example.org/macpool/macpool/archive/v1.2.3.tar.gz", "0" * 64)
    ruby = shutil.which("ruby")
    if ruby is not None:
        assert subprocess.run([ruby, "-c"], input=text, text=True, capture_output=True).returncode == 0
    opened = len(re.findall(r"^\s*(?:class|def|test do)\b", text, re.MULTILINE))
    assert opened == len(re.findall(r"^\s*end$", text, re.MULTILINE))
    for stanza in ("desc", "homepage", "url", "version", "sha256", "license"):
        assert len(re.findall(rf'^  {stanza} "[^"]+"$', text, re.MULTILINE)) == 1
    assert "{{" not in text
    assert len(re.findall(r"#\{\w+\}", text)) == 5
    assert 'homepage "https://example.org/macpool/macpool"' in text
    needs = re.findall(r"^  depends_on (.*)$", text, re.MULTILINE)
    assert needs == ['"uv"', "arch: :arm64", "macos: :sonoma"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("1.2", "https://x.org/a/b/c.tar.gz", "0" * 64),
        ("1.2.3", "http://x.org/a/b/c.tar.gz", "0" * 64),
        ("1.2.3", 'https://x.org/a"/b.tar.gz', "0" * 64),
        ("1.2.3", "https://x.org/a/b/c.tar.gz", "0" * 63),
        ("1.2.3",),
    ],
)
def test_a_formula_of_nonsense_is_refused(arguments: tuple[str, ...]):
    assert main(arguments) == 2


@pytest.mark.parametrize(
    "file", sorted(DEPLOY.glob("launchd/**/*.plist")), ids=lambda one: str(one.relative_to(DEPLOY))
)
def test_the_examples_for_launchd_have_no_fault(file: Path):
    assert launchd.find_faults(file.read_bytes()) == []
    assert f"../deploy/{file.relative_to(DEPLOY)}" in PAGES, "it is written by the code that installs"


def test_the_public_proxy_passes_streams_and_blocks_other_paths():
    text = (DEPLOY / "caddy" / "Caddyfile").read_text()
    plain = re.sub(r"#.*", "", text)
    assert plain.count("{") == plain.count("}") > 3
    assert re.search(r"reverse_proxy 127\.0\.0\.1:8080 \{", plain)
    assert re.search(r"^\t\tflush_interval -1$", plain, re.MULTILINE)
    size = re.search(r"max_size (\d+)MiB", plain)
    assert size
    assert int(size[1]) * MIB == RouterSettings().max_body_bytes
    closed = re.search(r"@closed path (.*)", plain)
    assert closed
    assert closed[1].split() == ["/metrics", "/prometheus/*", "/api/v1/*"]
    assert "http.allowed_hosts=pool.example.org" in text


def test_what_compose_mounts_is_there():
    text = (DEPLOY / "docker-compose.yml").read_text()
    mounted = re.findall(r"- (\.\.?/[\w./-]+):", text)
    assert len(mounted) >= 6
    assert [one for one in mounted if not (DEPLOY / one).exists()] == ["./secrets/prometheus"]
    assert set(re.findall(r'ports: \["([\d.]+):', text)) == {"127.0.0.1"}
