"""Reasons why a model cannot be loaded: a ban by the agent, its files, or an earlier failure. Pure."""

import math

from node.engine.models.model_descriptor import ModelDescriptor
from wire.frames import ModelBan

READ_RETRY_SECONDS = 60.0
"""Seconds after which a model may be loaded again whose files could not be read, or for which no memory was left."""
_PASSING_ERRORS = ("[read]", "[malloc]", "[metal::malloc]")
"""Beginnings of the messages of MLX for a file that cannot be read, and for memory that is not given."""


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
        """Set the bans of these models, in place of earlier ones of the same models. `find_cause` returns the cause of
        a ban until its end. `now` is the monotonic time."""
        self._bans |= {ban.model: (now + ban.seconds, ban.cause) for ban in bans}

    def record_failure(self, descriptor: ModelDescriptor, cause: str, ends: float = math.inf) -> None:
        """Record the error of a model's files, until they change or until `ends` (monotonic seconds)."""
        self._broken[descriptor.name] = (descriptor.fingerprint, cause, ends)

    def clear_failure(self, name: str) -> None:
        """Clear the error of a broken model, so that an order to load it tries again."""
        self._broken.pop(name, None)


def may_pass(error: Exception) -> bool:
    """Return whether the cause of a failed load may pass, although the files of the model stay the same.

    One cause is a file that could not be opened or read, as on a disk that was disconnected. Another is memory that the
    system or MLX did not give.
    """
    text = str(error)
    return isinstance(error, OSError | MemoryError) or text.startswith(_PASSING_ERRORS) or "Failed to open" in text
