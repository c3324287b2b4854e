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


def test_a_refused_operation_is_not_in_the_audit_log(tmp_path: Path) -> None:
    store = Database(tmp_path)
    store.create_cluster(ClusterCa(tmp_path / "authority", time.time).cluster, "home")
    store.close()
    session = ApiSession(tmp_path, None, None, "text")
    body = {"name": "laptop", "scopes": ["infer"], "ttl_seconds": None, "limits": {}}
    refused = [
        ("DELETE", "/api/v1/keys/unknown", {}, "there is no key unknown"),
        ("POST", "/api/v1/keys", body | {"limits": {"models": 5}}, "limits: "),
        ("POST", "/api/v1/keys", body | {"name": "local"}, "is reserved for the owner of this machine"),
        ("PUT", "/api/v1/keys/unknown/name", {"name": "page"}, "is reserved for the owner of this machine"),
    ]
    for method, path, fields, words in refused:
        with pytest.raises(CommandError, match=words):
            run_offline(session, method, path, fields)
    made = run_offline(session, "POST", "/api/v1/keys", body)
    run_offline(session, "DELETE", f"/api/v1/keys/{made['id']}", {})
    acts = run_offline(session, "GET", "/api/v1/audit?last=10", {})["acts"]
    assert [(act["action"], act["subject"]) for act in acts] == [("post keys", "laptop"), ("delete keys", made["id"])]
    assert run_offline(session, "GET", "/api/v1/audit?last=0", {})["acts"] == []
