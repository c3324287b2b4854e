"""Loop that carries out the plans of the reconciler: reads the pool, sends commands to nodes, and records their ends.

A new view of the pool, a changed wish or the end of an action wakes the loop, at most once per `ROUND_SECONDS`. Without
wishes, views wake it at most once per `IDLE_ROUND_SECONDS`. Each action is a task that waits for its command. The tasks
end with the loop, but a load continues on its node. A round that fails because of a bug is logged, and the next round
starts from the view.
"""

import asyncio
from collections.abc import Callable, Mapping

import structlog

from coordinator.cluster.model_operations import CommandResult, ModelOperations
from coordinator.models.action_history import ActionBegan, ActionEnded, ActionHistory, RoundBegan, step
from coordinator.models.reconciler import find_ready_replicas, plan_actions
from coordinator.models.wish_counters import ActionOutcome, WishCounters, WishSnapshot
from coordinator.models.wishes import LoadWish, Plan, PoolState, Wish, WishAction
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.request import RequestFailure
from wire.identity import NodeId
from wire.refusals import RefusalCode, Refused
from wire.state_machine import StateMachine

log = structlog.get_logger("coordinator.models.wish_runner")
ROUND_SECONDS = 1.0
"""Minimum seconds between two rounds."""
IDLE_ROUND_SECONDS = 10.0
"""Minimum seconds between two rounds without wishes, which only record the use of models."""
_MEMORY = frozenset({RefusalCode.NO_ROOM, RefusalCode.TOO_LARGE})


class WishRunner:
    """Runner of the reconciler's plans for `wishes` (by model).

    `clock` returns monotonic seconds, as in the times of the dispatcher's view.
    """

    def __init__(
        self,
        wishes: Mapping[str, Wish],
        dispatcher: Dispatcher,
        operations: ModelOperations,
        clock: Callable[[], float],
    ) -> None:
        self._wishes = wishes
        self._dispatcher = dispatcher
        self._illegal_events = dispatcher.counters.illegal_events
        self._operations = operations
        self._clock = clock
        self._history = ActionHistory(clock())
        self._counters = WishCounters()
        self._woken = asyncio.Event()
        self._tasks: dict[NodeId, asyncio.Task[None]] = {}
        self._ended_requests: dict[str, int] = {}
        self._unmet: frozenset[str] = frozenset()
        self._idle_until = 0.0

    def handle_view(self) -> None:
        """Start a round within `ROUND_SECONDS`, because the pool has changed.

        Without wishes, do nothing if the last round began less than `IDLE_ROUND_SECONDS` ago.
        """
        if self._wishes or self._clock() >= self._idle_until:
            self.wake()

    def wake(self) -> None:
        """Start a round within `ROUND_SECONDS`, because a wish has changed or an action has ended."""
        self._woken.set()

    @property
    def running(self) -> tuple[WishAction, ...]:
        """Actions that have begun and not ended."""
        nodes = self._history.nodes.values()
        return tuple(node.running for node in nodes if node.running is not None)

    def build_plan(self) -> Plan:
        """Return the plan that a round would make now, without starting its actions."""
        pool = self._read_pool(frozenset())
        return plan_actions(self._wishes.values(), pool, self._record_round(pool))

    def take_snapshot(self) -> WishSnapshot:
        """Return the counters of the wishes, and the current numbers of their wanted and ready replicas."""
        states = self.build_plan().states if self._wishes else ()
        return WishSnapshot(self._counters, {state.wish.model: (state.wanted, len(state.ready)) for state in states})

    async def run(self) -> None:
        """Carry out the plans until the task is cancelled.

        A round that fails is logged, and the next one starts as usual. A cancellation also ends the wait for running
        actions, but loads continue on their nodes.
        """
        try:
            while True:
                await self._woken.wait()
                self._woken.clear()
                try:
                    with self._illegal_events.count_errors(StateMachine.WISH):
                        self._begin_round()
                except Exception:
                    log.exception("wish round failed")
                await asyncio.sleep(ROUND_SECONDS)
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _begin_round(self) -> None:
        pool = self._read_pool(self._find_requested_models())
        self._idle_until = pool.now + IDLE_ROUND_SECONDS
        self._history = self._record_round(pool)
        plan = plan_actions(self._wishes.values(), pool, self._history)
        self._log_shortfalls(plan)
        for action in plan.actions:
            self._begin_action(action)

    def _read_pool(self, requested: frozenset[str]) -> PoolState:
        dispatcher, now = self._dispatcher, self._clock()
        in_use: dict[NodeId, frozenset[str]] = {}
        for request in dispatcher.list_open_requests() if self._wishes else ():
            if request.node is not None:
                in_use[request.node] = in_use.get(request.node, frozenset()) | {request.demand.model}
        view = dispatcher.placer.mark_failing_nodes(dispatcher.view, now)
        return PoolState(view, dispatcher.ledger, now, in_use, requested)

    def _find_requested_models(self) -> frozenset[str]:
        """Return the models of queued requests, and of those that ended since the last round."""
        counts = {name: sum(counts.outcomes.values()) for name, counts in self._dispatcher.counters.models.items()}
        ended = {name for name, count in counts.items() if count > self._ended_requests.get(name, 0)}
        self._ended_requests = counts
        queued = {request.demand.model for request in self._dispatcher.list_open_requests() if request.node is None}
        return frozenset(ended | queued)

    def _record_round(self, pool: PoolState) -> ActionHistory:
        wishes = self._wishes.values()
        event = RoundBegan(pool, frozenset(self._wishes), find_ready_replicas(wishes, pool, self._history))
        return step(self._history, event, pool.now)

    def _log_shortfalls(self, plan: Plan) -> None:
        """Log the wishes that became unmet or met since the last round."""
        unmet = frozenset(short.model for short in plan.shortfalls)
        for short in plan.shortfalls:
            if short.model not in self._unmet:
                log.info("wish unmet", model=short.model, missing=short.text)
        for model in sorted((self._unmet - unmet) & self._wishes.keys()):
            log.info("wish met", model=model)
        self._unmet = unmet

    # actions

    def _begin_action(self, action: WishAction) -> None:
        self._history = step(self._history, ActionBegan(action), self._clock())
        if isinstance(action, LoadWish):
            log.info("wish loads", model=action.model, node=action.name)
        else:
            log.info("wish unloads", model=action.model, node=action.name, why=action.why, wanted=action.wanted)
        task = asyncio.get_running_loop().create_task(self._perform_action(action))
        self._tasks[action.node] = task

    async def _perform_action(self, action: WishAction) -> None:
        failure: Refused | RequestFailure | None = RequestFailure("internal", f"{action.name}: the command broke off")
        try:
            failure = await self._send(action)
        finally:
            self._end_action(action, failure)

    async def _send(self, action: WishAction) -> Refused | RequestFailure | None:
        """Send the command of an action. Return its refusal or failure; None for a success."""
        node = self._dispatcher.view.find_node(action.node)
        if node is None:
            return Refused(RefusalCode.NOT_READY, f"{action.name} is no member any more")
        if isinstance(action, LoadWish):
            answer = await self._operations.load_model(action.model, node)
            return None if isinstance(answer, CommandResult) else answer
        return (await self._operations.unload_model(action.model, node))[1]

    def _end_action(self, action: WishAction, failure: Refused | RequestFailure | None) -> None:
        del self._tasks[action.node]
        headroom: int | None = None
        outcome = ActionOutcome.DONE
        if isinstance(failure, Refused):
            outcome = ActionOutcome.REFUSED
            node = self._dispatcher.view.find_node(action.node)
            headroom = node.headroom if node is not None and failure.code in _MEMORY else None
        elif failure is not None:
            outcome = ActionOutcome.FAILED
        why = "" if failure is None else failure.message
        with self._illegal_events.count_errors(StateMachine.WISH):
            self._history = step(self._history, ActionEnded(action.node, why, headroom), self._clock())
        self._counters.count_end(action, outcome)
        verb = "load" if isinstance(action, LoadWish) else "unload"
        log.info(f"wish {verb} ended", model=action.model, node=action.name, outcome=outcome, why=why)
        self.wake()
