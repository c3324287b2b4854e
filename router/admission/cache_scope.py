"""Scopes of cached prefixes: by default, a request reuses prefixes of its own API key, and configured system prompts.

A cached prefix shows in `usage.cached_tokens`, in the time to the first token and in the chosen node. Reuse by another
key would reveal to that key, word by word, whether a prompt has been sent before. With `cache.share = "pool"`, all keys
reuse all prefixes.
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
    """Rule for the cache scope of each request. `prompts` are the texts of the shared system prompts.

    `share`: `key` limits cached prefixes to the key that sent them, `pool` shares them among all keys.
    """

    def __init__(self, share: str = "key", prompts: Iterable[str] = ()) -> None:
        self._pool = share == "pool"
        self._prompts = frozenset(prompts)

    @property
    def scope(self) -> str:
        """Scope in the frame of a request (`Generate.cache_scope`); empty for the scope of the request's own key."""
        return SHARED_SCOPE if self._pool else ""

    def get_scope(self, key: str) -> str:
        """Return the scope of the prefixes of a key (by its id): `SHARED_SCOPE` if all keys share them, else the id."""
        return SHARED_SCOPE if self._pool else key

    def has_shared_prompt(self, messages: Sequence[Message]) -> bool:
        """Return whether the first message has a role of `SYSTEM_ROLES` and exactly the text of a shared prompt."""
        return bool(self._prompts and messages) and (
            messages[0].role in SYSTEM_ROLES and messages[0].content in self._prompts
        )


def open_scopes(settings: CacheSettings) -> CacheScopes:
    """Return the rule of the settings, with the shared system prompts from their files.

    Each prompt is also shared without the newline at the end of its file.

    Raise `SettingsError` for a file that is unreadable, empty, no UTF-8 text or longer than `MAX_PROMPT_BYTES`.
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
