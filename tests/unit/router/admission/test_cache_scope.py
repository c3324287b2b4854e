"""The keys whose cached prefixes a request may reuse."""

from pathlib import Path

import pytest

from host.settings_loader import SettingsError
from router.admission.cache_scope import MAX_PROMPT_BYTES, CacheScopes, CacheSettings, open_scopes
from wire.frames import SHARED_SCOPE, Message

SYSTEM = "You are the clerk of the family."


def begins(role: str, text: str) -> tuple[Message, ...]:
    return Message(role, text), Message("user", "hello")


def test_by_default_each_key_has_its_own():
    scopes = open_scopes(CacheSettings())
    assert (scopes.scope, scopes.get_scope("alice"), scopes.get_scope("mallory")) == ("", "alice", "mallory")
    assert not scopes.has_shared_prompt(begins("system", SYSTEM))
    assert not scopes.has_shared_prompt(())


def test_an_administrator_may_share_it_in_the_pool():
    scopes = open_scopes(CacheSettings(share="pool"))
    assert scopes.scope == scopes.get_scope("alice") == scopes.get_scope("mallory") == SHARED_SCOPE


def test_a_system_prompt_is_shared_where_it_is_exactly_the_text_of_a_file(tmp_path: Path):
    file = tmp_path / "clerk.txt"
    file.write_text(SYSTEM + "\n")
    scopes = open_scopes(CacheSettings(shared_prompts=(str(file),)))
    assert scopes.has_shared_prompt(begins("system", SYSTEM))
    assert scopes.has_shared_prompt(begins("developer", SYSTEM + "\n"))
    assert not scopes.has_shared_prompt(begins("user", SYSTEM))
    assert not scopes.has_shared_prompt(begins("system", SYSTEM + " The code is 1234."))
    assert not scopes.has_shared_prompt((Message("user", "hello"), Message("system", SYSTEM)))
    assert not scopes.has_shared_prompt(())
    assert not CacheScopes("pool").has_shared_prompt(begins("system", SYSTEM))


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        (b" \n", "is empty"),
        (b"x" * (MAX_PROMPT_BYTES + 1), "shorten it"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_with_the_next_step(content: bytes | None, told: str, tmp_path: Path):
    file = tmp_path / "clerk.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsError, match=told) as refused:
        open_scopes(CacheSettings(shared_prompts=(str(file),)))
    assert "cache.shared_prompts" in str(refused.value)


def test_a_file_of_an_unknown_user_is_named():
    with pytest.raises(SettingsError, match=r"cache\.shared_prompts: ~unknown-user/clerk\.txt cannot be read"):
        open_scopes(CacheSettings(shared_prompts=("~unknown-user/clerk.txt",)))
