"""Decide whether this Mac accepts work now, or keeps its memory for its owner. Pure.

`node.sharing.controller` applies the decision. A pause that a person set has priority. Without a pause, or after its
end, the rule `sharing.when` decides:

    always      accept
    plugged-in  accept while the Mac is on mains power
    idle        accept after `sharing.idle_seconds` seconds without input from a person
    hours       accept between the times of `sharing.hours`, by the local clock of this machine

If the rule accepts, the battery decides: with `sharing.min_battery_percent`, a Mac on battery accepts work only at or
above that charge in percent. After a lower charge, the Mac shares again at `BATTERY_HYSTERESIS_PERCENT` more, because a
charge that varies around the limit would end work repeatedly. On mains power, the charge is ignored.

If a reading that the settings need is missing, the node accepts no work, and the reason names the setting to change.

A node that does not share accepts no new work, and the router migrates its running requests. The node ends the work
that remains after its grace period. Without open requests, the engine releases its memory.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum

DAY_SECONDS = 86400
BATTERY_HYSTERESIS_PERCENT = 5
"""Percentage points of charge above `sharing.min_battery_percent` at which a Mac on battery shares again."""
_SPAN = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})")


class ShareWhen(StrEnum):
    """Value of `sharing.when`: condition under which this Mac accepts work."""

    ALWAYS = "always"
    """Without a condition."""
    PLUGGED_IN = "plugged-in"
    """On mains power."""
    IDLE = "idle"
    """After a time without input from a person."""
    HOURS = "hours"
    """Within spans of the day."""


@dataclass(frozen=True, slots=True)
class ShareHours:
    """Time spans of the day in which this Mac accepts work, in seconds since midnight. A span may cross midnight."""

    spans: tuple[tuple[int, int], ...]

    def contains(self, second: float) -> bool:
        """Return whether a second of the day (0 to `DAY_SECONDS`) is in a span."""
        return any(_is_within(second, begin, end) for begin, end in self.spans)

    def compute_wait_seconds(self, second: float) -> float:
        """Return the seconds from a second of the day until the next span begins; 0 within a span."""
        if self.contains(second):
            return 0.0
        return min((begin - second) % DAY_SECONDS for begin, _ in self.spans)

    def __str__(self) -> str:
        return ",".join(f"{_format_clock(begin)}-{_format_clock(end)}" for begin, end in self.spans)


def parse_hours(text: str) -> ShareHours:
    """Parse `22:00-07:00`, or several spans separated by commas. Raise `ValueError` with the faulty part."""
    spans = tuple(_parse_spans(text))
    if not spans:
        raise ValueError("no hours: write a span such as 22:00-07:00, several separated by commas")
    return ShareHours(spans)


def _parse_spans(text: str) -> Iterator[tuple[int, int]]:
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _SPAN.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is not a span of hours: write it as 22:00-07:00")
        begin, end = _parse_time_of_day(match[1], match[2], part), _parse_time_of_day(match[3], match[4], part)
        if begin % DAY_SECONDS == end % DAY_SECONDS:
            raise ValueError(f'{part!r} has no length: for the whole day, set sharing.when = "always"')
        yield begin % DAY_SECONDS, end % DAY_SECONDS


def _parse_time_of_day(hours: str, minutes: str, part: str) -> int:
    second = int(hours) * 3600 + int(minutes) * 60
    if int(minutes) > 59 or second > DAY_SECONDS:
        raise ValueError(f"{part!r} has an invalid time: write 00:00 to 24:00")
    return second


def _is_within(second: float, begin: int, end: int) -> bool:
    return begin <= second < end if begin < end else second >= begin or second < end


def _format_clock(second: float) -> str:
    return f"{int(second) // 3600:02d}:{int(second) % 3600 // 60:02d}"


@dataclass(frozen=True, slots=True)
class SharingRule:
    """Settings that decide whether a Mac accepts work while no pause is set."""

    when: ShareWhen = ShareWhen.ALWAYS
    hours: ShareHours | None = None
    """Spans for `ShareWhen.HOURS`; None for other rules."""
    idle: float = 600.0
    """Seconds without input after which a Mac is idle."""
    battery: int = 0
    """Minimum charge in percent to accept work on battery; 0 for any charge."""


@dataclass(frozen=True, slots=True)
class SharingPause:
    """Pause of this Mac that a person set."""

    until: float | None
    """End in Unix seconds; None if the pause lasts until `cluster resume`."""
    by: str = ""
    """Name of the person or key; empty for the owner of the Mac."""


@dataclass(frozen=True, slots=True)
class SharingInputs:
    """Inputs of one decision: the pause and the last readings. A reading is None if it is unreadable."""

    pause: SharingPause | None = None
    """Pause that a person set; None without one."""
    plugged: bool | None = None
    """Whether the Mac is on mains power."""
    idle: float | None = None
    """Seconds without input from a person."""
    second: float = 0.0
    """Local time in seconds of the day, 0 to `DAY_SECONDS`."""
    battery: float | None = None
    """Charge in percent."""
    low: bool = False
    """Result of `is_charge_too_low` for the previous inputs."""


@dataclass(frozen=True, slots=True)
class SharingState:
    """Decision whether this Mac shares, which means that it accepts work of the pool."""

    shared: bool = True
    why: str = ""
    """Reason against sharing, for people; empty if the Mac shares."""
    until: float | None = None
    """Unix seconds at which the Mac shares again. None if the Mac shares, the time is unknown, or the pause has no end.
    """
    by_hand: bool = False
    """Whether a person set the pause."""


SHARED = SharingState()


def get_pause_in_force(pause: SharingPause | None, now: float) -> SharingPause | None:
    """Return the pause if it has not expired at `now` (Unix seconds); None otherwise, and without a pause."""
    return pause if pause is not None and (pause.until is None or now < pause.until) else None


def decide_sharing(rule: SharingRule, facts: SharingInputs, now: float) -> SharingState:
    """Decide whether this Mac shares at `now` (Unix seconds). If not, the result has the reason and the end."""
    pause = get_pause_in_force(facts.pause, now)
    if pause is not None:
        return SharingState(False, f"paused by {pause.by or 'its owner'}", pause.until, by_hand=True)
    ruled = _decide_by_rule(rule, facts, now)
    return _decide_by_charge(rule, facts) if ruled.shared else ruled


def is_charge_too_low(rule: SharingRule, facts: SharingInputs) -> bool:
    """Return whether the charge of the battery is too low for sharing.

    The caller passes the result as `low` of the next inputs, for the hysteresis. Return False without a minimum charge,
    on mains power, or if the charge is unreadable.
    """
    if not rule.battery or facts.plugged or facts.battery is None:
        return False
    return facts.battery < (compute_recovery_percent(rule.battery) if facts.low else rule.battery)


def compute_recovery_percent(least: int) -> int:
    """Return the charge in percent at which a battery that fell below `least` allows sharing again."""
    return min(100, least + BATTERY_HYSTERESIS_PERCENT)


def _decide_by_rule(rule: SharingRule, facts: SharingInputs, now: float) -> SharingState:
    match rule.when:
        case ShareWhen.ALWAYS:
            return SHARED
        case ShareWhen.PLUGGED_IN:
            return _decide_by_power(facts.plugged)
        case ShareWhen.IDLE:
            return _decide_by_idle_time(facts.idle, rule.idle)
        case ShareWhen.HOURS:
            return _decide_by_hours(rule.hours, facts.second, now)


def _decide_by_power(plugged: bool | None) -> SharingState:
    if plugged is None:
        return _refuse_unreadable("the power source", ShareWhen.PLUGGED_IN)
    return SHARED if plugged else SharingState(False, "the Mac is on battery and shares only on mains power")


def _decide_by_idle_time(idle: float | None, least: float) -> SharingState:
    if idle is None:
        return _refuse_unreadable("the time of the last input", ShareWhen.IDLE)
    return (
        SHARED
        if idle >= least
        else SharingState(False, f"the Mac is in use and shares after {_format_duration(least)} without input")
    )


def _decide_by_hours(hours: ShareHours | None, second: float, now: float) -> SharingState:
    if hours is None:
        return _refuse_unreadable("sharing.hours", ShareWhen.HOURS)
    wait = hours.compute_wait_seconds(second)
    return SharingState(False, f"the Mac shares only within {hours}", float(round(now + wait))) if wait else SHARED


def _decide_by_charge(rule: SharingRule, facts: SharingInputs) -> SharingState:
    least, charge = rule.battery, facts.battery
    if least and charge is None and not facts.plugged:
        needs = f"which sharing.min_battery_percent = {least} needs: remove that setting"
        return SharingState(False, f"the battery charge cannot be read, {needs}")
    if not is_charge_too_low(rule, facts):
        return SHARED
    again = f"the Mac shares again from {compute_recovery_percent(least)} %, or on mains power"
    return SharingState(
        False, f"the battery is at {charge:.0f} %, below sharing.min_battery_percent = {least}; {again}"
    )


def _refuse_unreadable(reading: str, when: ShareWhen) -> SharingState:
    return SharingState(False, f'{reading} cannot be read, which sharing.when = "{when}" needs: choose another value')


def _format_duration(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s"


# actions of a node that does not share


class SharingAction(Enum):
    """Action that returns memory to the owner after the node stopped sharing, or prepares the node for work again."""

    END_REQUESTS = "end the running requests"
    """End the open requests, once their grace period has passed."""
    END_LEASE = "end the running video job"
    """End the video job or the quantization that holds a lease, once its grace period has passed."""
    REST = "release the engine's memory"
    """Release the memory of the engine, once no request is open."""
    WAKE = "load the preloaded models again"
    """Load the preloaded models again after `REST`, because the node shares again."""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Current use of a node: an input of `list_due_actions`."""

    requests: int = 0
    """Number of open requests."""
    lending: bool = False
    """Whether memory is leased to a video job or a quantization."""
    resting: bool = False
    """Whether the engine was asked to hold no memory."""


@dataclass(frozen=True, slots=True)
class GracePeriods:
    """Seconds for which running work may continue after the node stopped sharing."""

    requests: float = 30.0
    """Seconds for requests."""
    video: float = 300.0
    """Seconds for a video job or a quantization, which holds a lease."""


def list_due_actions(shared: bool, holds: Occupancy, waited: float, grace: GracePeriods) -> tuple[SharingAction, ...]:
    """Return the actions that are due `waited` seconds after `shared` last changed.

    `shared` is the last decision, `holds` the current use of the node. An action is returned again until its effect is
    visible in `holds`.
    """
    if shared:
        return (SharingAction.WAKE,) if holds.resting else ()
    acts = [SharingAction.END_REQUESTS] if holds.requests and waited >= grace.requests else []
    acts += [SharingAction.END_LEASE] if holds.lending and waited >= grace.video else []
    acts += [SharingAction.REST] if not holds.requests and not holds.resting else []
    return tuple(acts)
