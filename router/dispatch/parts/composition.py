"""Composition of the dispatcher, whose parts get all of their collaborators in their constructors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from router.admission.cache_scope import CacheScopes
from router.admission.model_names import ModelNames
from router.admission.queue import AdmissionQueue
from router.admission.rate_limits import RateLimits
from router.admission.usage import UsageCounter
from router.dispatch.accounting import Accounting
from router.dispatch.active_request import ActiveRequest
from router.dispatch.aliases.placement import AliasPlacement
from router.dispatch.aliases.upstream_gate import UpstreamGate
from router.dispatch.circuit_breaker import CircuitBreakers
from router.dispatch.counters import Counters
from router.dispatch.decision_log import DecisionLog
from router.dispatch.node_commands import NodeCommands
from router.dispatch.parts.assignment import Assignment
from router.dispatch.parts.attempts import Attempts
from router.dispatch.parts.crowding import CrowdRules
from router.dispatch.parts.endings import Endings
from router.dispatch.parts.intake import Intake
from router.dispatch.parts.losses import Losses
from router.dispatch.parts.migration import Migration
from router.dispatch.parts.node_frames import NodeFrames
from router.dispatch.parts.placer import Placer
from router.dispatch.parts.stream_watchdog import StreamWatchdog
from router.dispatch.parts.swap_turns import SwapTurns
from router.dispatch.parts.waiting import QueuedRequests
from router.dispatch.parts.wakeups import DrainWaits, NodeChanges
from router.dispatch.request_events import (
    Action,
    CancelAttempt,
    CorrectHeadroom,
    Dequeue,
    EndRequest,
    Enqueue,
    Event,
    HandOver,
    PrefillDone,
    RecordPrompt,
    Release,
    StartAttempt,
    Withdraw,
)
from router.placement.policies import POLICIES, Policy
from router.placement.prefix_affinity import PrefixAffinity
from router.placement.reservations import ReservationLedger
from router.settings import RouterSettings
from wire.frames import Frame
from wire.identity import NodeId

SWEEP_INTERVAL_SECONDS = 0.25
"""Maximum interval between two sweeps, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Collaborators of a dispatcher: functions of the coordinator, settings, and the totals that are updated."""

    send: Callable[[NodeId, Frame], bool]
    """Function that writes a frame to a node's link and returns whether there is a link."""
    numbers: Callable[[], tuple[int, int]]
    """Function that returns the next number of an attempt or command, and the next sequence number."""
    clock: Callable[[], float]
    """Function that returns monotonic seconds."""
    draw: Callable[[], float]
    """Function that returns numbers in [0, 1), the only source of randomness."""
    settings: RouterSettings
    counters: Counters
    quotas: RateLimits
    scopes: CacheScopes
    policy: Policy
    on_failure: Callable[[ActiveRequest, str], None]
    """Function called before recovery, with a request that failed on its node or lost it, and the failure code."""

    @property
    def interval(self) -> float:
        """Seconds between two calls of `Dispatcher.sweep`.

        The interval is at most `SWEEP_INTERVAL_SECONDS`. It is also at most a quarter of each of these settings: the
        queue timeout, the keep-alive interval, and the time limit for slow clients.
        """
        settings = self.settings
        limits = settings.queue_timeout_seconds, settings.keepalive_seconds, settings.slow_client_seconds
        return min(SWEEP_INTERVAL_SECONDS, min(limits) / 4)


class Parts:
    """Parts of a dispatcher.

    `apply` applies an event to a request. `wake` retries the queued requests on the nodes that have changed.
    """

    def __init__(
        self, surroundings: Surroundings, apply: Callable[[ActiveRequest, Event], None], wake: Callable[[], None]
    ) -> None:
        clock, counters, settings = surroundings.clock, surroundings.counters, surroundings.settings
        self.ledger = ledger = ReservationLedger()
        self.breakers: CircuitBreakers[NodeId] = CircuitBreakers()
        self.affinity = PrefixAffinity()
        self.usage = UsageCounter()
        self.history = DecisionLog()
        self.queue: AdmissionQueue[ActiveRequest] = AdmissionQueue(settings.queue_limit)
        self.changes = changes = NodeChanges(self.queue, ledger, wake)
        self.drains = DrainWaits(ledger)
        self.placer = placer = Placer(
            ledger,
            self.breakers,
            counters,
            self.history,
            policy=surroundings.policy,
            clock=clock,
            draw=surroundings.draw,
        )
        self.crowds = CrowdRules(placer)
        self.upstreams = UpstreamGate(apply, clock, settings, counters)
        self.intake = Intake(
            clock,
            surroundings.draw,
            names=ModelNames(settings),
            placer=placer,
            quotas=surroundings.quotas,
            affinity=self.affinity,
            scopes=surroundings.scopes,
            upstreams_by_default=settings.upstreams_by_default,
        )
        self.aliases = aliases = AliasPlacement(
            apply, clock, placer=placer, intake=self.intake, crowds=self.crowds, gate=self.upstreams
        )
        self.attempts = attempts = Attempts(
            surroundings.send,
            clock,
            placer=placer,
            ledger=ledger,
            breakers=self.breakers,
            affinity=self.affinity,
            counters=counters,
            scopes=surroundings.scopes,
            changes=changes,
            drains=self.drains,
        )
        self.endings = Endings(
            apply,
            clock,
            placer=placer,
            accounting=Accounting(counters, self.usage, self.history),
            quotas=surroundings.quotas,
        )
        self.assignment = Assignment(
            apply,
            surroundings.numbers,
            aliases=aliases,
            placer=placer,
            attempts=attempts,
            ledger=ledger,
            queue=self.queue,
            crowds=self.crowds,
            endings=self.endings,
        )
        self.waiting = QueuedRequests(
            apply,
            clock,
            settings.queue_timeout_seconds,
            queue=self.queue,
            aliases=aliases,
            placer=placer,
            assignment=self.assignment,
            endings=self.endings,
            crowds=self.crowds,
            ledger=ledger,
            quotas=surroundings.quotas,
            counters=counters,
            changes=changes,
        )
        self.swaps = SwapTurns(
            settings,
            clock,
            queue=self.queue,
            placer=placer,
            assignment=self.assignment,
            attempts=attempts,
            ledger=ledger,
            counters=counters,
            changes=changes,
        )
        self.migration = Migration(
            apply,
            surroundings.numbers,
            clock,
            placer=placer,
            attempts=attempts,
            ledger=ledger,
            counters=counters,
            drains=self.drains,
        )
        self.losses = Losses(
            apply,
            clock,
            surroundings.on_failure,
            placer=placer,
            attempts=attempts,
            assignment=self.assignment,
            breakers=self.breakers,
            counters=counters,
        )
        self.commands = NodeCommands(surroundings.send, lambda: surroundings.numbers()[0])
        self.frames = NodeFrames(
            apply,
            clock,
            attempts=attempts,
            commands=self.commands,
            placer=placer,
            assignment=self.assignment,
            endings=self.endings,
            losses=self.losses,
            breakers=self.breakers,
            counters=counters,
        )
        self.watchdog = StreamWatchdog(
            apply,
            counters,
            interval=surroundings.interval,
            slow_seconds=settings.slow_client_seconds,
            keepalive_seconds=settings.keepalive_seconds,
        )

    def build_performers(
        self, start: Callable[[ActiveRequest, StartAttempt], None]
    ) -> Mapping[type[Action], Callable[[ActiveRequest, Any], None]]:
        """Return the function that performs each action, by the type of the action. `start` performs `StartAttempt`."""
        return {
            StartAttempt: start,
            Release: self.attempts.release,
            CancelAttempt: self.attempts.cancel,
            CorrectHeadroom: self.placer.correct_headroom,
            Enqueue: self.waiting.enqueue,
            Dequeue: self.waiting.dequeue,
            Withdraw: self.waiting.withdraw,
            RecordPrompt: self.attempts.record_prompt,
            PrefillDone: self.attempts.record_prefill_end,
            EndRequest: self.endings.end,
            HandOver: self.endings.announce_upstream,
        }


def get_policy(settings: RouterSettings) -> Policy:
    """Return the placement policy that the settings name."""
    return POLICIES[settings.policy]
