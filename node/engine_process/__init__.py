"""Supervision of the engine process: start, restart, quarantine of models, environment and stderr."""
