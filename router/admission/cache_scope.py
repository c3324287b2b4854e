"""Decide which cached prefixes a request may reuse: those of its own API key, or by setting those of all keys.

A client can detect a cached prefix by `usage.cached_tokens`, by the time to the first token and by the chosen node.
Reuse between keys would reveal to a key, word by word, whether another key has sent a prompt. By default, all keys
share only configured system prompts. With `cache.share = "pool"`, all keys share all prefixes.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from host.private_files import resolve_home
from host.settings_loader import Section, SettingsError
from wire.frames import SHARED_SCOPE, Message
from wire.units import MIB

MAX_PROMPT_BYTES = MIB
"""Maximum bytes of a file with a shared system prompt."""
SYSTEM_ROLES = frozenset({"system", "developer"})


class CacheSettings(Section, frozen=True, kw_only=True):
    """The `cache` section of the settings: which API keys may reuse a cached prompt prefix."""

    share: Annotated[
        Literal["key", "pool"],
        Meta(
            description=(
                "Keys that may reuse a cached prompt prefix: `key` (only the API key that sent it) or `pool` "
                "(all keys). With `pool`, a key can find out prompts of other keys."
            )
        ),
    ] = "key"
    shared_prompts: Annotated[
        tuple[str, ...],
        Meta(
            description=(
                "Files with one system prompt each. All keys share the cached tokens of a request whose first "
                "message is exactly such a prompt. The files are read at start."
            )
        ),
    ] = ()


class CacheScopes:
    """Rule that decides the cache scope of each request.

    With the `share` `key`, only the key that sent a prefix may reuse it; with `pool`, all keys may. `prompts` are the
    texts of system prompts that all keys share in either case.
    """

    def __init__(self, share: str = "key", prompts: Iterable[str] = ()) -> None:
        self._pool = share == "pool"
        self._prompts = frozenset(prompts)

    @property
    def scope(self) -> str:
        """Scope for `Generate.cache_scope`: `SHARED_SCOPE`, or empty for the scope of the request's own key."""
        return SHARED_SCOPE if self._pool else ""

    def get_scope(self, key: str) -> str:
        """Return the scope of the prefixes of a key: `SHARED_SCOPE` if all keys share them, else the id of the key."""
        return SHARED_SCOPE if self._pool else key

    def has_shared_prompt(self, messages: Sequence[Message]) -> bool:
        """Return whether the first message has a role of `SYSTEM_ROLES` and exactly the text of a shared prompt."""
        return bool(self._prompts and messages) and (
            messages[0].role in SYSTEM_ROLES and messages[0].content in self._prompts
        )


def open_scopes(settings: CacheSettings) -> CacheScopes:
    """Return the rule for these settings. The shared system prompts are read from their files.

    A prompt is shared with and without the newline at the end of its file. Raise `SettingsError` for a file that is
    unreadable, empty, no UTF-8 text or longer than `MAX_PROMPT_BYTES`.
    """
    prompts: set[str] = set()
    for name in settings.shared_prompts:
        text = _read_prompt(resolve_home(name))
        prompts |= {text, text.removesuffix("\n")}  # editors end a file with a newline
    return CacheScopes(settings.share, prompts)


def _read_prompt(path: Path) -> str:
    try:
        size = path.stat().st_size
        if size > MAX_PROMPT_BYTES:
            raise SettingsError(
                f"setting cache.shared_prompts: {path} has {size} bytes, at most {MAX_PROMPT_BYTES} are read: "
                "shorten it"
            )
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"setting cache.shared_prompts: {path} cannot be read as UTF-8 text: {error}") from error
    if not text.strip():
        raise SettingsError(f"setting cache.shared_prompts: {path} is empty: write the system prompt into it")
    return text
