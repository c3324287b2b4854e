"""Prefills of the scripted engine: which prompts are prefilled next, and how large their chunks are.

All rules are those of the text engine (`node.engine.scheduling.rules`). A prefill that takes no time
(`EngineCosts.free_prefill`) is neither packed nor divided into chunks.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from node.engine.scheduling.rules.chunk_policy import (
    FULL_PROMPT_SECONDS,
    MAX_CACHED_SHARE,
    compute_affordable_tokens,
    compute_shared_budget,
    next_prefill,
    select_batch,
)
from node.engine.scheduling.rules.prefill_order import compute_packing_time, iterate_in_service_order, select_startable
from node.engine.scripted.costs import EngineCosts
from node.engine.scripted.sequence import ScriptedSequence
from node.engine.scripted.table import ScriptedTable
from wire.capacity.fairness import CROWDED_PROMPTS, PrefillFairness


class PrefillChunk(NamedTuple):
    """Prefill of one turn: a chunk of one prompt, or several whole prompts in one forward."""

    members: tuple[ScriptedSequence, ...]
    """Prompts of the prefill."""
    tokens: int
    """Number of tokens in the chunk of a single prompt; 0 for several prompts."""
    seconds: float
    """Duration of the forward in seconds."""

    def start(self) -> None:
        """Record that the prompts have caches."""
        for member in self.members:
            member.start()

    @property
    def packed(self) -> bool:
        """Whether several prompts are prefilled in one forward."""
        return len(self.members) > 1

    @property
    def completes(self) -> bool:
        """Whether a prompt is complete after this chunk."""
        return self.packed or self.tokens >= self.members[0].left


class ScriptedPrefills:
    """Choices of the next prefills. `chunk`: maximum tokens of a forward. `now` is in monotonic seconds in all
    methods."""

    def __init__(self, table: ScriptedTable, costs: EngineCosts, chunk: int) -> None:
        self._table = table
        self._costs = costs
        self._chunk = chunk
        self._turn = 0
        self._fairness = PrefillFairness()

    def next_free(self, now: float) -> ScriptedSequence | None:
        """Return the next request whose prefill takes no time. Return None if prefills take time, no request is queued,
        or no queued request may start now."""
        table = self._table
        if not self._costs.free_prefill or not table.queue or table.rows >= table.most:
            return None
        if table.count_unclaimed_rows() >= 0 and table.queue[0].retry_at <= now:  # there is room for all
            return table.queue[0]
        return next(iter(self.list_choices(now)), None)

    def next_unstarted(self) -> ScriptedSequence | None:
        """Return the prompt that gets rows in the decode batch next; None if all prompts have started."""
        return next(iterate_in_service_order(self._table.queue, self._table.count_rows_by_key()), None)

    def list_choices(self, now: float) -> list[ScriptedSequence]:
        """Return the prompts whose prefill may start or continue at `now` (`select_startable`). Prompts that the gate
        refused are left out until their `retry_at`."""
        table = self._table
        if not table.queue:
            return []
        found = select_startable(table.queue, table.count_free_rows(), table.count_rows_by_key)
        return [request for request in found if request.retry_at <= now]

    def compute_packing_time(self, choices: Sequence[ScriptedSequence]) -> float:
        """Return the monotonic time until which `choices` wait for packing; 0.0 if they do not wait."""
        table = self._table
        if (
            table.rows
            or any(choice.started for choice in choices)
            or sum(choice.width for choice in choices) >= table.most
        ):
            return 0.0
        return compute_packing_time([choice.arrived for choice in choices], table.crowded_at)

    def schedule(
        self, choices: Sequence[ScriptedSequence], step: float, *, leap: bool
    ) -> tuple[list[PrefillChunk], int]:
        """Return the prefills of the next turns, and the number of these turns.

        Without `leap`, return one prefill and 1. With `leap`, return one prefill that repeats in all these turns, or
        two prefills that alternate. No prompt is complete before the last of these turns, and all chunks and choices
        equal those of single turns. `step` is the duration of a decode step in seconds (0: no row decodes). `choices`
        must not be empty.
        """
        first = self._build_chunk(self._choose_prompt(choices, 1), choices, step)
        if not leap or first.completes:
            return [first], 1
        if len(choices) == 1:
            return [first], self._count_equal_chunks(first, step)
        second = self._build_chunk(self._choose_prompt(self._sort_after_start(choices, first), 2), choices, step)
        if second.completes or self._is_crowded(choices):
            return [first], 1
        if second.members == first.members:
            return [first], self._count_equal_chunks(first, step)
        third = self._choose_prompt(self._sort_after_start(choices, first, second), 3)
        rounds = self._count_equal_rounds(first, second, step) if third is first.members[0] else 0
        return ([first, second], 2 * rounds) if rounds else ([first], 1)

    def _sort_after_start(self, choices: Sequence[ScriptedSequence], *chunks: PrefillChunk) -> list[ScriptedSequence]:
        """Return `choices` in their order after the start of `chunks`: started prompts come first."""
        starting = [member for chunk in chunks for member in chunk.members]
        started = [
            request for request in self._table.queue if request in choices and (request.started or request in starting)
        ]
        return [*started, *(choice for choice in choices if choice not in started)]

    def _count_equal_rounds(self, first: PrefillChunk, second: PrefillChunk, step: float) -> int:
        """Return how often two prefills alternate before a chunk or a choice would differ."""
        rounds = min(self._count_equal_chunks(chunk, step) for chunk in (first, second))
        shorter, longer = sorted((first, second), key=lambda chunk: chunk.members[0].left)
        lead = longer.members[0].left - shorter.members[0].left
        if longer is first:  # the shorter prompt is chosen after a chunk of the longer prompt
            lead -= longer.tokens
        if lead <= 0:
            return 0
        gain = longer.tokens - shorter.tokens
        return min(rounds, (lead - 1) // gain) if gain > 0 else rounds

    def _count_equal_chunks(self, chunk: PrefillChunk, step: float) -> int:
        """Return how many chunks of this size follow each other before the budget or the size changes."""
        pace, left = self._costs.get_pace(chunk.members[0].model), chunk.members[0].left
        if pace.fixed or pace.far:
            return 1
        whole = FULL_PROMPT_SECONDS / pace.each if step else 0.0
        return max(1, math.ceil((left - max(whole, chunk.tokens)) / chunk.tokens))

    def _is_crowded(self, choices: Sequence[ScriptedSequence]) -> bool:
        """Return whether fairness between keys may choose another prompt in every turn."""
        return max(Counter(choice.weighted_key.name for choice in choices).values()) > CROWDED_PROMPTS

    def _choose_prompt(self, choices: Sequence[ScriptedSequence], ahead: int) -> ScriptedSequence:
        """Return the prompt of the turn that is `ahead` turns after the last turn."""
        shown = [(choice.left, choice.arrived, choice.weighted_key) for choice in choices]
        return choices[next_prefill(shown, self._turn + ahead, self._fairness)]

    def _build_chunk(self, first: ScriptedSequence, choices: Sequence[ScriptedSequence], step: float) -> PrefillChunk:
        pace, past = self._costs.get_pace(first.model), first.length - first.left
        most = compute_affordable_tokens(pace, first.left, past, step, self._chunk)
        members = [first] if most < first.left else self._select_members(first, choices, step)
        if len(members) == 1:
            tokens = min(most, first.left)
            return PrefillChunk((first,), tokens, pace.estimate_seconds(tokens, past) if tokens else 0.0)
        longest = max(member.left for member in members) - 1
        return PrefillChunk(tuple(members), 0, pace.estimate_seconds(len(members) * longest, 0))

    def _select_members(
        self, first: ScriptedSequence, choices: Sequence[ScriptedSequence], step: float
    ) -> list[ScriptedSequence]:
        """Return the prompts to pack with `first`: prompts of its batch, if there is time for all of them at once."""
        if not _is_packable(first):
            return [first]
        batch = _get_batch_number(first)
        members = [first]
        members += [
            choice
            for choice in choices
            if choice is not first
            and choice.model == first.model
            and _is_packable(choice)
            and _get_batch_number(choice) == batch
        ]
        seconds = compute_shared_budget(step, len(choices), self._table.rows)
        most = self._costs.get_pace(first.model).fit_tokens(seconds, 0, self._chunk)
        return [members[place] for place in select_batch([member.length - 1 for member in members], most)]

    def count_turns(self, turns: int) -> None:
        """Count turns with a prefill, because turns alternate between the shortest and the oldest prompt."""
        self._turn += turns

    def count_prefilled(self, sequence: ScriptedSequence, tokens: int) -> None:
        """Count `tokens` prefilled tokens of a request, for the fairness between keys."""
        self._fairness.count_prefilled(sequence.weighted_key, tokens)


def _is_packable(sequence: ScriptedSequence) -> bool:
    """Return whether a prompt may be packed: it has one row, has not started, and little of it is cached."""
    if sequence.started or sequence.width > 1:
        return False
    return sequence.length > 1 and sequence.warm < MAX_CACHED_SHARE * sequence.length


def _get_batch_number(sequence: ScriptedSequence) -> int:
    return sequence.ledger.get_batch_number(sequence.list_active_rows()[0].commitment)
