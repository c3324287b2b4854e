"""Memory gate of the engine: readings, estimates, gated forwards, the reserve and leak detection."""
