import json
from pathlib import Path

from click.testing import CliRunner, Result

from coordinator.cli import cluster
from tests.unit.simulation.test_routers import CRASH

STORY = str(Path(__file__).parents[2] / "sim" / "stories" / "line.toml")


def run(*words: str) -> Result:
    return CliRunner().invoke(cluster, ["simulate", *words])


def test_the_table_has_a_line_for_each_member():
    done = run(STORY, "--policy", "balanced", "--policy", "round-robin")
    assert done.exit_code == 0, done.output
    table = done.stdout.splitlines()[3:]
    assert [line.split()[0] for line in table] == ["POLICY", "clairvoyant", "balanced", "round-robin"]
    assert table[1].split()[4] == "1.00"


def test_json_contains_no_infinity():
    done = run(STORY, "--policy", "round-robin", "--seed", "3", "--json")
    answer = json.loads(done.stdout)
    assert (answer["schema"], answer["seed"], len(answer["rows"])) == (1, 3, 2)
    assert "Infinity" not in done.stdout


def test_a_value_without_a_number_is_null_and_the_seed_may_be_zero(tmp_path: Path):
    file = tmp_path / "crash.toml"
    file.write_text(CRASH)
    answer = json.loads(run(str(file), "--policy", "round-robin", "--seed", "0", "--json").stdout)
    assert answer["seed"] == 0
    clairvoyant, rule = answer["rows"]
    assert (clairvoyant["failed"], rule["failed"] > 5) == (0, True)
    assert (clairvoyant["ttft_p95"] > 0, rule["ttft_p95"], rule["ratio_p95"]) == (True, None, None)


def test_the_log_has_every_step():
    done = run(STORY, "--policy", "balanced", "--log")
    assert "r0 first token on mini-2" in done.stdout


def test_bad_files_are_usage_errors(tmp_path: Path):
    bad = tmp_path / "bad.toml"
    bad.write_text("seconds = 1\n")
    done = run(str(bad))
    assert done.exit_code == 2
    assert f"{bad}: Object missing required field `about`" in done.output
    assert run(STORY, "--policy", "best").exit_code == 2
