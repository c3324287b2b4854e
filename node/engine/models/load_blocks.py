"""Reasons why a model cannot be loaded: a ban by the agent, its files, or an earlier failure. Pure."""

import math

from node.engine.models.model_descriptor import ModelDescriptor
from wire.frames import ModelBan


class LoadBlocks:
    """Models that cannot be loaded, with the reasons."""

    def __init__(self) -> None:
        self._broken: dict[str, tuple[str, str]] = {}
        """Fingerprint and error of models whose load failed because of their files, by name."""
        self._bans: dict[str, tuple[float, str]] = {}
        """End (monotonic seconds) and cause of bans, by name."""

    def find_cause(self, descriptor: ModelDescriptor, now: float) -> str:
        """Return why a model cannot be loaded at the monotonic time `now`: a ban, its files or an earlier failure.
        Return an empty text if it can."""
        until, cause = self._bans.get(descriptor.name, (0.0, ""))
        if now < until:
            return f"{cause}; loading is blocked for another {math.ceil(until - now)} s"
        fingerprint, broken = self._broken.get(descriptor.name, ("", ""))
        return descriptor.cause or (broken if fingerprint == descriptor.fingerprint else "")

    def ban(self, bans: tuple[ModelBan, ...], now: float) -> None:
        """Refuse loads of these models until their bans end. `now` is the monotonic time."""
        self._bans |= {ban.model: (now + ban.seconds, ban.cause) for ban in bans}

    def record_failure(self, descriptor: ModelDescriptor, cause: str) -> None:
        """Record the error of a model's files, until they change."""
        self._broken[descriptor.name] = (descriptor.fingerprint, cause)

    def clear_failure(self, name: str) -> None:
        """Clear the error of a broken model, so that an order to load it tries again."""
        self._broken.pop(name, None)
