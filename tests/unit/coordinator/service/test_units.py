"""The units: their content, their acceptance by the service managers, and no splitting or expansion of values."""

import plistlib
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.service import launchd, systemd
from coordinator.service.plan import ServicePlan, explain_refused_arguments, explain_unsafe_wired_limit
from wire.units import GIB

PLAN = ServicePlan(
    "coordinator",
    "/opt/macpool/bin/python",
    "pool",
    "staff",
    "/var/pool",
    "/var/pool/state dir",
    launchd.LOGS,
    ("--lan", "--models", "/srv/100% mine"),
)
WORDS = st.text(st.characters(codec="ascii", exclude_categories=("Cc",)), min_size=1, max_size=20)


def test_the_service_of_a_node_does_not_ask_to_join_again():
    program = replace(PLAN, role="node", arguments=()).program
    assert program[4:] == ("join", "--joined-only", "--state", "/var/pool/state dir", "--allow-missing-folders")
    assert "--joined-only" not in PLAN.program


def test_the_job_of_launchd_has_what_a_server_needs():
    job = plistlib.loads(launchd.render_property_list(launchd.build_job(PLAN)).encode())
    assert job == launchd.build_job(PLAN)
    assert job["ProgramArguments"][:5] == ["/opt/macpool/bin/python", "-P", "-m", "coordinator.cli", "up"]
    assert "--allow-missing-folders" in job["ProgramArguments"], "external disks are connected after the login"
    assert (job["UserName"], job["GroupName"], job["WorkingDirectory"]) == ("pool", "staff", "/var/pool")
    assert (job["ProcessType"], job["RunAtLoad"], job["ThrottleInterval"]) == ("Interactive", True, 10)
    assert job["KeepAlive"] == {"SuccessfulExit": False}
    assert job["Umask"] == 63
    assert job["ExitTimeOut"] == 45, "the drain of requests and that of the local node"
    assert job["SoftResourceLimits"] == job["HardResourceLimits"] == {"NumberOfFiles": 8192}
    assert job["EnvironmentVariables"]["NO_PROXY"] == "*"
    assert job["StandardErrorPath"] == job["StandardOutPath"] == "/Library/Logs/macpool/service.log"
    assert "caffeinate" not in str(job)


def test_the_job_of_the_wired_limit_runs_once_at_each_start():
    job = plistlib.loads(launchd.render_property_list(launchd.build_wired_job(4096)).encode())
    assert job["ProgramArguments"] == ["/usr/sbin/sysctl", "iogpu.wired_limit_mb=4096"]
    assert (job["RunAtLoad"], job["LaunchOnlyOnce"]) == (True, True)


def test_our_own_jobs_have_no_fault():
    for job in (launchd.build_job(PLAN), launchd.build_wired_job(4096)):
        assert launchd.find_faults(launchd.render_property_list(job).encode()) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"ProcessTyp": "Interactive"}, "unknown key ProcessTyp"),
        ({"ThrottleInterval": "10"}, "ThrottleInterval has the wrong type"),
        ({"Umask": True}, "Umask has the wrong type"),
        ({"StandardOutPath": "~/log"}, "'~/log' is not absolute"),
        ({"EnvironmentVariables": {"HOME": "~"}}, "HOME would not be expanded"),
        ({"EnvironmentVariables": {"N": 1}}, "N is not a string"),
        ({"ProgramArguments": ["python", "-m", "x"]}, "'python' is not absolute"),
        ({"ProcessType": "Fast"}, "there is no ProcessType Fast"),
        ({"WorkingDirectory": "pool"}, "'pool' is not absolute"),
        ({"StandardErrorPath": "log"}, "'log' is not absolute"),
        ({"ProgramArguments": ["/bin/python", 1]}, "1 is not a string"),
        ({"EnvironmentVariables": {"HOME": "$HOME"}}, "HOME would not be expanded"),
    ],
)
def test_find_faults_detects_what_launchd_ignores_silently(change: dict, fault: str):
    assert launchd.find_faults(plistlib.dumps({**launchd.build_job(PLAN), **change})) == [fault]


@pytest.mark.parametrize(
    ("content", "faults"),
    [
        (plistlib.dumps({"Label": "a", "ProgramArguments": ["/bin/sh"]}), []),
        (plistlib.dumps({"ProgramArguments": ["/bin/sh"]}), ["Label is missing"]),
        (plistlib.dumps({"Label": "a"}), ["ProgramArguments is missing", "'' is not absolute"]),
        (plistlib.dumps({"Label": "a", "ProgramArguments": []}), ["'' is not absolute"]),
        (plistlib.dumps(["Label"]), ["not a property list with a dictionary"]),
    ],
)
def test_find_faults_names_missing_keys_and_other_lists(content: bytes, faults: list[str]):
    assert launchd.find_faults(content) == faults


@given(st.binary(max_size=200))
def test_no_bytes_break_the_linter(content: bytes):
    assert launchd.find_faults(content)
    assert launchd.parse_own_job(content) is None


def test_only_files_of_this_program_are_its_own():
    assert launchd.parse_own_job(launchd.render_property_list(launchd.build_job(PLAN)).encode()) == launchd.build_job(
        PLAN
    )
    other = {"Label": "org.macpool", "ProgramArguments": ["/usr/local/bin/other"]}
    assert launchd.parse_own_job(plistlib.dumps(other)) is None
    assert launchd.parse_own_job(plistlib.dumps({**launchd.build_job(PLAN), "Label": "com.other"})) is None
    wired = launchd.build_wired_job(4096)
    assert launchd.parse_own_job(plistlib.dumps(wired)) == wired
    assert launchd.parse_own_job(plistlib.dumps({**launchd.build_job(PLAN), "ProgramArguments": "-m x"})) is None
    unit = systemd.render_unit(PLAN)
    found = systemd.parse_own_unit(unit)
    assert found is not None
    assert (found["User"], found["WorkingDirectory"], found["KillMode"]) == ("pool", "/var/pool", "mixed")
    assert not any(name.startswith(("#", "Environment")) for name in found)
    for foreign in (
        "[Service]\nExecStart=/bin/other\n",
        unit.removeprefix(systemd.NOTICE),
        f"{systemd.NOTICE}\n[Service]\nExecStart=/bin/other\n",
    ):
        assert systemd.parse_own_unit(foreign) is None


def test_systemd_takes_the_unit(tmp_path: Path):
    tool = shutil.which("systemd-analyze")
    if tool is None:
        print("systemd-analyze is not here: the strict reading below is all that looks at the unit")
        return
    file, python = tmp_path / "macpool.service", tmp_path / "o'neil's Mac" / "python"
    python.parent.mkdir()
    python.symlink_to("/bin/true")
    for program in ("/bin/true", str(python)):
        file.write_text(systemd.render_unit(replace(PLAN, python=program)))
        done = subprocess.run([tool, "verify", file], capture_output=True, text=True)
        said = [line for line in done.stderr.splitlines() if "macpool.service" in line]
        assert (done.returncode, said) == (0, []), program


def sections(unit: str) -> dict[str, dict[str, list[str]]]:
    """Read a unit strictly: every line is a comment, a heading or NAME=VALUE."""
    found: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in unit.splitlines():
        if not line or line.startswith("#"):
            continue
        if line.startswith("["):
            section = line.strip("[]")
            found[section] = {}
            continue
        name, equals, value = line.partition("=")
        assert equals
        assert name.isalnum(), line
        found[section].setdefault(name, []).append(value)
    return found


def test_the_unit_of_systemd_has_what_a_server_needs():
    unit = sections(systemd.render_unit(PLAN))
    assert list(unit) == ["Unit", "Service", "Install"]
    service = {name: values[-1] for name, values in unit["Service"].items()}
    assert (service["User"], service["Restart"], service["OOMPolicy"]) == ("pool", "on-failure", "continue"), (
        "a node that leaves its cluster ends with 0, and must not ask to join again"
    )
    assert service["NoNewPrivileges"] == "yes"
    assert (service["TimeoutStopSec"], service["LimitNOFILE"], service["UMask"]) == ("45", "8192", "0077")
    assert service["RestartPreventExitStatus"].split() == ["2", "6", "8", "9"], (
        "a superseded coordinator is not restarted"
    )
    assert "MemoryDenyWriteExecute" not in service, "MLX compiles its kernels"
    assert "PrivateTmp" not in service, "Ray's sockets are where the command looks for them"
    assert service["ExecStart"].endswith(
        '--state "/var/pool/state dir" --allow-missing-folders --lan --models "/srv/100%% mine"'
    )
    assert unit["Service"]["Environment"] == [
        "HOME=/var/pool",
        "LANG=en_US.UTF-8",
        "NO_COLOR=1",
        "NO_PROXY=*",
        "PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "PYTHONUNBUFFERED=1",
    ]
    assert (service["Group"], service["WorkingDirectory"], service["RestartSec"]) == ("staff", "/var/pool", "10")
    assert (service["Type"], service["KillMode"]) == ("exec", "mixed"), "only the coordinator gets the stop signal"
    assert service["RestrictAddressFamilies"].split() == ["AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"]
    assert unit["Unit"]["After"] == unit["Unit"]["Wants"] == ["network-online.target"]
    assert unit["Unit"]["StartLimitIntervalSec"] == ["0"], "systemd never gives up"
    assert unit["Install"] == {"WantedBy": ["multi-user.target"]}


def test_special_characters_of_a_home_folder_are_not_expanded_by_systemd():
    unit = sections(systemd.render_unit(replace(PLAN, home="/var/$a 100%")))
    assert unit["Service"]["Environment"][0] == '"HOME=/var/$a 100%%"'
    assert unit["Service"]["WorkingDirectory"] == ["/var/$a 100%%"]


def test_a_path_of_python_that_systemd_refuses_is_an_argument():
    for folder, begins in (
        ("/srv/o'neil/a b", '/usr/bin/env "/srv/o\'neil/a b/python" -P'),
        ("/srv", "/srv/python -P"),
    ):
        unit = sections(systemd.render_unit(replace(PLAN, python=f"{folder}/python")))
        assert unit["Service"]["ExecStart"][0].startswith(begins)


def test_quote_word_escapes_by_systemd_rules():
    assert systemd.quote_word('a b$c%d"e\\f') == '"a b$$c%%d\\"e\\\\f"'
    assert systemd.quote_word("A=$x", expanded=False) == "A=$x"
    assert systemd.quote_word("") == '""'


@given(WORDS)
def test_quote_word_keeps_one_argument(word: str):
    plain = systemd.quote_word(word)
    if plain.startswith('"'):
        body = plain[1:-1]
        assert body.replace("\\\\", "").replace('\\"', "").count('"') == 0
    else:
        assert " " not in plain
    assert plain.replace("%%", "").count("%") == 0


@given(st.lists(WORDS, min_size=1, max_size=4))
def test_split_command_returns_the_quoted_words(words: list[str]):
    assert systemd.split_command(" ".join(map(systemd.quote_word, words))) == tuple(words)


def test_split_command_splits_a_changed_command_at_whitespace():
    assert systemd.split_command('/usr/bin/python -m "x') == ("/usr/bin/python", "-m", '"x')


@pytest.mark.parametrize(
    ("code", "listing", "found"),
    [
        (113, "", (False, False, None, "")),
        (0, "x = {\n\tstate = running\n\tpid = 42\n\tlast exit code = (never exited)\n}", (True, True, 42, "")),
        (
            0,
            "x = {\n\tstate = spawn scheduled\n\tlast exit code = 78: EX_CONFIG\n}",
            (True, False, None, "78: EX_CONFIG"),
        ),
        (0, "x = {\n\tstate = running\n\t\tpid = 7\n}", (True, False, None, "")),
        (0, "x = {\n\tstate = SIGTERMed\n\tpid = 42\n}", (True, False, 42, "")),
        (0, "x = {\n\tlast terminating signal = Killed: 9\n\tlast exit code = 1\n}", (True, False, None, "Killed: 9")),
    ],
)
def test_parse_state_of_launchctl_output(code: int, listing: str, found: tuple):
    one = launchd.parse_state(code, listing)
    assert (one.loaded, one.running, one.pid, one.last_exit) == found


@pytest.mark.parametrize(
    ("listing", "found"),
    [
        ("LoadState=not-found\nActiveState=inactive\nMainPID=0", (False, False, None, "")),
        ("LoadState=loaded\nActiveState=active\nMainPID=9\nResult=success", (True, True, 9, "")),
        ("LoadState=loaded\nActiveState=deactivating\nMainPID=9\nResult=success", (True, False, 9, "")),
        (
            "LoadState=loaded\nActiveState=activating\nMainPID=0\nResult=exit-code\nExecMainStatus=4",
            (True, False, None, "exit-code 4"),
        ),
        ("LoadState=loaded\nActiveState=active\nMainPID=0\nResult=success", (True, False, None, "")),
        ("LoadState=loaded\nActiveState=active\nMainPID=1\nno property\n", (True, True, 1, "")),
        ("", (False, False, None, "")),
    ],
)
def test_parse_state_of_systemctl_output(listing: str, found: tuple):
    one = systemd.parse_state(listing)
    assert (one.loaded, one.running, one.pid, one.last_exit) == found
    assert systemd.parse_state("StatusText=a=b").properties == {"StatusText": "a=b"}


@pytest.mark.parametrize("argument", ["--token", "--token=mpj1.x", "--token-file", "--state", "a\nb"])
def test_no_unit_has_a_world_readable_secret(argument: str):
    assert explain_refused_arguments(("--lan", argument)) is not None
    assert explain_refused_arguments(("--lan", "--set", "memory.cap=80%")) is None


@pytest.mark.parametrize(
    ("wanted", "safe", "taken"), [(122880, 120 * GIB, True), (122881, 120 * GIB, False), (1, 0, False)]
)
def test_a_wired_limit_leaves_the_system_its_reserve(wanted: int, safe: int, taken: bool):
    refused = explain_unsafe_wired_limit(wanted, safe)
    assert (refused is None) is taken
    assert taken or str(refused).endswith("use at most 122880 MB" if safe else "no wired limit is known to be safe")
