"""Construct the parts of a node and connect them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from node.agent.agent import Agent, AgentParts
from node.agent.fetch import FetchAnswers
from node.agent.identity import NodeIdentity
from node.agent.link_keeper import LinkTimeouts
from node.agent.links import CoordinatorLinks
from node.agent.reporter import Reporter
from node.agent.sharing_effects import SharingEffects
from node.engine_process.supervisor import COMMAND, Supervisor
from node.engine_process.timeouts import SupervisorTimeouts
from node.hub.file_orders import ModelFileOrders
from node.hub.idle_hasher import IdleHasher
from node.hub.quantization.quantizer import Quantizer
from node.illegal_events import IllegalEvents
from node.memory.limits import Limiter
from node.memory.poll import MemoryPoll
from node.memory.sensor import MachineMemory
from node.models.folders import get_own_folder
from node.notifier import Notifier
from node.settings import NodeSettings
from node.sharing.controller import SharingController
from node.video.wiring import VideoSubsystem
from wire.codec import encode
from wire.frames import RescanModels
from wire.report import Hardware


@dataclass(frozen=True, slots=True)
class Node:
    """Parts of a node that its program starts and stops."""

    agent: Agent
    supervisor: Supervisor
    poll: MemoryPoll
    video: VideoSubsystem
    sharing: SharingController
    reporter: Reporter
    model_orders: ModelFileOrders
    hasher: IdleHasher

    def is_working(self) -> bool:
        """Return whether a request runs or is queued, memory is leased, or an order about model files runs."""
        return self.reporter.is_busy() or self.model_orders.is_working()


def assemble(
    identity: NodeIdentity,
    settings: NodeSettings,
    state: Path,
    machine: MachineMemory,
    limiter: Limiter,
    hardware: Hardware,
    *,
    version: str,
    on_ready: Callable[[str], None] = lambda address: None,
    engine_command: Sequence[str] = COMMAND,
    engine_timeouts: SupervisorTimeouts | None = None,
    link_timeouts: LinkTimeouts | None = None,
) -> Node:
    """Construct the parts of a node and connect them. Nothing is started.

    `state` is the state folder, `version` the installed version of Macpool. `on_ready` is called with the coordinator's
    address (`host:port`) when the node is linked and its engine is ready, possibly several times. Tests replace the
    command of the engine process and the timeouts; None selects the defaults. Raise `OSError` or `ValueError` if the
    certificate or the CA of the identity cannot be used.
    """
    settings = add_own_folder(settings, state)
    links, engine_changed, video_changed = CoordinatorLinks(), Notifier(), Notifier()
    illegal_events = IllegalEvents()
    supervisor = Supervisor(
        settings,
        on_frame=links.forward_from_engine,
        on_change=engine_changed.notify,
        log_file=state / "logs" / "engine.log",
        scratch=state / "node" / "scratch",
        wired=limiter.read_wired,
        illegal_events=illegal_events,
        command=engine_command,
        timeouts=engine_timeouts,
    )
    poll = MemoryPoll(limiter, machine, supervisor)
    video = VideoSubsystem(
        settings,
        state,
        limiter,
        poll,
        supervisor,
        send=links.send,
        changed=video_changed.notify,
        illegal_events=illegal_events,
    )
    quantizer = Quantizer(settings, state, limiter, poll, supervisor)
    effects = SharingEffects(links, supervisor, video.lease_manager, quantizer, video.pause)
    sharing = SharingController(settings.sharing, state / "node", effects)
    reporter = Reporter(
        settings,
        hardware,
        links,
        supervisor=supervisor,
        limiter=limiter,
        poll=poll,
        lease_manager=video.lease_manager,
        ray=video.ray,
        sharing=sharing,
        illegal_events=illegal_events,
    )
    answers = FetchAnswers(state / "logs" / "node.log", supervisor, video.lease_manager)
    model_orders = ModelFileOrders(
        settings.models,
        identity,
        state / "node",
        links,
        quantizer,
        is_loaded=supervisor.reports.has_model_in_memory,
        on_change=lambda: supervisor.send(encode(RescanModels()), RescanModels, 0),
    )
    hasher = IdleHasher(
        settings.models,
        state / "node",
        is_busy=lambda: reporter.is_busy() or not sharing.sharing_state.shared or model_orders.is_working(),
        on_change=lambda: supervisor.send(encode(RescanModels()), RescanModels, 0),
    )
    parts = AgentParts(
        links=links,
        supervisor=supervisor,
        poll=poll,
        lease_manager=video.lease_manager,
        ray=video.ray,
        sharing=sharing,
        reporter=reporter,
        answers=answers,
        model_orders=model_orders,
        quantizer=quantizer,
        illegal_events=illegal_events,
    )
    agent = Agent(identity, version, hardware, parts, on_ready=on_ready, link_timeouts=link_timeouts or LinkTimeouts())
    engine_changed.subscribe(agent.on_engine_change)
    video_changed.subscribe(reporter.send_soon)
    effects.changed.subscribe(reporter.send)
    return Node(agent, supervisor, poll, video, sharing, reporter, model_orders, hasher)


def add_own_folder(settings: NodeSettings, state: Path) -> NodeSettings:
    """Return the settings with the node's own model folder, below `state`, as the last folder that is searched."""
    own = str(get_own_folder(state))
    return replace(settings, models=replace(settings.models, folders=(*settings.models.folders, own)))
