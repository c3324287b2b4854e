"""`cluster metrics-config` with a damaged token file, against a server with the answers of a coordinator."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster.answering_server import Server


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path)
    yield made
    made.http.shutdown()
    made.http.server_close()


def test_a_damaged_token_file_is_replaced_and_no_key_is_revoked(server: Server, tmp_path: Path) -> None:
    (tmp_path / "p").mkdir(mode=0o700)
    token = tmp_path / "p" / "macpool.token"
    token.write_bytes(b"mp_\xff\xfe_secret")
    keys = [{"id": "old", "name": "prometheus"}]
    server.answer = {"keys": keys, "key": "mp_new_secret", "base_url": "http://10.0.0.1:8080/v1"}
    done = server.run("metrics-config", "--folder", str(tmp_path / "p"), "--renew")
    assert done.exit_code == 0, done.output
    assert token.read_text() == "mp_new_secret"
    posted = [(path, body) for path, body in server.asked if path.startswith("/api/v1/keys")]
    assert posted == [("/api/v1/keys", None), ("/api/v1/keys", {"name": "prometheus-2", "scopes": ["metrics"]})]
