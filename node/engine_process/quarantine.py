"""Which models killed the engine, and which of them are kept out: twice dead in one model's load or forward, and it is
not loaded for ten minutes on this node. Pure: `now` is an argument.
"""

from dataclasses import dataclass, field

from wire.frames import Ban

DEATHS = 2
WINDOW = 600.0
"""Seconds within which deaths are counted together."""
SECONDS = 600.0
"""How long a model is kept out."""


@dataclass(slots=True)
class Quarantine:
    """Deaths by model."""

    _deaths: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    _until: dict[str, float] = field(default_factory=dict[str, float])

    def died(self, model: str, now: float) -> bool:
        """Note a death in a model's load or forward; say whether the model is kept out from now on."""
        recent = [when for when in self._deaths.get(model, []) if now - when < WINDOW]
        self._deaths[model] = [*recent, now]
        if len(self._deaths[model]) < DEATHS:
            return False
        self._until[model] = now + SECONDS
        self._deaths[model] = []
        return True

    def bans(self, now: float) -> tuple[Ban, ...]:
        """Give what is kept out now."""
        cause = f"the engine died {DEATHS} times in its load, its template, its tokenizer or a forward"
        return tuple(Ban(model, until - now, cause) for model, until in self._until.items() if until > now)
