"""Videos: jobs that borrow memory from a Mac that can spare it."""
