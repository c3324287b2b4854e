"""State of the coordinator: database, settings and access administration."""
