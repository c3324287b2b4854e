"""Commands of users without a usable key file."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from coordinator.cli import cluster


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_env_with_an_unreadable_key_file_is_a_clear_error(tmp_path: Path, content: bytes | None) -> None:
    key = tmp_path / "key"
    if content is not None:
        key.write_bytes(content)
    line = ["env", "--state", str(tmp_path), "--url", "https://10.0.0.1:8080", "--key-file", str(key)]
    done = CliRunner().invoke(cluster, line)
    assert done.exit_code == 4
    assert "the key file cannot be read" in done.output


def test_up_with_settings_that_are_not_utf8_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(b'name = "caf\xe9"')
    done = CliRunner().invoke(cluster, ["up", "--state", str(tmp_path)])
    assert done.exit_code == 2
    assert "config.toml: " in done.output
    assert "utf-8" in done.output


def test_explain_refuses_an_id_with_export(tmp_path: Path) -> None:
    file = tmp_path / "decisions"
    done = CliRunner().invoke(cluster, ["explain", "chat-1", "--export", str(file), "--state", str(tmp_path)])
    assert (done.exit_code, "leave out either ID or --export" in done.output, file.exists()) == (2, True, False)
