"""Test support for the engine: checkpoints, tokenizers, and a text engine that a test steps."""
