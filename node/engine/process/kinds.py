"""Kinds of engine and their modules. A kind is named, not imported: the agent lists kinds without a model library."""

from typing import Final

KINDS: Final = {"mlx": "node.engine.build", "scripted": "node.engine.scripted.engine"}
"""Name of the module that provides `build`, by engine kind."""
