"""Pulls that fail, as their user reads it: one sentence for each fault, and no token in any file."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from email.utils import formatdate
from pathlib import Path

import pytest

from tests.support.hub.hub import Answer, Faults, Hub, running_hub
from tests.support.hub.pull_lab import NODE_SETTINGS, PADDING, TINY
from tests.support.processes import Pool, environment, pool, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

TOKEN = "hf_secretsecretsecretsecret"
NAMES = ("one", "two")


class FaultyPulls:
    """A hub with a token, a coordinator and two nodes on loopback."""

    def __init__(self, hub: Hub, made: Pool) -> None:
        self.hub = hub
        self.pool = made

    def pull(self, repo: str, *words: str, code: int = 0) -> str:
        """Run `cluster pull`, check its exit code, and return all that its user reads."""
        done = self.pool.run("pull", repo, *words, "--state", str(self.pool.state))
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def list_caches(self, repo: str) -> list[Path]:
        """Return the folders of a repository that exist on the nodes."""
        name = f"models--{repo.replace('/', '--')}"
        return [found for node in NAMES if (found := self.pool.folder / f"{node}-huggingface" / "hub" / name).exists()]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyPulls]:
    folder = tmp_path_factory.mktemp("pulls")
    file = folder / "hub-token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    with ExitStack() as stack:
        hub = stack.enter_context(running_hub(TOKEN))
        made = stack.enter_context(pool(folder))
        made.up(f"hub.endpoint={hub.url}", f"hub.token_file={file}")
        for name in NAMES:
            env = environment(HF_HOME=str(folder / f"{name}-huggingface"))
            made.join(name, *NODE_SETTINGS, wait=False, env=env)
        until(lambda: all(made.serves(name) for name in NAMES), 60, "both serve")
        yield FaultyPulls(hub, made)


@pytest.fixture
def pulls(shared: FaultyPulls) -> Iterator[FaultyPulls]:
    yield shared
    shared.hub.faults.__dict__.update(Faults().__dict__)


def add(pulls: FaultyPulls, repo: str, size: int = 300_000, seed: bytes = b"x") -> dict[str, bytes]:
    files = {**TINY, PADDING: seed * size}
    pulls.hub.add(repo, files)
    return files


@pytest.mark.nightly
def test_a_gated_repository_is_refused(pulls: FaultyPulls) -> None:
    """CI has these tests:

    - `tests/contract/hub/test_query.py::test_refusals_are_one_sentence`
    - `tests/e2e/pulls/test_pull_faults.py::test_a_missing_repository_is_refused`
    """
    pulls.hub.faults.answers.append(Answer("tests/gated", 403, {"x-error-code": "GatedRepo"}, times=99))
    text = pulls.pull("tests/gated", code=4)
    assert "tests/gated is gated: accept its terms on its page with the account of the token" in text
    assert pulls.list_caches("tests/gated") == []


def test_a_missing_repository_is_refused(pulls: FaultyPulls) -> None:
    text = pulls.pull("tests/missing", code=5)
    assert "tests/missing does not exist, or the token may not read it: check the name" in text


@pytest.mark.nightly
def test_a_rate_limit_names_its_end(pulls: FaultyPulls) -> None:
    """CI has these tests:

    - `tests/contract/hub/test_query.py::test_refusals_are_one_sentence`
    - `tests/contract/hub/test_query.py::test_a_first_rate_limit_is_waited_for`
    """
    limit = {"retry-after": formatdate(time.time() + 3600, usegmt=True)}
    pulls.hub.faults.answers.append(Answer("tests/limited", 429, limit, times=99))
    text = pulls.pull("tests/limited", code=6)
    assert re.search(r"the hub limits the rate of requests for 3[56]\d\d s: try again after that time", text), text


@pytest.mark.nightly
def test_a_repository_with_code_is_refused(pulls: FaultyPulls) -> None:
    """CI has these tests:

    - `tests/contract/hub/test_query.py::test_a_model_that_cannot_be_served_is_named_with_its_cause`
    - `tests/contract/hub/test_query.py::test_supported_architectures_may_name_code_that_is_not_run`
    """
    config = b'{"model_type": "surprise", "auto_map": {"AutoModelForCausalLM": "modeling.Surprise"}}'
    pulls.hub.add("tests/code", {**TINY, "config.json": config, "modeling.py": b"raise SystemExit"})
    text = pulls.pull("tests/code", code=1)
    cause = "its architecture 'surprise' needs code from the repository (trust_remote_code), which is never run"
    assert f"tests/code cannot be served: {cause}" in text
    assert pulls.list_caches("tests/code") == []


@pytest.mark.nightly
def test_a_flipped_bit_at_the_hub_is_never_loaded(pulls: FaultyPulls) -> None:
    """CI has these tests:

    - `tests/contract/hub/test_downloader.py::test_a_flipped_bit_is_never_published`
    - `tests/unit/coordinator/models/test_pull_state.py::test_a_fault_of_the_repository_ends_the_pull_everywhere`
    - `tests/unit/coordinator/cli/commands/test_pulls.py`
    """
    add(pulls, "tests/flipped")
    pulls.hub.faults.flipped.add(PADDING)
    text = pulls.pull("tests/flipped", code=6)
    fault = rf"{PADDING} has the digest [0-9a-f]{{64}} instead of [0-9a-f]{{64}}, from every source"
    for name in NAMES:
        assert re.search(
            rf"{name}: failed: {fault}: the repository has changed or a source is damaged; pull again", text
        )
    assert re.search(r"tests/flipped is not on (one, two|two, one): see the messages above", text)
    assert "tests/flipped" not in {model["name"] for model in pulls.pool.get("/api/v1/models")["models"]}
    assert [list(folder.glob("snapshots/*")) for folder in pulls.list_caches("tests/flipped")] == [[], []]


@pytest.mark.nightly
def test_two_pulls_of_one_repository_are_one(pulls: FaultyPulls) -> None:
    """CI has these tests:

    - `tests/unit/coordinator/models/test_pull_controller.py::test_the_same_pull_is_not_started_twice`
    - `tests/contract/hub/test_file_orders.py::test_a_pull_continues_without_a_link_and_a_repeated_order_attaches`
    """
    files = add(pulls, "tests/twice")
    assert "tests/twice at" in pulls.pull("tests/twice", "--dry-run")
    queried = pulls.hub.sent_bytes
    pulls.hub.faults.chunk_seconds = 0.05
    with ThreadPoolExecutor(2) as threads:
        texts = list(threads.map(lambda _: pulls.pull("tests/twice"), range(2)))
    assert [text.count(": completed, ") for text in texts] == [2, 2]
    size = sum(map(len, files.values()))
    assert pulls.hub.sent_bytes - queried < 2 * size, "the files came once"


@pytest.mark.nightly
def test_another_commit_waits_for_the_pull_in_progress(pulls: FaultyPulls) -> None:
    """CI has these tests:

    - `tests/contract/hub/test_file_orders.py::test_a_second_commit_of_a_repository_waits_for_the_first`
    - `tests/unit/coordinator/models/test_pull_controller.py::test_the_same_pull_is_not_started_twice`
    """
    repo = "tests/changed"
    add(pulls, repo, 2_000_000, b"1")
    pulls.hub.faults.chunk_seconds = 1.0
    pulls.pull(repo, "--detach")
    until(lambda: pulls.list_caches(repo), 30, "the first pull writes")
    files = add(pulls, repo, 2_000_000, b"2")
    cause = f"this node pulls {repo} at commit "
    with ThreadPoolExecutor(1) as threads:
        second = threads.submit(pulls.pull, repo)
        until(lambda: cause in str(pulls.pool.get("/api/v1/pulls")), 60, "the second pull waits")
        pulls.hub.faults.chunk_seconds = 0.0
        text = second.result()
    assert cause in text
    assert text.count(": completed, ") == 2
    for folder in pulls.list_caches(repo):
        commit = (folder / "refs" / "main").read_text()
        assert (folder / "snapshots" / commit / PADDING).read_bytes() == files[PADDING]


def test_no_token_reaches_a_file_or_a_command_line(pulls: FaultyPulls) -> None:
    repo = "tests/private"
    add(pulls, repo, 3_000_000)
    pulls.hub.faults.chunk_seconds = 0.1
    pulls.pull(repo, "--detach")
    lines = until(lambda: _list_command_lines(pulls, "node.hub.serving.mirror"), 30, "the mirror runs")
    pulls.hub.faults.chunk_seconds = 0.0
    pulls.pull(repo)
    texts = [path.read_text(errors="replace") for path in _list_written(pulls.pool.folder)]
    assert any(repo in text for text in texts), "the logs of the pull are among these files"
    for text in (*texts, *lines):
        assert TOKEN not in text
        assert re.findall(r"(?<![\w-])[\w-]{43}(?![\w-])", text) == [], "tokens of mirrors have 43 characters"


def _list_command_lines(pulls: FaultyPulls, module: str) -> list[str]:
    """Return the command lines and environments of the nodes' children that run a module."""
    found = list[str]()
    for name in NAMES:
        for child in pulls.pool.nodes[name].children():
            folder = Path(f"/proc/{child.pid}")
            line = (folder / "cmdline").read_text().replace("\0", " ") if folder.exists() else ""
            found += [line, (folder / "environ").read_text().replace("\0", " ")] if module in line else []
    return found


def _list_written(folder: Path) -> list[Path]:
    """Return the logs and the records of pulls of all processes."""
    return [*folder.rglob("*.log"), *folder.rglob("*.err"), *folder.rglob("pull-*.json")]
