"""Memory readings of the machine and of processes, the limits computed from them, and their enforcement."""
