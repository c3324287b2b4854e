"""Speeds and memory of Macs, as far as placement needs them: prefill, decode, Metal's share of the memory.

Speeds are measurements of llama.cpp's users for a model of 7 billion parameters in 4 bits on Apple chips. Source: the
public table of llama.cpp for Apple Silicon, with prompts of 512 tokens and answers of 128. Speeds of MLX differ by
some tens of per cent, as do speeds of single machines; only the ratio between chips matters here. Prefill is bound by
compute, and its time grows with the active parameters. Decode is bound by memory reads of the active parameters and of
the KV caches of all running rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from node.engine.scheduling.rules.chunk_policy import ChunkPace
from node.engine.scripted.costs import DecodeLoad
from wire.units import GIB

MEASURED_BILLIONS = 6.74
"""Parameters of the measured model, in billions."""
MEASURED_BYTES = 3.83e9
"""Size of the measured model's weights, in bytes."""
BATCH_COST = 0.15
"""Time that each further row adds to a decode step, as a share of the time to read the weights."""
METAL_SHARE = 0.75
"""Metal limit of a Mac with more than `METAL_SMALL` bytes of RAM, as a share of the RAM.

This limit is the default cap of a node, because no other term is lower.
"""
METAL_SHARE_SMALL, METAL_SMALL = 2 / 3, 36 * GIB
"""Metal limit of a Mac with at most `METAL_SMALL` bytes of RAM, as a share of the RAM; and that RAM in bytes."""
BASE = 700 * 1024**2
"""Modelled footprint, in bytes, of an engine without models and chats."""


@dataclass(frozen=True, slots=True)
class Chip:
    """Speeds of an Apple chip in tokens per second, with the model of `MEASURED_BILLIONS` parameters in 4 bits."""

    prefill: float
    """Prompt tokens per second in prefill of the measured model."""
    decode: float
    """Generated tokens per second of one row of the measured model."""


CHIPS = MappingProxyType(
    {
        "M1": Chip(118, 14),
        "M1 Pro": Chip(266, 36),
        "M1 Max": Chip(530, 61),
        "M1 Ultra": Chip(1030, 84),
        "M2": Chip(180, 22),
        "M2 Pro": Chip(341, 39),
        "M2 Max": Chip(671, 66),
        "M2 Ultra": Chip(1238, 94),
        "M3": Chip(187, 21),
        "M3 Pro": Chip(344, 31),
        "M3 Max": Chip(760, 66),
        "M3 Ultra": Chip(1471, 92),
        "M4": Chip(221, 24),
        "M4 Pro": Chip(440, 51),
        "M4 Max": Chip(886, 83),
    }
)
"""Chips by the names that scenarios use."""


def compute_default_cap(memory: int) -> int:
    """Return the default cap, in bytes, of a Mac with `memory` bytes of RAM."""
    return int(memory * (METAL_SHARE_SMALL if memory <= METAL_SMALL else METAL_SHARE))


def compute_prefill_speed(chip: Chip, billions: float) -> float:
    """Return the prefill speed, in tokens per second, of a model with `billions` billion active parameters."""
    return chip.prefill * MEASURED_BILLIONS / billions


def estimate_step_seconds(chip: Chip, billions: float, rows: int, kv_bytes: float) -> float:
    """Return the seconds of one decode step of `rows` rows, whose KV caches have `kv_bytes` bytes.

    `billions` is the number of active parameters of the model, in billions.
    """
    read = billions / MEASURED_BILLIONS
    return (read * (1 + BATCH_COST * (rows - 1)) + kv_bytes / MEASURED_BYTES) / chip.decode


class ChipCosts:
    """Costs of the scripted engine on a chip (`node.engine.scripted.costs.EngineCosts`).

    `models` maps a model to its active parameters in billions and its KV bytes per token. A decode step reads the KV
    bytes of all committed tokens. With the same rows, its duration is therefore constant until a commitment grows.
    """

    free_prefill = False
    """Whether a prefill takes no time."""

    def __init__(self, chip: Chip, models: Mapping[str, tuple[float, int]]) -> None:
        self._chip = chip
        self._models = models
        self._paces = {
            name: ChunkPace(each=1 / compute_prefill_speed(chip, active)) for name, (active, _) in models.items()
        }

    def get_pace(self, model: str) -> ChunkPace:
        """Return the pace of a model's prefill chunks, which is a constant number of seconds per token.

        Raise `KeyError` for an unknown model.
        """
        return self._paces[model]

    def estimate_step_seconds(self, loads: Mapping[str, DecodeLoad]) -> float:
        """Return the seconds of a decode step of all rows: the sum of one step for each model.

        `loads` are the rows and tokens to decode, by model. Raise `KeyError` for an unknown model.
        """
        return sum(
            estimate_step_seconds(self._chip, self._models[name][0], load.rows, load.tokens * self._models[name][1])
            for name, load in loads.items()
        )
