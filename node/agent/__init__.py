"""Agent of a Mac: its connection to the coordinator, discovery, enrollment and identity."""
