"""State machine of video jobs and their leases. Pure functions, without I/O."""
