"""State machine of video jobs and their leases. Pure."""
