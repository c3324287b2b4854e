"""The engine process: the only place where a model runs."""
