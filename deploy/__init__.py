"""What is run beside the pool: the check of a Mac."""
