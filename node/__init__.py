"""Node of the pool: the agent and its child processes. Only modules of `node.engine` import MLX."""

from host.imports import import_structlog

import_structlog()
