"""Lists of join tokens for administrators."""

import time
from pathlib import Path

from coordinator.joining.join_tokens import JoinTokens
from coordinator.state.access_admin import AccessAdmin, load_pepper
from coordinator.state.database import Database
from coordinator.tls.cluster_ca import ClusterCa
from router.admission.api_keys import KeyRing


def test_a_revoked_token_is_not_listed(tmp_path: Path):
    store, pepper = Database(tmp_path), load_pepper(tmp_path)
    authority = ClusterCa(tmp_path / "authority", time.time)
    store.create_cluster(authority.cluster, "home")
    tokens = JoinTokens(store, authority.ca, time.time)
    admin = AccessAdmin(store, tokens, KeyRing(pepper), pepper, time.time)
    kept, revoked = tokens.create(name="kept"), tokens.create(name="revoked")
    assert admin.revoke_token(revoked.id)
    assert [row["id"] for row in admin.list_tokens()["tokens"]] == [kept.id]
    store.close()
