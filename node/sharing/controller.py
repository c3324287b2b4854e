"""Apply `node.sharing.policy`: read pause, clocks and power supply, and perform the actions that are due.

The pause is stored in a file (`host.node_marks`) and therefore survives restarts. `cluster pause` on this machine
writes the file directly; the coordinator sets the pause by a frame. The controller checks the file every
`POLL_INTERVAL_SECONDS`.
"""

import asyncio
import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import structlog

from host.node_marks import PauseFile
from host.node_marks import PauseRecord as Kept
from host.power import PowerState, read_power
from node.settings import SharingSettings
from node.sharing.policy import (
    SHARED,
    GracePeriods,
    Occupancy,
    ShareWhen,
    SharingAction,
    SharingInputs,
    SharingPause,
    SharingRule,
    SharingState,
    decide_sharing,
    is_charge_too_low,
    list_due_actions,
    parse_hours,
)
from wire.frames import PauseNode as Order
from wire.report import Sharing

POLL_INTERVAL_SECONDS = 1.0
"""Seconds between two decisions, which check the pause, the clock and the running work."""
SENSOR_INTERVAL_SECONDS = 5.0
"""Minimum seconds between readings of power supply and last input, because on macOS each reading starts a tool."""

log = structlog.get_logger("node.sharing.controller")


class SharingTarget(Protocol):
    """Interface through which the controller reads and changes the node (`node.agent.sharing_effects`)."""

    def read_occupancy(self) -> Occupancy:
        """Return the current use of the node, which decides the due actions."""
        ...

    def apply_sharing_action(self, act: SharingAction, sharing: SharingState) -> None:
        """Perform an action that is due. `sharing` has the reason."""
        ...

    def on_sharing_change(self, sharing: SharingState) -> None:
        """Handle a changed decision: report it to the coordinator, and start no work while this Mac does not share."""
        ...


class SharingController:
    """Controller that decides whether this Mac accepts work now, and applies the decision to `target`.

    `folder` is the folder of the node (STATE/node), with the pause file. `read()` returns the power supply, battery and
    idle time, and may block. `wall()` returns Unix seconds. Call all methods on the loop that called `start`. The
    constructor raises `ValueError` for invalid hours.
    """

    def __init__(
        self,
        settings: SharingSettings,
        folder: Path,
        target: SharingTarget,
        *,
        read: Callable[[], PowerState] = read_power,
        wall: Callable[[], float] = time.time,
    ) -> None:
        hours = parse_hours(settings.hours) if settings.hours else None
        self._rule = SharingRule(ShareWhen(settings.when), hours, settings.idle_seconds, settings.min_battery_percent)
        self._grace = GracePeriods(settings.grace_seconds, settings.video_grace_seconds)
        self._file = PauseFile(folder)
        self._target = target
        self._read, self._wall = read, wall
        self._power = PowerState()
        self._read_at = -math.inf
        self._low = False
        self._stamp: tuple[int, int] | None = None
        self._pause: SharingPause | None = None
        self._changed_at = -math.inf
        self._task: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()
        self.sharing_state: SharingState = SHARED
        """Last decision."""

    async def start(self) -> None:
        """Decide whether this Mac accepts work, now and then every `POLL_INTERVAL_SECONDS` in the background.

        The decisions end with `stop`.
        """
        await self.read_power()
        self.update()
        log.info(
            "sharing",
            when=self._rule.when.value,
            hours=str(self._rule.hours or ""),
            battery=self._rule.battery,
            shared=self.sharing_state.shared,
            why=self.sharing_state.why,
        )
        self._task = asyncio.create_task(self._update_periodically())

    async def stop(self) -> None:
        """Stop the periodic decisions, and wait until a running one has stopped."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def update_now(self) -> None:
        """Make the next periodic decision now, because a request has ended."""
        self._woken.set()

    def to_report(self) -> Sharing:
        """Return the decision in the form of a node's report."""
        state = self.sharing_state
        return Sharing(self._rule.when.value, not state.shared, state.why, state.until, state.by_hand)

    def compute_retry_after(self) -> float | None:
        """Return the seconds until this Mac accepts work again, at least 1.

        Return None if this Mac accepts work now, or if the time is unknown.
        """
        until = self.sharing_state.until
        return None if until is None else max(1.0, until - self._wall())

    def apply_order(self, order: Order) -> None:
        """Set or remove the pause by an order of the coordinator, and decide again (`update`).

        The duration 0 removes the pause; None sets a pause without an end. After a write error, which is logged, the
        pause is unchanged.
        """
        try:
            if order.seconds is None or order.seconds > 0:
                until = None if order.seconds is None else self._wall() + order.seconds
                self._file.write(Kept(until, order.by))
            else:
                self._file.remove()
        except OSError as error:
            log.error("pause unwritable", error=str(error))  # noqa: TRY400  the sentence is for a person
        self.update()

    def update(self) -> None:
        """Read pause and clock, decide, notify `target` of a changed decision, and perform the actions that are due."""
        now, clock = self._wall(), asyncio.get_running_loop().time()
        self._read_file()
        facts = SharingInputs(
            self._pause,
            self._power.plugged,
            self._power.idle_s,
            _compute_second_of_day(now),
            self._power.battery,
            self._low,
        )
        self._low = is_charge_too_low(self._rule, facts)
        before, self.sharing_state = self.sharing_state, decide_sharing(self._rule, facts, now)
        if before.shared != self.sharing_state.shared:
            self._changed_at = clock
            log.info(
                "shared" if self.sharing_state.shared else "paused",
                why=self.sharing_state.why,
                until=self.sharing_state.until,
            )
        if before != self.sharing_state:
            self._target.on_sharing_change(self.sharing_state)
        for act in list_due_actions(
            self.sharing_state.shared, self._target.read_occupancy(), clock - self._changed_at, self._grace
        ):
            self._target.apply_sharing_action(act, self.sharing_state)

    async def _update_periodically(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._woken.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL_SECONDS):
                    await self._woken.wait()
            try:
                if loop.time() - self._read_at >= SENSOR_INTERVAL_SECONDS:
                    await self.read_power()
                self.update()
            except Exception:
                log.exception("sharing")  # the last decision holds until the next check

    async def read_power(self) -> None:
        """Read power supply, battery and idle time in a thread, if the rule depends on them."""
        if self._rule.when in (ShareWhen.PLUGGED_IN, ShareWhen.IDLE) or self._rule.battery:
            self._power = await asyncio.to_thread(self._read)
        self._read_at = asyncio.get_running_loop().time()

    def _read_file(self) -> None:
        """Read a pause that was written, changed or removed. An unreadable file is a pause without an end."""
        try:
            stamp = self._file.read_stamp()
            if stamp != self._stamp:
                stored = None if stamp is None else self._file.read()
                self._pause = None if stored is None else SharingPause(stored.until, stored.by)
        except FileNotFoundError:
            return  # removed meanwhile: the next check sees that
        except (OSError, ValueError) as error:
            log.error("pause unreadable", error=str(error))  # noqa: TRY400  the sentence is for a person
            self._pause = SharingPause(None, "a pause file that cannot be read: `cluster resume` removes it")
            stamp = self._read_file_stamp()
        self._stamp = stamp

    def _read_file_stamp(self) -> tuple[int, int] | None:
        with suppress(OSError):
            return self._file.read_stamp()
        return None


def _compute_second_of_day(now: float) -> float:
    local = time.localtime(now)
    return local.tm_hour * 3600 + local.tm_min * 60 + local.tm_sec + now % 1
