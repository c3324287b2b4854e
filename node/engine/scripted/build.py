"""Composition of the scripted engine: construct the parts that compute its turns, and connect them."""

from collections.abc import Callable
from typing import NamedTuple

from node.engine.scripted.batch import ScriptedBatch
from node.engine.scripted.costs import EngineCosts
from node.engine.scripted.preemption import BatchMemory, ScriptedPreemptor
from node.engine.scripted.prefills import ScriptedPrefills
from node.engine.scripted.table import ScriptedTable
from node.engine.scripted.turns import ScriptedTurns

MAX_CHUNK_TOKENS = 2048
"""Tokens of the largest prefill forward: the default of the text engine."""


class TurnParts(NamedTuple):
    """Turns of a scripted engine with their parts."""

    table: ScriptedTable
    preemptor: ScriptedPreemptor
    batch: ScriptedBatch
    turns: ScriptedTurns


def _ignore_call(number: int) -> None:
    """Ignore a request that would end the process."""


def build_turns(
    memory: BatchMemory,
    costs: EngineCosts,
    rows: int,
    *,
    leap: bool,
    crash: Callable[[int], None] = _ignore_call,
) -> TurnParts:
    """Construct the turns of an engine that decodes at most `rows` rows at once. Return them with their parts.

    `costs` are the durations of forwards. With `leap`, equal turns are computed at once. `crash(number)` is called in
    the first decode step of a request that must crash.
    """
    table = ScriptedTable(rows)
    preemptor = ScriptedPreemptor(table, memory)
    prefills = ScriptedPrefills(table, costs, MAX_CHUNK_TOKENS)
    batch = ScriptedBatch(table, memory, preemptor, prefills, silent_joins=costs.free_prefill, crash=crash)
    return TurnParts(table, preemptor, batch, ScriptedTurns(table, batch, preemptor, prefills, costs, leap=leap))
