"""Decide whether this Mac accepts work now, or keeps its memory for its owner. Pure; `node.sharing.controller` obeys.

Two things decide. A pause is a person's word ("for two hours") and always wins; it ends by itself. Else the rule
`node.share` does:

    always      yes
    plugged-in  while the Mac draws from the mains
    idle        once nobody has touched it for `node.share_idle` seconds
    hours       between the times of `node.share_hours`, by this machine's own clock on the wall

and, where the rule says yes, the battery: with `node.share_battery` a Mac that is not on mains shares only while its
charge is at that many percent or above. Once it fell below, it shares again REGAIN percent higher, so that a charge
that wavers around the line does not end work again and again; on mains it shares at once, whatever the charge.

What cannot be read is no yes: a node whose rule asks for a reading that this machine does not give takes nothing, and
says which setting to change.

While it does not share, the node takes nothing new. What runs is moved elsewhere by the router, which hears of it with
the report; what is still here after the grace period is ended here, and goes on elsewhere if anybody has room. Then the
engine is put to rest: a new process without a model in the place of the old one, so that all of the memory is back.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, StrEnum

DAY = 86400
REGAIN = 5
"""Percent of charge above `node.share_battery` from which a Mac whose battery fell below it shares again."""
_SPAN = re.compile(r"(\d{1,2}):(\d{2})-(\d{1,2}):(\d{2})")


class When(StrEnum):
    """When this Mac shares, `node.share`."""

    ALWAYS = "always"
    PLUGGED_IN = "plugged-in"
    IDLE = "idle"
    HOURS = "hours"


@dataclass(frozen=True, slots=True)
class Hours:
    """Spans of the day in which work is taken, as seconds since midnight; one may go over midnight."""

    spans: tuple[tuple[int, int], ...]

    def inside(self, second: float) -> bool:
        """Say whether a second of the day (0 to DAY) is in a span."""
        return any(_within(second, begin, end) for begin, end in self.spans)

    def opens_in(self, second: float) -> float:
        """Give the seconds until the next span begins; 0 within one."""
        if self.inside(second):
            return 0.0
        return min((begin - second) % DAY for begin, _ in self.spans)

    def __str__(self) -> str:
        return ",".join(f"{_clock(begin)}-{_clock(end)}" for begin, end in self.spans)


def read_hours(text: str) -> Hours:
    """Read `22:00-07:00`, or several such spans with commas between; ValueError says what is wrong."""
    spans = tuple(_spans(text))
    if not spans:
        raise ValueError("no hours are given: write them as 22:00-07:00, several with commas between")
    return Hours(spans)


def _spans(text: str) -> Iterator[tuple[int, int]]:
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _SPAN.fullmatch(part)
        if match is None:
            raise ValueError(f"{part!r} is no span of hours: write it as 22:00-07:00")
        begin, end = _second(match[1], match[2], part), _second(match[3], match[4], part)
        if begin % DAY == end % DAY:
            raise ValueError(f'{part!r} has no length: for the whole day there is share = "always"')
        yield begin % DAY, end % DAY


def _second(hours: str, minutes: str, part: str) -> int:
    second = int(hours) * 3600 + int(minutes) * 60
    if int(minutes) > 59 or second > DAY:
        raise ValueError(f"{part!r} names a time that no day has")
    return second


def _within(second: float, begin: int, end: int) -> bool:
    return begin <= second < end if begin < end else second >= begin or second < end


def _clock(second: float) -> str:
    return f"{int(second) // 3600:02d}:{int(second) % 3600 // 60:02d}"


@dataclass(frozen=True, slots=True)
class Rule:
    """The settings: when to share, the hours where they decide, after how many seconds of rest a Mac is idle, and the
    least charge in percent off the mains (0: the battery does not matter)."""

    when: When = When.ALWAYS
    hours: Hours | None = None
    idle: float = 600.0
    battery: int = 0


@dataclass(frozen=True, slots=True)
class Pause:
    """A person's word: nothing new until `until` (Unix seconds; None: until somebody resumes), `by` whom."""

    until: float | None
    by: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """What decides, as it was read last. `second` is the time of the day on this machine's clock (0 to DAY), `battery`
    its charge in percent, `low` the answer of `too_low` before this one."""

    pause: Pause | None = None
    plugged: bool | None = None
    idle: float | None = None
    second: float = 0.0
    battery: float | None = None
    low: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """The answer. `why` and `until` (Unix seconds, None: nobody can say) are for people, where it does not share."""

    shared: bool = True
    why: str = ""
    until: float | None = None
    by_hand: bool = False


SHARED = Standing()


def in_force(pause: Pause | None, now: float) -> Pause | None:
    """Give the pause if it still holds at `now` (Unix seconds)."""
    return pause if pause is not None and (pause.until is None or now < pause.until) else None


def standing(rule: Rule, facts: Facts, now: float) -> Standing:
    """Say whether this node shares now (Unix seconds), and if not, why and until when."""
    pause = in_force(facts.pause, now)
    if pause is not None:
        return Standing(False, f"paused by {pause.by or 'its owner'}", pause.until, by_hand=True)
    ruled = _ruled(rule, facts, now)
    return _charged(rule, facts) if ruled.shared else ruled


def too_low(rule: Rule, facts: Facts) -> bool:
    """Say whether its battery keeps this Mac from sharing: keep the answer, and give it as `low` the next time."""
    if not rule.battery or facts.plugged or facts.battery is None:
        return False
    return facts.battery < (regained(rule.battery) if facts.low else rule.battery)


def regained(least: int) -> int:
    """Give the charge in percent from which a battery that fell below `least` is good for sharing again."""
    return min(100, least + REGAIN)


def _ruled(rule: Rule, facts: Facts, now: float) -> Standing:
    match rule.when:
        case When.ALWAYS:
            return SHARED
        case When.PLUGGED_IN:
            return _plugged(facts.plugged)
        case When.IDLE:
            return _idle(facts.idle, rule.idle)
        case When.HOURS:
            return _hours(rule.hours, facts.second, now)


def _plugged(plugged: bool | None) -> Standing:
    if plugged is None:
        return _unread("whether it draws from the mains", When.PLUGGED_IN)
    return SHARED if plugged else Standing(False, "it runs on battery, and shares only while it is plugged in")


def _idle(idle: float | None, least: float) -> Standing:
    if idle is None:
        return _unread("when it was last touched", When.IDLE)
    return SHARED if idle >= least else Standing(False, f"somebody uses it; it shares after {_span(least)} of rest")


def _hours(hours: Hours | None, second: float, now: float) -> Standing:
    if hours is None:
        return _unread("node.share_hours", When.HOURS)
    wait = hours.opens_in(second)
    return Standing(False, f"it shares from {hours} only", float(round(now + wait))) if wait else SHARED


def _charged(rule: Rule, facts: Facts) -> Standing:
    least, charge = rule.battery, facts.battery
    if least and charge is None and not facts.plugged:
        needs = f"which node.share_battery = {least} needs: leave it out"
        return Standing(False, f"the charge of its battery cannot be read here, {needs}")
    if not too_low(rule, facts):
        return SHARED
    again = f"it shares again from {regained(least)} % on, or plugged in"
    return Standing(False, f"its battery is at {charge:.0f} %, and node.share_battery = {least}; {again}")


def _unread(what: str, when: When) -> Standing:
    return Standing(False, f'{what} cannot be read here, which node.share = "{when}" needs: choose another')


def _span(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s"


# what is done once it does not share


class Act(Enum):
    """What the node does so that its memory comes back."""

    END_REQUESTS = "end what is still running here"
    END_LEASE = "end the video that is made here"
    REST = "give all of the engine's memory back"
    WAKE = "take up again what is always loaded"


@dataclass(frozen=True, slots=True)
class Holds:
    """What is on the node: requests, whether memory is lent, and whether its engine rests."""

    requests: int = 0
    lending: bool = False
    resting: bool = False


@dataclass(frozen=True, slots=True)
class Grace:
    """Seconds that requests and a video have to end, from the moment at which the node stopped sharing."""

    requests: float = 30.0
    video: float = 300.0


def due(shared: bool, holds: Holds, waited: float, grace: Grace) -> tuple[Act, ...]:
    """Say what has to be done now, `waited` seconds after the answer of `standing` last changed. Each act may be asked
    for again until what it does is done."""
    if shared:
        return (Act.WAKE,) if holds.resting else ()
    acts = [Act.END_REQUESTS] if holds.requests and waited >= grace.requests else []
    acts += [Act.END_LEASE] if holds.lending and waited >= grace.video else []
    acts += [Act.REST] if not holds.requests and not holds.resting else []
    return tuple(acts)
