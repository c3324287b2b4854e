"""Memory readings of the machine and of processes, and the cap that follows from them."""
