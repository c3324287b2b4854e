"""Schedule the arrivals of a simulation: each turn of a conversation follows the answer to the previous turn."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable

from simulation.workload import ConversationTurn, SimulatedConversation


class Arrivals:
    """Scheduler of the turns of `conversations`, which must be in order of their start.

    `arrive(turn)` is called when a turn arrives.
    """

    def __init__(
        self,
        conversations: Iterable[SimulatedConversation],
        loop: asyncio.AbstractEventLoop,
        arrive: Callable[[ConversationTurn], None],
    ) -> None:
        self._loop = loop
        self._arrive = arrive
        self._conversations = deque(conversations)
        self._rest: dict[str, list[ConversationTurn]] = {}
        self._open = 0
        self._over = asyncio.Event()
        self.turns: dict[str, ConversationTurn] = {}
        """Turns that have arrived, by request id."""
        self.finished_at = 0.0
        """Virtual time in seconds at which the last request ended; 0 before the end of all conversations."""

    def start(self) -> None:
        """Schedule the start of the first conversation. Each start schedules that of the next conversation.

        Without conversations, `wait` returns at once.
        """
        if self._conversations:
            self._loop.call_at(self._conversations[0].at, self._next_conversation)
        else:
            self._over.set()

    async def wait(self) -> None:
        """Wait until all conversations have started and all of their requests have ended, without a time limit."""
        await self._over.wait()

    def _next_conversation(self) -> None:
        conversation = self._conversations.popleft()
        self._open += 1
        if self._conversations:
            self._loop.call_at(max(self._conversations[0].at, self._loop.time()), self._next_conversation)
        self._next_turn(conversation.turns)

    def _next_turn(self, turns: list[ConversationTurn]) -> None:
        turn, *rest = turns
        self.turns[turn.id] = turn
        if rest:
            self._rest[turn.id] = rest
        self._arrive(turn)

    def end(self, request_id: str, *, served: bool) -> None:
        """Record the end of a request. `served` is whether its answer is complete.

        After a complete answer, the next turn of the conversation arrives after its `think` seconds. Otherwise the
        conversation ends.
        """
        self._open -= 1
        rest = self._rest.pop(request_id, [])
        if rest and served:
            self._loop.call_later(rest[0].think, self._next_turn, rest)
            self._open += 1
        if not self._open and not self._conversations:
            self.finished_at = self._loop.time()
            self._over.set()
