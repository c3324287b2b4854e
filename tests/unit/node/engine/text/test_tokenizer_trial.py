"""The limits and results of a tokenizer's trial, with a script in place of the process that tokenizes."""

import json
import stat
import sys
from pathlib import Path

import pytest

from node.engine.text import tokenizer_trial
from node.engine.text.tokenizer_errors import TokenizerError
from node.engine.text.tokenizer_trial import FILE, MAX_RESULTS, TokenizerTrials
from wire.units import MIB

TAKEN = 64
"""MiB that `GREEDY` allocates, in addition to some MiB of Python."""
GREEDY = f"""#!{sys.executable} -SE
import time
taken = bytearray(b"x") * ({TAKEN} << 20)
time.sleep(600)
"""


class Process:
    """A script in place of the interpreter that runs trials, and the number of its runs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._script = folder / "script"
        self.arguments = folder / "arguments"
        monkeypatch.setattr(sys, "executable", str(self._script))

    @property
    def runs(self) -> list[str]:
        """The arguments of each run."""
        return self.arguments.read_text().splitlines() if self.arguments.exists() else []

    def write(self, content: str) -> None:
        self._script.write_text(content)
        self._script.chmod(0o700)

    def end_with(self, ending: str) -> None:
        """Make each run record its arguments and end with this command."""
        self.write(f'#!/bin/sh\necho "$@" >> {self.arguments}\n{ending}\n')


@pytest.fixture
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(tmp_path, monkeypatch)


def try_model(trials: TokenizerTrials, fingerprint: str = "f1", files: int = 0) -> str:
    """Return the reason why a model may not be used; empty without one."""
    try:
        trials.run(Path("/models/name"), fingerprint, files)
    except TokenizerError as error:
        return str(error)
    return ""


def test_a_trial_needs_768_mib_and_40_bytes_for_each_byte_of_the_files(tmp_path: Path) -> None:
    assert TokenizerTrials(None).compute_need_bytes("f1", 0) == 768 * MIB
    assert TokenizerTrials(tmp_path).compute_need_bytes("f1", 17 * MIB) == (768 + 40 * 17) * MIB
    assert TokenizerTrials(None, memory=5).compute_need_bytes("f1", 3) == 125


@pytest.mark.parametrize(
    ("memory", "files", "limit"),
    [(TAKEN - 4, 0, f"{TAKEN - 4}.0 MiB"), (TAKEN - 44, 1, f"{TAKEN - 4}.0 MiB"), (TAKEN + 40, 0, ""), (24, 2, "")],
)
def test_a_process_above_its_memory_limit_is_ended(
    process: Process, monkeypatch: pytest.MonkeyPatch, memory: int, files: int, limit: str
) -> None:
    monkeypatch.setattr(tokenizer_trial, "TIMEOUT_SECONDS", 20.0 if limit else 0.5)
    process.write(GREEDY)
    reason = try_model(TokenizerTrials(None, memory=memory * MIB), files=files * MIB)
    assert reason.startswith("name: its template or tokenizer ")
    if limit:
        assert f"(limit {limit}): it is not used" in reason
    else:
        assert reason.endswith("did not finish within 0 s: it is not used")


@pytest.mark.parametrize(
    ("ending", "reason"),
    [
        ("exit 0", ""),
        ("exit 3", ""),
        ("exit 4", "its tokenizer fails on prompts of 20 kB, for example because of its regular expression"),
        ("kill -PROF $$", "its template or tokenizer took more than 7 s for prompts of 20 kB"),
        ("kill -SEGV $$", "the trial of its template and tokenizer ended by SIGSEGV"),
        ("exit 1", "the trial of its template and tokenizer ended with exit code 1"),
        ("exit 2", "the trial of its template and tokenizer ended with exit code 2"),
    ],
)
def test_the_end_of_the_process_decides_and_is_known_afterwards(process: Process, ending: str, reason: str) -> None:
    process.end_with(ending)
    trials = TokenizerTrials(None, cpu=7)
    wanted = f"name: {reason}: it is not used" if reason else ""
    assert [try_model(trials), try_model(trials)] == [wanted, wanted]
    assert process.runs == ["-P -m node.engine.text.tokenizer_trial_main /models/name 7"], "it is tried once"
    assert trials.find_cause("f1") == wanted.removeprefix("name: ")
    assert (trials.find_cause("f2"), trials.compute_need_bytes("f1", 9)) == ("", 0)
    assert trials.compute_need_bytes("f2", 0) > 0
    assert try_model(trials, "f2") == wanted
    assert len(process.runs) == 2


def test_only_passed_trials_are_stored(process: Process, tmp_path: Path) -> None:
    folder = tmp_path / "state" / "trials"
    trials = TokenizerTrials(folder)
    process.end_with("exit 0")
    assert [try_model(trials, "f1"), try_model(trials, "f2")] == ["", ""]
    process.end_with("exit 4")
    assert try_model(trials, "f3")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [file.name for file in folder.iterdir()] == [FILE]
    assert json.loads((folder / FILE).read_text())["passed"] == ["f1", "f2"]
    process.end_with("exit 0")
    later = TokenizerTrials(folder)
    assert [later.compute_need_bytes(name, 0) > 0 for name in ("f1", "f2", "f3")] == [False, False, True]
    assert [try_model(later, name) for name in ("f1", "f2", "f3")] == ["", "", ""]
    assert len(process.runs) == 4, "a failed model is tried again after a restart"


def test_the_oldest_results_are_forgotten(process: Process, tmp_path: Path) -> None:
    process.end_with("exit 0")
    trials = TokenizerTrials(tmp_path)
    try_model(trials, "first")
    file = tmp_path / FILE
    stored = json.loads(file.read_text())
    file.write_text(json.dumps(stored | {"passed": [f"o{number}" for number in range(MAX_RESULTS - 1)]}))
    trials = TokenizerTrials(tmp_path)
    try_model(trials, "f1")
    assert trials.compute_need_bytes("o0", 0) == 0, "there is room for one more"
    try_model(trials, "f2")
    assert [trials.compute_need_bytes(name, 0) > 0 for name in ("o0", "o1", "f1", "f2")] == [True, False, False, False]


@pytest.mark.parametrize(
    "content", ["", "{}", "[]", '{"versions": 1, "passed": []}', '{"versions": "x", "passed": ["f1"]}']
)
def test_results_that_are_damaged_or_of_other_versions_do_not_count(
    process: Process, tmp_path: Path, content: str
) -> None:
    (tmp_path / FILE).write_text(content)
    trials = TokenizerTrials(tmp_path)
    assert trials.compute_need_bytes("f1", 0) > 0
    process.end_with("exit 0")
    assert try_model(trials) == ""
    assert json.loads((tmp_path / FILE).read_text())["passed"] == ["f1"], "the file is replaced"


def test_a_pass_that_cannot_be_stored_counts_until_the_restart(process: Process, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    trials = TokenizerTrials(tmp_path / "file")
    process.end_with("exit 0")
    assert [try_model(trials), try_model(trials)] == ["", ""]
    assert len(process.runs) == 1


def test_a_process_that_cannot_be_started_is_no_fault_of_the_model(process: Process) -> None:
    trials = TokenizerTrials(None)
    with pytest.raises(FileNotFoundError):
        try_model(trials)
    assert trials.find_cause("f1") == ""
    process.end_with("exit 0")
    assert try_model(trials) == ""
