"""Operations on tokens and keys without a running coordinator."""

import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from coordinator.cli.offline_access import run_offline
from coordinator.client.api_client import ApiSession
from coordinator.client.errors import CommandError
from coordinator.state.database import Database
from coordinator.tls.cluster_ca import ClusterCa


@pytest.mark.parametrize(
    ("broken", "words"), [("authority", "authority.pem"), ("pepper", "pepper"), ("disk", "could not be written")]
)
def test_a_file_that_cannot_be_used_is_a_clear_error(tmp_path: Path, broken: str, words: str) -> None:
    store = Database(tmp_path)
    store.create_cluster(ClusterCa(tmp_path / "authority", time.time).cluster, "home")
    store.close()
    if broken == "authority":
        (tmp_path / "authority" / "authority.pem").write_text("junk")
    elif broken == "pepper":
        (tmp_path / "pepper").mkdir()
    else:
        with closing(sqlite3.connect(tmp_path / "cluster.db")) as connection:
            connection.execute("CREATE TRIGGER full BEFORE INSERT ON keys BEGIN SELECT RAISE(ABORT, 'disk full'); END")
    body = {"name": "laptop", "scopes": ["infer"], "ttl_seconds": None, "limits": None}
    body = {"name": "laptop", "uses": 1, "ttl_seconds": 60.0} if broken != "disk" else body | {"limits": {}}
    kind = "tokens" if broken != "disk" else "keys"
    with pytest.raises(CommandError, match=words):
        run_offline(ApiSession(tmp_path, None, None, "text"), "POST", f"/api/v1/{kind}", body)
