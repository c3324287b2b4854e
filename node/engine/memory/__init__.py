"""Memory gate of the engine: readings, estimates, gated forwards, the emergency reserve and leak detection."""
