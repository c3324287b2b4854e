"""Supervision of the engine process by the agent: start, restart, quarantine of models, environment and stderr."""
