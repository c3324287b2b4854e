"""Node of the pool: the agent, and the engine process, which alone imports MLX."""

from host.imports import import_structlog

import_structlog()
