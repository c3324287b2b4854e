"""Read the memory of the machine and of processes, compute memory limits from it, and enforce them."""
