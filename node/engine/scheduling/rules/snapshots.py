"""Positions in a prompt at which a cache that cannot be cut is worth a snapshot. Pure.

- Turns: After the last end-of-turn token. The user's message is the last part that the next turn's prompt is sure to
  repeat. The rest (start of the answer, reasoning markers) belongs to the template, and templates change it.
- Branches: At the end of the prefix shared with a stored prompt. This prefix is most likely a system prompt that more
  requests will share. The third such request finds the snapshot.
- System prompts: After a system prompt that all keys share.
- Long prompts: After each `LONG_SNAPSHOT_TOKENS` that took at least `LONG_SNAPSHOT_SECONDS`. A prompt that differs
  later, or an interrupted prefill, then need not start again at its first token. Only the newest `MAX_LONG_SNAPSHOTS`
  of these are kept for a prompt.
"""

from collections.abc import Collection

from node.engine.kv.prefix_store import MIN_PREFIX_TOKENS

TURN_END_TOKENS = 64
"""Number of tokens at the end of a prompt among which the last end-of-turn token is searched."""
MAX_TEMPLATE_TOKENS = 8
"""Assumed number of tokens that the template appends to the user's message, if no end-of-turn token is found."""
MIN_SNAPSHOT_TOKENS = 64
"""Minimum tokens of a shared prefix beyond the cached tokens for a snapshot at its end."""

LONG_SNAPSHOT_TOKENS = 2048
"""Minimum tokens between two snapshots of a long prompt."""
LONG_SNAPSHOT_SECONDS = 2.0
"""Minimum seconds of prefill between two snapshots of a long prompt."""
MAX_LONG_SNAPSHOTS = 4
"""Maximum number of stored snapshots of one long prompt. The oldest snapshot is removed first."""


def is_long_snapshot_due(tokens: int, seconds: float) -> bool:
    """Return whether a snapshot of a long prompt is due, `tokens` tokens after the last snapshot. `seconds` is the
    estimated time to prefill these tokens."""
    return tokens >= LONG_SNAPSHOT_TOKENS and seconds >= LONG_SNAPSHOT_SECONDS


def choose_snapshot_positions(
    ids: list[int], eos: Collection[int], cached: int, shared: int, system: int = 0
) -> list[int]:
    """Return the positions in a prompt, in tokens and ascending order, at which a cache that cannot be cut is worth a
    snapshot. The module's docstring states the rules; the rule for long prompts is `is_long_snapshot_due`.

    `cached` tokens of the prompt are cached; the positions are beyond these, from `MIN_PREFIX_TOKENS` on. The prompt
    shares its first `shared` tokens with some stored sequence. Its first `system` tokens are a system prompt that all
    keys share; 0: none.
    """
    most = len(ids) - 1
    ends = (place for place in range(most, max(0, most - TURN_END_TOKENS), -1) if ids[place - 1] in eos)
    turn = next(ends, most - MAX_TEMPLATE_TOKENS)
    branch = shared if shared >= cached + MIN_SNAPSHOT_TOKENS else 0
    places = min(branch, most), min(system, most), turn
    return sorted({place for place in places if place > cached and place >= MIN_PREFIX_TOKENS})
