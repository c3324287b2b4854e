"""Delays and timeouts of the engine process, in seconds. Pure.

A child is ended gracefully. A process that is killed with a large wired model can leave that memory wired until the Mac
restarts (docs/decisions/0018):

    StopEngine ─(rest of the native call, then `leave`)─► SIGTERM ─(`leave`)─► SIGKILL

A hung child gets SIGTERM at once, because it does not react to `StopEngine`. For a child above the cap, both waits are
`over`.
"""

from dataclasses import dataclass
from enum import Enum, auto


class ExitUrgency(Enum):
    """Reason for which a child must end. The reason decides how long the end may take."""

    GRACEFUL = auto()
    """A healthy child is replaced, or a child violated the protocol. The child may finish its native call."""
    AGENT_STOPS = auto()
    """As `GRACEFUL`, but within `SupervisorTimeouts.stopping` seconds, because the agent stops."""
    OVER_CAP = auto()
    """The child holds more memory than cap − leases."""
    UNRESPONSIVE = auto()
    """The child hangs, or has closed its socket without exiting."""


@dataclass(frozen=True, slots=True)
class ExitTimeouts:
    """Time that a child has to end, before SIGTERM and then before SIGKILL, in seconds."""

    stop_requested: float
    """Time from `StopEngine` to SIGTERM."""
    terminated: float
    """Time from SIGTERM to SIGKILL."""

    @property
    def total(self) -> float:
        """Time from `StopEngine` to SIGKILL."""
        return self.stop_requested + self.terminated


@dataclass(frozen=True, slots=True)
class SupervisorTimeouts:
    """Delays and timeouts of the supervisor, in seconds."""

    first: float = 0.2
    """Delay of the first restart."""
    longest: float = 30.0
    """Maximum delay of a restart."""
    healthy: float = 60.0
    """Lifetime of a child after which the delay begins with `first` again."""
    ping_busy: float = 1.0
    """Interval of pings while requests are open."""
    ping_idle: float = 5.0
    """Interval of pings without open requests."""
    turn: float = 10.0
    """Minimum duration of a native call that counts as hung."""
    turn_factor: float = 5.0
    """Factor on the expected duration of a native call above which the call counts as hung."""
    silence: float = 30.0
    """Time without an answer to a ping after which the child counts as hung."""
    leave: float = 6.0
    """Time that an engine has to release its memory and exit.

    It is 1 s above `node.engine.process.main.EXIT_TIMEOUT_SECONDS`.
    """
    over: float = 1.0
    """Time from `StopEngine` to SIGTERM, and the same time again to SIGKILL, for an engine above cap − leases.

    It includes the rest of a native call in progress.
    """
    stopping: float = 15.0
    """Time to end the engine while the agent stops.

    A service manager gives the agent 45 s to stop, of which running requests may use 20 s.
    """
    settle: float = 10.0
    """Maximum time until the system counts the pages of an ended process as free.

    oMLX#2184 reports "within seconds" for 424 GiB.
    """
    look: float = 0.25
    """Interval of the wired-memory readings during `settle`."""

    def compute_restart_delay(self, failures: int) -> float:
        """Return the delay in seconds before the next start, after `failures` failures in a row (at least 1)."""
        return min(self.longest, self.first * 2.0 ** min(failures - 1, 32))

    def is_hung(self, busy: float, expected: float) -> bool:
        """Return whether a native call that has lasted `busy` of `expected` seconds counts as hung."""
        return busy > self._compute_longest_call(expected)

    def compute_seconds_until_hung(self, busy: float, expected: float) -> float:
        """Return the seconds until a native call that has lasted `busy` of `expected` seconds counts as hung.

        Return 0 for a call that counts as hung already.
        """
        return max(0.0, self._compute_longest_call(expected) - busy)

    def choose_exit_timeouts(self, urgency: ExitUrgency, busy: float, expected: float) -> ExitTimeouts:
        """Return the seconds that a child has to end before SIGTERM, and then before SIGKILL.

        Its native call has lasted `busy` of `expected` seconds; both are 0 without a call.
        """
        match urgency:
            case ExitUrgency.UNRESPONSIVE:
                return ExitTimeouts(0.0, self.leave)
            case ExitUrgency.OVER_CAP:
                return ExitTimeouts(self.over, self.over)
            case ExitUrgency.GRACEFUL:
                return ExitTimeouts(self.compute_seconds_until_hung(busy, expected) + self.leave, self.leave)
            case ExitUrgency.AGENT_STOPS:
                longest = max(0.0, self.stopping - self.leave)
                return ExitTimeouts(
                    min(longest, self.compute_seconds_until_hung(busy, expected) + self.leave), self.leave
                )

    def _compute_longest_call(self, expected: float) -> float:
        return max(self.turn, self.turn_factor * expected)
