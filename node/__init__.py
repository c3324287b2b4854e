"""One Mac: the agent that never imports MLX, and the engine child that alone does."""
