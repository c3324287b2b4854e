"""Node of the pool: the agent, and the engine process, which alone imports MLX."""
