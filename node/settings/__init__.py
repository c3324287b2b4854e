"""Settings of a node with their defaults and descriptions."""

from node.settings.agent import AgentSettings, SharingSettings, WorkerSettings
from node.settings.engine import AUTO, EngineSettings, MemorySettings, MlxSettings, ModelSettings, ScriptedSettings
from node.settings.node import (
    COORDINATOR_SECTIONS,
    SECTIONS,
    NodeSettings,
    apply_custom_tier,
    check_settings,
    choose_node_name,
    resolve_settings,
)

__all__ = [
    "AUTO",
    "COORDINATOR_SECTIONS",
    "SECTIONS",
    "AgentSettings",
    "EngineSettings",
    "MemorySettings",
    "MlxSettings",
    "ModelSettings",
    "NodeSettings",
    "ScriptedSettings",
    "SharingSettings",
    "WorkerSettings",
    "apply_custom_tier",
    "check_settings",
    "choose_node_name",
    "resolve_settings",
]
