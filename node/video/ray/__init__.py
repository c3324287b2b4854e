"""Ray of this Mac: its process, its driver and the messages between agent and driver."""
