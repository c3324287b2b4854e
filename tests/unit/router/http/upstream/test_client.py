"""Key files of upstreams, and the clients that use them."""

import os
from pathlib import Path

import pytest

from router.http.upstream.client import (
    MAX_KEY_BYTES,
    KeyFileError,
    create_clients,
    create_tls_context,
    read_key_file,
)
from router.upstreams import UpstreamSettings


def write(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "key"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_a_key_is_read_from_a_private_file(tmp_path: Path):
    assert read_key_file(write(tmp_path, " sk-1\n")) == "sk-1"


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_read_key_file_refuses_a_file_of_other_users(tmp_path: Path, mode: int):
    file = write(tmp_path, "sk-1", mode)
    with pytest.raises(KeyFileError, match=r"other users may read .*: run `chmod 600 "):
        read_key_file(file)


@pytest.mark.parametrize("key", ["!", "~", "x" * MAX_KEY_BYTES])
def test_a_key_may_have_any_printable_character_and_the_maximum_length(tmp_path: Path, key: str):
    assert read_key_file(write(tmp_path, f"{key}\n")) == key


@pytest.mark.parametrize("text", ["", "\n", "two words", "a\nb", "ü", "a\x7f", "x" * (MAX_KEY_BYTES + 1), "x" * 5000])
def test_a_file_without_a_key_is_refused(tmp_path: Path, text: str):
    with pytest.raises(KeyFileError, match="does not have an API key on one line"):
        read_key_file(write(tmp_path, text))


def test_read_key_file_refuses_missing_files_pipes_and_links(tmp_path: Path):
    with pytest.raises(KeyFileError, match="No such file"):
        read_key_file(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(KeyFileError, match="is not a file"):
        read_key_file(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(write(tmp_path, "sk-1"))
    with pytest.raises(KeyFileError, match="cannot be read"):
        read_key_file(tmp_path / "link")


async def test_the_setting_is_named(tmp_path: Path):
    settings = UpstreamSettings(url="https://example.com/v1", model="m", key_file=str(tmp_path / "missing"))
    with pytest.raises(KeyFileError, match=r"router\.upstreams\.home\.key_file: .*missing cannot be read"):
        create_clients({"home": settings})
    wrong = UpstreamSettings(url="https://example.com/v1", model="m", ca_file=str(tmp_path / "missing"))
    with pytest.raises(KeyFileError, match=r"router\.upstreams\.home\.ca_file cannot be used"):
        create_clients({"home": wrong})


async def test_a_client_does_not_show_its_key(tmp_path: Path):
    settings = UpstreamSettings(url="https://example.com/v1", model="m", key_file=str(write(tmp_path, "sk-1")))
    client = create_clients({"home": settings})["home"]
    assert "sk-1" not in f"{client!r} {settings!r} {client.build_error('failed')!r}"
    await client.close()


def test_secrets_of_tls_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SSLKEYLOGFILE", str(tmp_path / "secrets"))
    assert create_tls_context(None).keylog_filename is None
