"""Exact counts of prompts, by a node that has the model's tokenizer; nothing is generated, promised or loaded."""

import asyncio

from router.dispatch import Dispatcher
from router.orders import Ended
from router.problems import Problem, failed, from_refused
from router.view import ClusterView, NodeView
from wire.frames import Count, Finished
from wire.refusals import FINAL, Code, Refused

LONGEST = 30.0
"""Seconds for which a node is waited for: a tokenizer reads some megabytes of text in a second."""
_ELSEWHERE = frozenset({Code.NO_MODEL, Code.LOAD_FAILED})


async def count(dispatcher: Dispatcher, asked: Count) -> int | Problem:
    """Ask one node after the other, those first that have the model loaded; give the tokens, or why nobody can say."""
    why: Refused | None = None
    for node in _able(dispatcher.view, asked.model, dispatcher):
        away = dispatcher.away(node)
        if away is not None:
            why = why or away
            continue
        ended = await _ask(dispatcher, node, asked)
        if isinstance(ended, Finished):
            return ended.prompt_tokens
        if not isinstance(ended, Refused):
            return failed(ended.code, ended.message)
        if ended.code in FINAL - _ELSEWHERE:
            return from_refused(ended)
        why = ended
    return from_refused(why or Refused(Code.NO_MODEL, f"no node serves the model {asked.model!r}"))


async def _ask(dispatcher: Dispatcher, node: NodeView, asked: Count) -> Ended:
    try:
        async with asyncio.timeout(LONGEST):
            return await dispatcher.orders.count(node.id, node.name, asked)
    except TimeoutError:
        return Refused(Code.NOT_READY, f"{node.name} has not counted within {LONGEST:.0f} s", None, 2.0, node.name)


def _able(view: ClusterView, model: str, dispatcher: Dispatcher) -> list[NodeView]:
    able = [node for node in view.nodes if model in node.models and not node.models[model].cause]
    return sorted(able, key=lambda node: (not node.models[model].loaded, dispatcher.in_flight(node.id)))
