"""`cluster backup` and `cluster restore` on the command line, with their exit codes and messages."""

import json
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.backup import encryption
from coordinator.backup.restore import inspect_backup
from coordinator.cli import cluster as command
from coordinator.state.database import Database
from coordinator.state.rows import TokenRow
from tests.unit.coordinator.backup.test_backup import QUICK_COST, cluster


def run(*words: str | Path, given: str = "") -> tuple[int, str, str]:
    done = CliRunner().invoke(command, [str(word) for word in words], input=given)
    return done.exit_code, done.stdout, done.stderr


def test_there_and_back_with_a_passphrase_from_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encryption, "COST", QUICK_COST)  # `test_encryption.py` uses the real cost
    ident, file, secret = cluster(tmp_path / "home"), tmp_path / "b", tmp_path / "secret"
    secret.write_text(" correct horse \r\n")  # spaces belong to it
    code, told, warned = run("backup", file, "--state", tmp_path / "home", "--passphrase-file", secret, "--artifacts")
    assert (code, warned) == (0, ""), warned
    assert ident in told
    assert "not included: use --artifacts" not in told
    assert "not included: use --artifacts" in run("backup", tmp_path / "c", "--state", tmp_path / "home")[1]
    assert not inspect_backup(tmp_path / "c").artifacts
    assert "/etc/cert.pem is named in the settings" in told
    code, told, _ = run("restore", file, "--check", "--state", tmp_path / "two", "--passphrase-file", secret)
    assert (code, "is valid" in told) == (0, True)
    assert not (tmp_path / "two").exists()
    code, told, _ = run(
        "restore", file, "--state", tmp_path / "two", "--passphrase-file", "-", given=" correct horse \n"
    )
    assert code == 0
    for words in (
        ident,
        "1 member, 1 key, 1 join token",
        "/etc/cert.pem is named in the settings but not in the backup: copy it here",
        "next: stop the coordinator on the other machine",
        "cluster up",
    ):
        assert words in told
    assert "correct horse" not in told
    code, told, _ = run("restore", file, "--state", tmp_path / "three", "--passphrase-file", secret, "-o", "json")
    assert json.loads(told)["members"] == 1
    code, _, said = run("restore", file, "--check", "--passphrase-file", "-", given="correct horse\n")
    assert (code, "passphrase" in said) == (6, True), "another passphrase"


def test_both_commands_print_what_the_backup_has(tmp_path: Path) -> None:
    ident, file, two = cluster(tmp_path / "home", video=False), tmp_path / "b", tmp_path / "two"
    store = Database(tmp_path / "home")
    store.tokens.put(TokenRow("second", b"k" * 32, 1.0, 2.0, 3))
    store.close()
    _, told, _ = run("backup", file, "--state", tmp_path / "home", "--artifacts", "-o", "json")
    manifest = inspect_backup(file)
    about = {
        "cluster": ident,
        "name": manifest.name,
        "made": manifest.made,
        "macpool": manifest.macpool,
        "epoch": manifest.epoch,
        "files": len(manifest.members),
        "artifacts": True,
    }
    assert manifest.epoch != manifest.generation
    assert json.loads(told) == {
        "schema": 1,
        "file": str(file),
        "bytes": file.stat().st_size,
        "encrypted": False,
        **about,
    }
    _, told, _ = run("restore", file, "--check", "-o", "json")
    assert json.loads(told) == {"schema": 1, "file": str(file), "whole": True, **about}
    _, told, _ = run("restore", file, "--state", two, "-o", "json")
    restored = json.loads(told)
    assert abs(restored.pop("generation") - time.time()) < 60, "a restore at a later time has a higher one"
    counts = {"members": 1, "keys": 1, "tokens": 2, "jobs": 0}
    assert restored == {"schema": 1, "state": str(two), "aside": "", "config": "config.toml", **counts, **about}
    (two / "config.toml").write_text("# of this machine")
    _, told, _ = run("restore", file, "--state", two, "--replace")
    assert "settings: this machine's config.toml was kept; the backup's is next to it as config.toml.restored" in told
    (aside,) = two.glob("replaced-*")
    assert f"the former files are in {aside}: " in told
    assert "1 member, 1 key, 2 join tokens, 0 video jobs\n" in told
    three = tmp_path / "three"
    run("restore", file, "--state", three)
    _, told, _ = run("restore", file, "--state", three, "--replace", "-o", "json")
    assert [json.loads(told)["aside"]] == [str(folder) for folder in three.glob("replaced-*")]


def test_backup_errors_name_the_next_step(tmp_path: Path) -> None:
    cluster(tmp_path / "home", video=False)
    file, plain = tmp_path / "b", ("--state", tmp_path / "home")
    code, told, warned = run("backup", file, *plain)
    assert (code, "protect it, or use --encrypt" in warned) == (0, True)
    assert "videos are not included" not in told, "there are none"
    code, _, said = run("backup", file, *plain, "--passphrase-file", tmp_path / "nothing")
    assert (code, "nothing cannot be read" in said) == (4, True)
    assert run("backup", file, "--state", tmp_path / "nobody")[0] == 5
    assert run("restore", tmp_path / "missing", "--state", tmp_path / "two")[0] == 5
    code, _, said = run("restore", file, *plain)
    assert (code, "--replace" in said) == (6, True)
    running = Database(tmp_path / "home")
    code, _, said = run("restore", file, "--replace", *plain)
    running.close()
    assert (code, "stop it first" in said) == (6, True)
    assert run("restore", file, "--replace", *plain)[0] == 0
    file.write_bytes(file.read_bytes()[:-5])
    code, _, said = run("restore", file, "--state", tmp_path / "two")
    assert (code, "truncated" in said) == (6, True)


@pytest.mark.parametrize("content", ["", "\n"])
def test_an_empty_passphrase_is_none(tmp_path: Path, content: str) -> None:
    cluster(tmp_path / "home", video=False)
    secret = tmp_path / "secret"
    secret.write_text(content)
    code, _, said = run("backup", tmp_path / "b", "--state", tmp_path / "home", "--passphrase-file", secret)
    assert (code, "empty" in said) == (4, True)
    assert run("backup", tmp_path / "b", "--state", tmp_path / "home", "--encrypt")[0] == 2, "no terminal, no prompt"
    assert not (tmp_path / "b").exists()


def test_a_link_in_the_state_folder_leads_nowhere(tmp_path: Path) -> None:
    cluster(tmp_path / "home", video=False)
    run("backup", tmp_path / "b", "--state", tmp_path / "home")
    outside, two = tmp_path / "outside", tmp_path / "two"
    outside.mkdir(mode=0o755)
    (outside / "precious").write_text("all of it")
    two.mkdir()
    (two / "restoring").symlink_to(outside)
    (two / "authority").symlink_to(outside)
    assert run("restore", tmp_path / "b", "--state", two)[0] == 0
    assert [one.name for one in outside.iterdir()] == ["precious"]
    assert (outside.stat().st_mode & 0o777) == 0o755
    assert not (two / "authority").is_symlink()
