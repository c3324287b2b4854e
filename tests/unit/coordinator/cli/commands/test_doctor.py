"""Output and exit codes of `cluster doctor`, for findings that a test sets."""

import json
import tarfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from coordinator.cli import cluster
from coordinator.client.errors import BLOCKED
from coordinator.doctor import bundle, host_probe, runner
from coordinator.doctor.finding import LOCAL_NETWORK, Finding, fail, not_here, ok, warn
from coordinator.doctor.host_probe import HostProbe
from coordinator.doctor.runner import CHECKS, Check, CheckResult

OK, WARNED, FAILED, ABSENT = ok("16 GiB", ram=16), warn("low", "free some"), fail("off", "start it"), not_here("no Mac")


class Doctor:
    """The command with fixed findings, of which the first has the id `first`."""

    def __init__(self) -> None:
        self.findings: tuple[Finding, ...] = ()
        self.first = "first"
        self.timeouts: list[float] = []

    def run_checks(self, here: HostProbe) -> Iterator[CheckResult]:
        self.timeouts.append(here.timeout_seconds)
        for number, finding in enumerate(self.findings):
            name = f"check-{number}" if number else self.first
            yield CheckResult(Check(name, f"Check {number}", lambda _, found=finding: found), finding, 0.25)

    def run(self, *findings: Finding, words: tuple[str, ...] = ()) -> Result:
        self.findings = findings
        return CliRunner().invoke(cluster, ["doctor", *words])


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Doctor:
    made = Doctor()
    monkeypatch.setattr(runner, "run_checks", made.run_checks)
    monkeypatch.setenv("MACPOOL_STATE", str(tmp_path / "state"))
    return made


def test_findings_are_printed_with_their_next_step_and_counted(doctor: Doctor):
    done = doctor.run(OK, WARNED, FAILED, ABSENT)
    lines = [
        "ok       first          16 GiB",
        "warn     check-1        low",
        f"{'':23} → free some",
        "fail     check-2        off",
        f"{'':23} → start it",
    ]
    counts = "1 failed, 1 warnings, 1 ok, 1 that do not apply here"
    assert done.stdout.splitlines() == [*lines, f"{counts} (--all prints them)"]
    done = doctor.run(OK, WARNED, FAILED, ABSENT, words=("--all",))
    assert done.stdout.splitlines() == [*lines, "not here check-3        no Mac", counts]


@pytest.mark.parametrize("words", [("--json",), ("-o", "json")])
def test_findings_are_one_object_of_json(doctor: Doctor, words: tuple[str, ...]):
    done = doctor.run(OK, ABSENT, ABSENT, WARNED, words=words)
    answer = json.loads(done.stdout)
    assert answer["checks"][0] == {
        "id": "first",
        "title": "Check 0",
        "result": "ok",
        "text": "16 GiB",
        "fix": "",
        "numbers": {"ram": 16},
        "seconds": 0.25,
    }
    assert [check["result"] for check in answer["checks"]] == ["ok", "not here", "not here", "warn"]
    assert answer["counts"] == {"ok": 1, "warn": 1, "fail": 0, "not here": 2}
    assert (answer["schema"], answer["exit"], answer["bundle"]) == (1, 0, None)


@pytest.mark.parametrize(
    ("findings", "words", "code"),
    [
        ((OK,), (), 0),
        ((OK, WARNED), (), 0),
        ((OK, WARNED), ("--strict",), 1),
        ((OK, ABSENT), ("--strict",), 0),
        ((WARNED, FAILED), ("--strict",), 6),
        ((Finding("fail", "another answers", intercepted=True),), (), 9),
    ],
)
def test_the_exit_code_is_that_of_the_worst_finding(
    doctor: Doctor, findings: tuple[Finding, ...], words: tuple[str, ...], code: int
):
    assert doctor.run(*findings, words=words).exit_code == code


def test_a_blocked_local_network_has_its_own_exit_code(doctor: Doctor):
    doctor.first = LOCAL_NETWORK
    assert doctor.run(FAILED, FAILED).exit_code == BLOCKED


def test_the_time_limit_reaches_the_checks(doctor: Doctor):
    doctor.run(OK)
    doctor.run(OK, words=("--seconds", "60"))
    assert doctor.timeouts == [4.5, 60.0]


def test_checks_are_listed_without_running_them(doctor: Doctor):
    lines = doctor.run(words=("--list",)).stdout.splitlines()
    assert lines == [f"{check.id:<14} {check.title}" for check in CHECKS]
    listed = json.loads(doctor.run(words=("--list", "--json")).stdout)
    assert listed == {"schema": 1, "checks": [{"id": check.id, "title": check.title} for check in CHECKS]}
    assert doctor.timeouts == []


def test_the_file_of_a_bundle_is_named_or_the_error_that_prevented_it(
    doctor: Doctor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(host_probe, "HostProbe", partial(HostProbe, run=lambda *_: None))
    monkeypatch.setattr("sys.executable", str(tmp_path / "none"))
    file = tmp_path / "report.tar.gz"
    done = doctor.run(OK, words=("--bundle", str(file)))
    assert done.stdout.splitlines()[-1] == f"the bundle is in {file}: review it before you send it"
    with tarfile.open(file) as archive:
        settings = archive.extractfile("macpool-doctor/settings.json")
        assert settings is not None
        assert json.load(settings)["problem"].startswith("the node's settings cannot be read: ")
    done = doctor.run(OK, words=("--bundle", str(file), "--json"))
    assert json.loads(done.stdout)["bundle"] == str(file)

    def fail_to_write(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(bundle, "write_bundle", fail_to_write)
    done = doctor.run(OK, words=("--bundle", str(file)))
    assert (done.exit_code, f"{file} cannot be written: No space left on device" in done.stderr) == (1, True)
