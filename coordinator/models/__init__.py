"""Desired state of models: wishes, the reconciler that plans actions for them, and the loop that carries them out."""
