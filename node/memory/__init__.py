"""Memory readings of this machine, and the cap that follows from them."""
