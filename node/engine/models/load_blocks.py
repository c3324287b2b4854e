"""Reasons why a model cannot be loaded: a ban by the agent, its files, or an earlier failure. Pure."""

import math

from node.engine.models.model_descriptor import ModelDescriptor
from wire.frames import ModelBan

READ_RETRY_SECONDS = 60.0
"""Seconds until a model may be loaded again after its files could not be read, or memory could not be allocated."""
_PASSING_ERRORS = ("[read]", "[malloc]", "[metal::malloc]")
"""Prefixes of MLX's messages for a file that cannot be read, and for memory that cannot be allocated."""


class LoadBlocks:
    """Models that cannot be loaded, with the reasons."""

    def __init__(self) -> None:
        self._broken: dict[str, tuple[str, str, float]] = {}
        """Models whose load failed because of their files: fingerprint, error and end (monotonic seconds), by name."""
        self._bans: dict[str, tuple[float, str]] = {}
        """End (monotonic seconds) and cause of bans, by name."""

    def find_cause(self, descriptor: ModelDescriptor, now: float) -> str:
        """Return why a model cannot be loaded at the monotonic time `now`: a ban, its files or an earlier failure.
        Return an empty text if it can."""
        until, cause = self._bans.get(descriptor.name, (0.0, ""))
        if now < until:
            return f"{cause}; loading is blocked for another {math.ceil(until - now)} s"
        fingerprint, broken, ends = self._broken.get(descriptor.name, ("", "", 0.0))
        if descriptor.cause or fingerprint != descriptor.fingerprint or now >= ends:
            return descriptor.cause
        return broken if ends == math.inf else f"{broken}; the next try is in {math.ceil(ends - now)} s"

    def ban(self, bans: tuple[ModelBan, ...], now: float) -> None:
        """Ban models from `now` (monotonic seconds) for the duration of each ban. A new ban of a model replaces its
        earlier ban. `find_cause` returns the cause of a ban until its end."""
        self._bans |= {ban.model: (now + ban.seconds, ban.cause) for ban in bans}

    def record_failure(self, descriptor: ModelDescriptor, cause: str, ends: float = math.inf) -> None:
        """Record `cause`, why a model cannot be loaded. It applies until the model's files change, or until `ends`
        (monotonic seconds)."""
        self._broken[descriptor.name] = (descriptor.fingerprint, cause, ends)

    def clear_failure(self, name: str) -> None:
        """Clear the recorded failure of the model named `name`, so that it can be loaded again. Bans stay."""
        self._broken.pop(name, None)


def may_pass(error: Exception) -> bool:
    """Return whether the cause of a failed load is possibly temporary: the model may load later with unchanged files.

    One such cause is a file that could not be opened or read, for example on a disconnected disk. Another is a failed
    allocation of memory by the system or MLX.
    """
    text = str(error)
    return isinstance(error, OSError | MemoryError) or text.startswith(_PASSING_ERRORS) or "Failed to open" in text
