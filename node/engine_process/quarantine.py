"""Quarantine models that crash the engine. Pure: `now` is an argument.

After `MAX_CRASHES` crashes within `WINDOW_SECONDS` in native calls of one model, this node does not load the model for
`QUARANTINE_SECONDS`.
"""

from dataclasses import dataclass, field

from wire.frames import ModelBan

MAX_CRASHES = 2
"""Crashes of a model within `WINDOW_SECONDS` after which its quarantine begins."""
WINDOW_SECONDS = 600.0
"""Seconds within which crashes are counted together."""
QUARANTINE_SECONDS = 600.0
"""Seconds for which a model stays in quarantine after `MAX_CRASHES` crashes."""


@dataclass(slots=True)
class Quarantine:
    """Recent crashes by model, and the models in quarantine. Times are seconds of a monotonic clock."""

    _deaths: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    _until: dict[str, float] = field(default_factory=dict[str, float])

    def record_crash(self, model: str, now: float) -> bool:
        """Record a crash in a native call of a model. Return whether this crash begins or extends a quarantine.

        That is the case at `MAX_CRASHES` crashes within `WINDOW_SECONDS`, and the crashes are then counted from 0
        again. A single crash during a quarantine does not extend it.
        """
        recent = [when for when in self._deaths.get(model, []) if now - when < WINDOW_SECONDS]
        self._deaths[model] = [*recent, now]
        if len(self._deaths[model]) < MAX_CRASHES:
            return False
        self._until[model] = now + QUARANTINE_SECONDS
        self._deaths[model] = []
        return True

    def describe_crash(self, call: str, model: str, now: float) -> str:
        """Record a crash, which may quarantine the model (`record_crash`). Return a description of the crash.

        The caller appends the description to the cause of the end. `call` is the kind of native call.
        """
        text = f"; it was in the {call} of {model}"
        if self.record_crash(model, now):
            text += f", crash {MAX_CRASHES} within {WINDOW_SECONDS / 60:.0f} minutes: "
            text += f"loading the model is blocked for {QUARANTINE_SECONDS / 60:.0f} minutes"
        return text

    def list_bans(self, now: float) -> tuple[ModelBan, ...]:
        """Return the models that are in quarantine at `now`, with the remaining seconds and the cause."""
        cause = f"the engine crashed {MAX_CRASHES} times in its load, template, tokenizer or forward pass"
        return tuple(ModelBan(model, until - now, cause) for model, until in self._until.items() if until > now)
