"""Commands about models to nodes: load, unload, profile, and clear caches. This module chooses the nodes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from msgspec.structs import replace as changed

from coordinator.observe.node_rows import get_measured_memory
from router.dispatch.dispatcher import Dispatcher
from router.dispatch.node_commands import Kind
from router.dispatch.request import RequestFailure
from router.placement.cluster_view import NodeView
from router.placement.model_load import LoadPlacement
from wire.codec import TAG_OF
from wire.frames import ClearCache, Finished, LoadModel, ProfileModel, UnloadModel
from wire.identity import NodeId
from wire.node_state import GONE, NodeState
from wire.refusals import RefusalCode, Refused
from wire.report import Model


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Result of a command that a node has carried out: load, unload, profile or clear cache."""

    node: NodeId
    name: str
    """Display name of the node."""
    seconds: float
    """Duration of the command in seconds; 0 if `already`."""
    already: bool = False
    """Whether the model was already loaded. In that case no command was sent."""
    model: Model | None = None
    """Model with the measurements of a profile; None for other commands."""

    def to_row(self) -> dict[str, object]:
        """Return the result as a row of the API. The row of a profile has its measurements in `measured`."""
        extra: dict[str, object] = {} if self.model is None else {"measured": get_measured_memory(self.model)}
        return {"id": self.node, "name": self.name, "seconds": round(self.seconds, 3), "already": self.already, **extra}


CommandOutcome = CommandResult | Refused | RequestFailure


class ModelOperations:
    """Commands about models to nodes, through the dispatcher. `clock` returns monotonic seconds."""

    def __init__(self, dispatcher: Dispatcher, clock: Callable[[], float]) -> None:
        self._dispatcher = dispatcher
        self._clock = clock

    async def load_model(self, model: str, node: NodeView | None) -> CommandOutcome:
        """Load a model on `node`. None means the best node, or the next best if a node refuses.

        Return the result once the model is loaded, or the refusal or first failure. If all nodes refuse, return their
        joined refusals. A cancellation ends the wait, not the load. The timeout of each node is
        `node_commands.COMMAND_TIMEOUT_SECONDS`.
        """
        if node is not None:
            choice = LoadPlacement(node.id, node.name, _is_loaded(node, model))
            return self._dispatcher.placer.find_unavailable_refusal(node) or await self._load_on(choice, model)
        tried: dict[NodeId, Refused] = {}
        while True:
            choice = self._dispatcher.placer.choose_load_node(model, tried)
            if isinstance(choice, Refused):
                return _join_refusals(tried) or choice
            answer = await self._load_on(choice, model)
            if not isinstance(answer, Refused):
                return answer
            tried[choice.node] = answer

    async def _load_on(self, choice: LoadPlacement, model: str) -> CommandOutcome:
        if choice.loaded:
            return CommandResult(choice.node, choice.name, 0.0, already=True)
        return await self._send_command(LoadModel, choice.node, choice.name, model)

    async def profile_model(
        self, model: str, node: NodeView | None
    ) -> tuple[list[CommandResult], Refused | RequestFailure | None]:
        """Measure the memory of a model. Return the results, and one error for all nodes that failed, or None.

        The nodes are `node`; if it is None, every node that has the model loaded; if there is none, the best node for a
        load. A cancellation ends the measurements, but not a load. The timeout is
        `node_commands.COMMAND_TIMEOUT_SECONDS`.
        """
        holders = [
            member for member in self._dispatcher.view.nodes if member.state not in GONE and _is_loaded(member, model)
        ]
        nodes = [node] if node is not None else holders
        if not nodes:
            choice = self._dispatcher.placer.choose_load_node(model, {})
            if isinstance(choice, Refused):
                return [], choice
            answers = [await self._send_command(ProfileModel, choice.node, choice.name, model)]
        else:
            answers = await asyncio.gather(*(self._profile_on(model, member) for member in nodes))
        return _split_results(answers, "measured")

    async def _profile_on(self, model: str, node: NodeView) -> CommandOutcome:
        return self._dispatcher.placer.find_unavailable_refusal(
            replace(node, cordoned=False)
        ) or await self._send_command(ProfileModel, node.id, node.name, model)

    async def unload_model(
        self, model: str, node: NodeView | None
    ) -> tuple[list[CommandResult], Refused | RequestFailure | None]:
        """Unload a model from `node`; None: from every node that has it loaded.

        Return the results, and one error for all nodes that failed, or None. If no node has the model loaded, the error
        is a refusal. Cordoned nodes are included, because an administrator cordons a node to end its work. Wait for all
        nodes, for at most `node_commands.COMMAND_TIMEOUT_SECONDS`.
        """
        view = self._dispatcher.view
        holders = [member for member in view.nodes if member.state not in GONE and _is_loaded(member, model)]
        nodes = [node] if node is not None else holders
        if not nodes:
            return [], Refused(RefusalCode.NO_MODEL, f"{model} is loaded on no node")
        answers = await asyncio.gather(*(self._unload_from(model, member) for member in nodes))
        return _split_results(answers, "unloaded")

    async def _unload_from(self, model: str, node: NodeView) -> CommandOutcome:
        away = self._dispatcher.placer.find_unavailable_refusal(replace(node, cordoned=False))
        return away or await self._send_command(UnloadModel, node.id, node.name, model)

    async def clear_cache(
        self, model: str, node: NodeView | None
    ) -> tuple[list[CommandResult], Refused | RequestFailure | None]:
        """Delete the cached prompts of a model (empty: all models) on `node`; None: on every node that may have them.

        Return the results, and one error for all nodes that failed, or None. If no node may have cached prompts, the
        error is a refusal. An absent node may have cached prompts in its files, and counts as failed, as does a node
        that is too old. Wait for all nodes, for at most `node_commands.COMMAND_TIMEOUT_SECONDS`.
        """
        members = [member for member in self._dispatcher.view.nodes if member.state is not NodeState.LEFT]
        nodes = [member for member in members if _may_cache(member, model)] if node is None else [node]
        if not nodes:
            return [], Refused(RefusalCode.NO_MODEL, f"no node has cached prompts of {model or 'any model'}")
        answers = await asyncio.gather(*(self._clear_cache_of(model, member) for member in nodes))
        return _split_results(answers, "cleared")

    async def _clear_cache_of(self, model: str, node: NodeView) -> CommandOutcome:
        away = self._dispatcher.placer.find_unavailable_refusal(replace(node, cordoned=False))
        old = None if TAG_OF[ClearCache] in node.frames else _build_old_node_refusal(node)
        return away or old or await self._send_command(ClearCache, node.id, node.name, model)

    async def _send_command(self, kind: Kind, node: NodeId, name: str, model: str) -> CommandOutcome:
        begun = self._clock()
        ended = await self._dispatcher.commands.send(kind, node, name, model)
        if not isinstance(ended, Finished):
            return ended
        return CommandResult(node, name, self._clock() - begun, model=ended.measured)


def _is_loaded(node: NodeView, model: str) -> bool:
    return model in node.models and node.models[model].loaded


def _may_cache(node: NodeView, model: str) -> bool:
    """Return whether a node may have cached prompts of a model, by its name or fingerprint; empty: of any model."""
    return not model or model in node.models or any(entry.model == model for entry in node.engine.cache.models)


def _build_old_node_refusal(node: NodeView) -> Refused:
    """Return the refusal for a node that would ignore the command and therefore never send a result."""
    text = f"the macpool on {node.name} is older than this command: update macpool there"
    return Refused(RefusalCode.UNSUPPORTED, text, None, None, node.name)


def _join_refusals(tried: dict[NodeId, Refused]) -> Refused | None:
    """Join the refusals of all nodes; None without refusals.

    The numbers are those of the first node, which was the best choice.
    """
    if not tried:
        return None
    first = next(iter(tried.values()))
    return changed(first, message="; ".join(refused.message for refused in tried.values()))


def _split_results(
    answers: Sequence[CommandOutcome], verb: str
) -> tuple[list[CommandResult], Refused | RequestFailure | None]:
    """Return the results, and all errors as one, or None without errors.

    The error text also names the nodes that succeeded. All other fields are those of the first error.
    """
    done = [answer for answer in answers if isinstance(answer, CommandResult)]
    wrong = [answer for answer in answers if not isinstance(answer, CommandResult)]
    if not wrong:
        return done, None
    text = "; ".join(fault.message for fault in wrong)
    if done:
        text += f"; {verb} on {', '.join(node.name for node in done)}"
    return done, changed(wrong[0], message=text)
